"""What is measured per prompt, taken out of a results file: numbers of a cell, and what an arm costs."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from replayscope.inspector.judge_contract import Evidence
from replayscope.inspector.judge_results import Results
from replayscope.inspector.judge_stats import Interval, bootstrap, statistic

Pairs = Sequence[tuple[dict, dict]]


def values_of(pairs: Pairs, beside: Sequence[Pairs] = ()) -> dict[str, list[float]]:
    """metric → one number per prompt, of (full, arm) pairs; states as 'window_kv.window.0'.

    beside: the pairs of the cells at the neighbouring cuts; the jump is over prompts that ran at all of them.
    """
    out: dict[str, list[float]] = {}
    for full, run in pairs:
        numbers: dict[str, float] = {"share": full["share"] - run["share"]}
        for key in ("kl", "kl_free"):
            if run.get(key):
                steps = [math.inf if v is None else v for v in run[key]]
                numbers[key] = sum(steps) / len(steps)
                if key == "kl":
                    numbers["kl_max"] = max(steps)
        for key, name in (("differs", "disagreement"), ("sampled", "sampled")):
            if run.get(key):
                numbers[name] = sum(run[key]) / len(run[key])
        for name, layers in run.get("states", {}).items():
            numbers |= {f"{name}.{l}": v for l, v in enumerate(layers) if v is not None}
        for key, value in numbers.items():
            out.setdefault(key, []).append(value)
    if beside and (jumps := _jumps(pairs, beside)):
        out["jump"] = jumps
    return out


def spread(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """metric → mean, q50, q95 and max over the prompts, of all that is no state."""
    return {
        key: [float(f(np.asarray(v))) for f in map(statistic, ("mean", "q50", "q95", "max"))]
        for key, v in values.items()
        if "." not in key
    }


def by_step(pairs: Pairs) -> dict[str, list[float]]:
    """Along the output, over the prompts that got so far: share whose greedy token is full's, mean forced KL; and the
    earliest step that differs, per prompt that does, as 'first'."""
    steps = max((len(run.get("differs", ())) for _, run in pairs), default=0)
    told: dict[str, list[float]] = {"agreement": [], "kl": [], "first": []}
    for step in range(steps):
        apart = [run["differs"][step] for _, run in pairs if len(run.get("differs", ())) > step]
        kl = [run["kl"][step] for _, run in pairs if len(run.get("kl", ())) > step]
        told["agreement"].append(1 - float(np.mean(apart)))
        told["kl"].append(float(np.mean([math.inf if v is None else v for v in kl])) if kl else math.nan)
    told["first"] = sorted(run["differs"].index(1) for _, run in pairs if 1 in run.get("differs", ()))
    return told


def _jumps(pairs: Pairs, beside: Sequence[Pairs]) -> list[float]:
    def kl(some: Pairs) -> dict[int, float]:
        return {full["seed"]: values_of([(full, run)]).get("kl", [math.nan])[0] for full, run in some}

    own, others = kl(pairs), [kl(some) for some in beside]
    seeds = [seed for seed in own if all(seed in other for other in others)]
    return [own[seed] - float(np.mean([other[seed] for other in others])) for seed in seeds]


class Costs:
    """Times of the prompts that were timed alone. arms: those that were."""

    def __init__(self, results: Results, evidence: Evidence) -> None:
        self.lines, self.e = results.costs, evidence
        self.arms = list(dict.fromkeys(arm for line in self.lines for arm in line["arms"] if arm != "full"))
        right: dict[str, list[bool]] = {}
        for prompt in results.prompts:
            for run in prompt["runs"]:
                if not run.get("void"):
                    right.setdefault(run["run"].split("/")[0], []).append(run["exact"])
        self.success = {arm: float(np.mean(exact)) for arm, exact in right.items()}

    def ratios(self, metric: str, arm: str) -> list[float]:
        """Arm over full, one per prompt timed. cost: of a successful task, so that failures make the others dearer."""
        out = []
        for line in self.lines:
            if arm in line["arms"]:
                a, r = (_seconds(line["arms"][name], metric) for name in (arm, "full"))
                out.append(a / r)
        if metric == "cost":
            lost = self.success.get(arm, 0.0)
            scale = self.success.get("full", math.nan) / lost if lost else math.nan
            return [] if math.isnan(scale) else [v * scale for v in out]
        return out

    def interval(self, metric: str, statistic: str, arm: str) -> Interval:
        return bootstrap(self.ratios(metric, arm), statistic, self.e.confidence, self.e.resamples, self.e.seed)

    def table(self) -> dict[str, dict[str, float]]:
        """Per arm: means over the prompts timed; ratios are arm over full, rates are per second."""
        out: dict[str, dict[str, float]] = {}
        for arm in ("full", *self.arms) if self.lines else ():
            some = [line["arms"][arm] for line in self.lines if arm in line["arms"]]
            first = np.array([one["ttft"] for one in some])
            row = {
                "prompts": float(len(some)),
                **{key: float(np.mean([one.get(key, math.nan) for one in some])) for key in _COUNTS},
                "prefill_per_s": float(np.sum([one.get("replayed", 0) + one["fresh"] for one in some]) / first.sum()),
                "decode_per_s": float(1 / max(np.mean([one["per_token"] for one in some]), 1e-9)),
            }
            row |= {f"ttft_p{q}": float(np.quantile(first, q / 100, method="higher")) for q in (50, 95, 99)}
            if arm != "full":
                row |= {m: float(np.median(self.ratios(m, arm) or [math.nan])) for m in ("ttft", "total", "cost")}
            out[arm] = row
        return out


_COUNTS = ("replayed", "cached", "fresh", "global_bytes", "window_bytes")


def _seconds(one: Mapping[str, float], metric: str) -> float:
    return one["ttft"] if metric == "ttft" else one["ttft"] + one["steps"] * one["per_token"]
