"""From results to a verdict, under any contract and without a model: every cell, every limit, then the whole.

`judge` is a pure function of results and contract; the command line, the report and the page show what it returns.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from replayscope.inspector.engines import ENGINES
from replayscope.inspector.errors import UsageError
from replayscope.inspector.judge_contract import COSTS, STATES, Contract, Limit, support
from replayscope.inspector.judge_limits import Name
from replayscope.inspector.judge_matrix import CONTROL, Run, engine_groups, groups, neighbours
from replayscope.inspector.judge_results import Results
from replayscope.inspector.judge_stats import Drop, Interval, bootstrap, compare, holm, pairs_needed
from replayscope.inspector.judge_values import Costs, by_step, spread, values_of
from replayscope.inspector.names import counted, short

ACCEPT, DECODER_ONLY = "accept", "accept decoder replay only"
REFUSE, LACKING = "refuse", "not enough evidence"
ROLL_BACK = ("off", "decoder", "encoder")
# Of a cell or a limit: within, over, or neither can be said.
PASS, FAIL, OPEN = "pass", "fail", "open"


@dataclass(frozen=True)
class Checked:
    """One limit in one cell (or, for costs, one arm). state: pass, fail or open."""

    limit: Limit
    where: str
    interval: Interval
    state: str

    @property
    def text(self) -> str:
        return f"{self.limit.text}: {self.interval.value:.3g} [{self.interval.low:.3g}, {self.interval.high:.3g}]"


@dataclass(frozen=True)
class Cell:
    """One arm at one cut over the prompts of a group.

    success: share of prompts that full answers; drop: paired with it; blind: full succeeds too seldom to show a drop.
    needed: pairs that would settle it if nothing dropped. faults: what proves the run wrong or void, in words.
    idle: no hit is longer than its replay, so that nothing can differ. adjusted: McNemar's p among all cells (Holm).
    state: the worst of its parts; why: in words, the worst first.
    spread: metric → mean, q50, q95, max; by_step: agreement and KL along the output.
    """

    name: str
    parts: Name
    success: float
    drop: Drop
    blind: bool
    idle: bool
    needed: int
    budget: float
    adjusted: float
    checks: tuple[Checked, ...]
    faults: tuple[str, ...]
    state: str
    why: tuple[str, ...]
    kl: Interval
    spread: Mapping[str, list[float]]
    by_step: Mapping[str, list[float]]

    @property
    def control(self) -> bool:
        """Whether it is a hit with its window kept: the measure of the noise, not what is judged."""
        return self.parts.arm == CONTROL


@dataclass(frozen=True)
class Judgement:
    """verdict: accept, accept decoder replay only, refuse or not enough evidence. arms: state of each. notes: what
    limits the claim. rerun: words of the command that runs such cells, without their name."""

    verdict: str
    arms: Mapping[str, str]
    cells: list[Cell]
    costs: list[Checked]
    prices: Mapping[str, Mapping[str, float]]
    reasons: list[str]
    notes: list[str]
    stamp: str
    rerun: tuple[str, ...]
    samples: tuple[int, int] = field(default=(0, 0))

    @property
    def ok(self) -> bool:
        return self.verdict == ACCEPT

    @property
    def judged(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.control]

    def worst(self, count: int = 10) -> list[Cell]:
        """Cells that did not pass, the surest failures first."""
        bad = [cell for cell in self.judged if cell.state != PASS]
        rank = {FAIL: 0, OPEN: 1}
        return sorted(bad, key=lambda c: (rank[c.state], not c.faults, c.adjusted, -c.drop.drop, -c.kl.value))[:count]


def judge(results: Results, contract: Contract, unfrozen: bool = False, source: str | None = None) -> Judgement:
    """Judge a matrix. Raises UsageError if the runs began with another contract, unless ``unfrozen``.

    source: where the contract is, for commands; by default where it was when the runs began.
    """
    began = results.header["contract"]
    notes = [f"{contract.stamp}, runs of {results.header['model']}"]
    if began["sha256"] != contract.sha256:
        if not unfrozen:
            raise UsageError(
                f"the runs began under contract {short(began['name'])} ({began['sha256'][:12]}), this one is "
                f"{short(contract.name)} ({contract.sha256[:12]}); give that one, or add --unfrozen to judge under one "
                "written afterwards"
            )
        notes.append("judged under a contract that is not the one the runs began with: it may know their outcome")
    elif not began["frozen"]:
        notes.append("the contract was not frozen before the runs began")
    if plants := results.header.get("plants"):
        notes.append(f"planted on purpose: {', '.join(f'{arm} in {cell}' for cell, arm in plants.items())}")
    notes += results.header.get("notes", [])
    if not results.complete:
        notes.append("the results are partial: the runs did not finish")
    served = support(contract)
    notes += served.notes
    cells = _cells(results, contract)
    costs = Costs(results, contract.evidence)
    checked = [
        _check(limit, arm, costs.interval(limit.metric, limit.statistic, arm), ratio=True)
        for limit in contract.limits
        if limit.metric in COSTS
        for arm in costs.arms
        if arm != CONTROL and fnmatchcase(arm, limit.arm)
    ]
    arms = _arms(cells, checked)
    verdict, reasons = _whole(arms, cells, checked, contract, results)
    counts = [cell.drop.n for cell in cells if not cell.control]
    return Judgement(
        verdict, arms, cells, checked, costs.table(), reasons, notes, contract.stamp,
        _rerun(results.header, source or results.header.get("made", {}).get("source", contract.name)),
        (min(counts, default=0), max(counts, default=0)),
    )  # fmt: skip


def _rerun(header: Mapping[str, Any], source: str) -> tuple[str, ...]:
    words = ["replayscope", "judge", "run", source]
    if engine := header.get("endpoint"):
        words += ["--endpoint", engine["url"], "--engine-model", header["model"]]
        words += ["--engine-semantics", engine["semantics"], "--cache-block", str(engine["block"])]
        return (*words, *(["--salt"] if engine["salt"] else []))
    words += ["-m", header["model"]]
    dtype = {"float64": "fp64", "bfloat16": "bf16"}.get(header.get("dtype", ""))
    words += ["--dtype", dtype] if dtype else []
    return (*words, *(w for cell, arm in header.get("plants", {}).items() for w in ("--plant", f"{cell}={arm}")))


def _cells(results: Results, contract: Contract) -> list[Cell]:
    found: dict[tuple[str, str], list[tuple[dict, dict]]] = {}
    for prompt in results.prompts:
        full = next(run for run in prompt["runs"] if run["run"] == "full")
        for run in prompt["runs"]:
            if run is not full:
                found.setdefault((prompt["group"], run["run"]), []).append((full | {"seed": prompt["seed"]}, run))
    drafts = [_draft(contract, at, pairs, found) for at, pairs in found.items()]
    # One family: every cell that is judged. Controls are no claims.
    judged = [i for i, draft in enumerate(drafts) if draft["parts"].arm != CONTROL]
    adjusted = dict(zip(judged, holm([drafts[i]["drop"].p for i in judged]), strict=True))
    return [_settled(draft, adjusted.get(i, 1.0), contract) for i, draft in enumerate(drafts)]


Pairs = list[tuple[dict, dict]]


def _draft(contract: Contract, at: tuple[str, str], pairs: Pairs, found: Mapping[tuple[str, str], Pairs]) -> dict:
    """Numbers of one cell, not yet put together."""
    e, name = contract.evidence, Name.of(*at)
    valid = [(full, run) for full, run in pairs if not run.get("void")]
    reference = np.array([full["exact"] for full, _ in valid], bool)
    arm = np.array([run["exact"] for _, run in valid], bool)
    beside = [found.get((at[0], n.label), []) for n in neighbours(Run(name.arm, name.semantics, name.cut))]
    values = values_of(valid, [some for pairs in beside if (some := [p for p in pairs if not p[1].get("void")])])

    def interval(metric: str, statistic: str) -> Interval:
        return bootstrap(values.get(metric, []), statistic, e.confidence, e.resamples, e.seed)

    checks = []
    for limit in contract.limits:
        if limit.metric in COSTS or not name.matches(limit):
            continue
        for key in _keys(limit, values):
            checks.append(_check(limit, key, interval(key, limit.statistic)))
    return {
        "name": "/".join(at),
        "parts": name,
        "drop": compare(reference, arm, e.confidence),
        "success": float(reference.mean()) if len(reference) else math.nan,
        "checks": tuple(checks),
        "faults": tuple(_faults(pairs)),
        "void": [run["void"] for _, run in pairs if run.get("void")],
        "kl": interval("kl", "mean"),
        "spread": spread(values),
        "by_step": by_step(valid),
        "idle": name.arm == "encoder" and all(run["replayed"] == run["cached"] for _, run in pairs),
        "new": [full["seed"] for full, run in valid if full["exact"] and not run["exact"]],
    }


def _keys(limit: Limit, values: Mapping[str, Any]) -> list[str]:
    """Names of the values that a limit is about: of states one for each layer and region that it selects."""
    if limit.metric not in STATES:
        return [limit.metric] if limit.metric in values else []
    out = []
    for key in values:
        point, _, rest = key.partition(".")
        region, _, layer = rest.partition(".")
        if point == limit.metric and fnmatchcase(region, limit.region) and fnmatchcase(layer, limit.layer):
            out.append(key)
    return out


def _check(limit: Limit, where: str, found: Interval, ratio: bool = False) -> Checked:
    if found.n == 0 or math.isnan(found.value):
        state = OPEN
    elif limit.statistic == "max" or found.high <= limit.at_most:
        state = PASS if found.value <= limit.at_most else FAIL
    else:
        state = FAIL if found.low > limit.at_most else OPEN
    return Checked(limit, where, found, state)


def _faults(pairs: Pairs) -> Iterable[str]:
    """What no statistic excuses: cached bytes that changed, rows that are not those of the arm."""
    changed = sum(run.get("changed", 0) > 0 for _, run in pairs)
    if changed:
        yield f"cached entries changed in {changed} of {counted(len(pairs), 'prompt')}"
    for key, place in (("replayed", 0), ("cached", 1)):
        wrong = [run for _, run in pairs if "planned" in run and run[key] != run["planned"][place]]
        if wrong:
            yield f"{key} {wrong[0][key]} tokens where {wrong[0]['planned'][place]} belong to the arm"


def _settled(draft: dict, adjusted: float, contract: Contract) -> Cell:
    e, drop, parts = contract.evidence, draft["drop"], draft["parts"]
    budget = contract.budget(parts.task)
    task = parts.task
    critical = any(fnmatchcase(task, glob) or task.split(".")[0] == glob for glob in contract.critical)
    blind = not draft["success"] >= e.reference
    needed = pairs_needed(budget, e.confidence, round((drop.worse + drop.better) / drop.n, 2) if drop.n else 0.0)
    said: list[tuple[str, str]] = [(FAIL, fault) for fault in draft["faults"]]
    if draft["void"]:
        said.append(
            (OPEN, f"{len(draft['void'])} of {counted(drop.n + len(draft['void']), 'prompt')} void: {draft['void'][0]}")
        )
    counts = f"{counted(drop.worse, 'prompt')} got worse and {drop.better} better of {drop.n}"
    if critical and drop.worse:
        said.append(
            (FAIL, f"critical task: {counted(drop.worse, 'new failure')}, seed {', '.join(map(str, draft['new'][:5]))}")
        )
    if drop.low > budget:
        said.append((FAIL, f"success drops by {drop.drop:.1%} [{drop.low:.1%}, {drop.high:.1%}], over {budget:.1%}"))
    elif blind and drop.n:
        said.append((OPEN if critical else PASS, f"blind: full itself succeeds in {draft['success']:.0%}"))
    elif drop.high > budget:
        said.append((OPEN, f"{counts}: a drop of {drop.high:.1%} is possible; about {needed} prompts are needed"))
    said += [(check.state, check.text) for check in draft["checks"] if check.state != PASS]
    rank = {FAIL: 0, OPEN: 1, PASS: 2}
    said.sort(key=lambda item: rank[item[0]])
    state = said[0][0] if said else PASS
    return Cell(
        draft["name"], parts, draft["success"], drop, blind, draft["idle"], needed, budget, adjusted, draft["checks"],
        draft["faults"], state, tuple(text for _, text in said), draft["kl"],
        draft["spread"], draft["by_step"],
    )  # fmt: skip


def _arms(cells: Sequence[Cell], costs: Sequence[Checked]) -> dict[str, str]:
    """State of each arm: that of the worst of its cells and conditions; open where all are blind or idle."""
    out: dict[str, str] = {}
    for arm in dict.fromkeys(cell.parts.arm for cell in cells if not cell.control):
        own = [cell for cell in cells if cell.parts.arm == arm]
        states = {cell.state for cell in own} | {check.state for check in costs if check.where == arm}
        sees = any(not cell.blind and not cell.idle for cell in own)
        out[arm] = FAIL if FAIL in states else OPEN if OPEN in states or not sees else PASS
    return out


def _whole(
    arms: Mapping[str, str], cells: Sequence[Cell], costs: Sequence[Checked], contract: Contract, results: Results
) -> tuple[str, list[str]]:
    served, reasons = support(contract), list[str]()
    if served.refused:
        return REFUSE, list(served.refused)
    bad = [cell for cell in cells if cell.control and cell.state != PASS]
    if bad:
        reasons.append(
            f"the control, a hit with its window kept, does not pass in {counted(len(bad), 'cell')}: {bad[0].name}"
        )
    reasons += served.unknown
    for arm, state in arms.items():
        own = [c for c in cells if c.parts.arm == arm]
        counts = {s: sum(c.state == s for c in own) for s in (FAIL, OPEN)}
        if state != PASS:
            reasons.append(f"{arm}: {counts[FAIL]} of {counted(len(own), 'cell')} fail, {counts[OPEN]} open")
        if all(c.blind for c in own):
            reasons.append(f"{arm}: every cell is blind, full succeeds too seldom to show a drop")
        if all(c.idle for c in own):
            reasons.append(f"{arm}: no hit is longer than what is replayed, so nothing can differ; give longer prompts")
    reasons += [f"{check.where}: {check.text}" for check in costs if check.state != PASS]
    alone = [name for name in contract.semantics if ENGINES[name].needs_encoder]
    states = set(arms.values())
    missing = _missing(cells, contract, results)
    unseen = [one for one in _unseen(cells, costs, contract) if one.arm not in results.header.get("without", ())]
    reasons += [f"nothing was measured for the limit {limit.text}" for limit in unseen]
    if missing or not results.complete:
        reasons.append(f"{missing} of the contract did not run" if missing else "the runs did not finish")
    open_ = bool(bad or served.unknown or not results.complete or missing or unseen or not arms)
    if FAIL not in states and (open_ or OPEN in states):
        return (DECODER_ONLY if _decoder(arms, alone) and not open_ else LACKING), reasons
    if FAIL not in states:
        return ACCEPT, reasons
    if _decoder(arms, alone) and not open_:
        return DECODER_ONLY, reasons
    if arms.get("decoder") == PASS and alone:
        reasons.append(f"{', '.join(alone)} has no decoder replay without encoder replay")
    return REFUSE, reasons


def _missing(cells: Sequence[Cell], contract: Contract, results: Results) -> str:
    """How many cells that the contract asks for are not in the results, in words; empty if none. Controls, which
    `judge plan` does not count, are named only where nothing else is missing."""
    have, engine = {cell.name for cell in cells}, results.header.get("endpoint")
    without = results.header.get("without", ())
    asked = engine_groups(contract, "*", engine["semantics"]) if engine else groups(contract, "*", without)
    missing = [run for group in asked for run in group.runs if group.cell(run) not in have]
    judged = sum(run.arm != CONTROL for run in missing)
    return counted(judged, "cell") if judged else counted(len(missing), "control") if missing else ""


def _unseen(cells: Sequence[Cell], costs: Sequence[Checked], contract: Contract) -> list[Limit]:
    """Limits that no number was held against: states of an engine, or a layer that the model does not have."""
    seen = {check.limit for cell in cells for check in cell.checks} | {check.limit for check in costs}
    return [limit for limit in contract.limits if limit not in seen]


def _decoder(arms: Mapping[str, str], alone: Sequence[str]) -> bool:
    """Whether decoder replay can be switched on by itself: it passed, and the engine has it without the encoder's."""
    return arms.get("decoder") == PASS and not alone
