"""The table that a run ends with: one row per arm, and the verdict in one line."""

from typing import Any

from replayscope.inspector.classes import RULES, dtype_of
from replayscope.inspector.layer_kinds import by_kind, layer_kinds
from replayscope.inspector.smooth import SmoothShare, smooth_shares
from replayscope.inspector.verdict import ArmRow, Verdict, arm_table, is_judged, verdict
from replayscope.traces.reader import TraceReader

# Products of other shapes differ by this much, whether or not a noise run happened to show it in the region.
_TINY = {"float64": 1e-14, "float32": 1e-6}
_HEAD = ("arm", "runs", "vs oracle", "in exact", "floor", "window KV by layer", "KL max", "top-1", "flips", "replayed",
         "cached", "fresh", "bugs")  # fmt: skip


def arms_text(trace: TraceReader) -> tuple[str, dict[str, Any], bool]:
    """The table as text, the same as JSON data, and whether the verdict is good."""
    judged, kinds = verdict(trace), layer_kinds(trace.config)
    rows = arm_table(trace, judged=judged)
    tiny = _TINY.get(dtype_of(trace), 0.0)
    cells = [_HEAD, *(_cells(row, tiny) for row in rows)]
    widths = [max(len(r[i]) for r in cells) for i in range(len(_HEAD))]
    left = {0, 5}
    lines = [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in cells
    ]
    lines.insert(1, "  ".join("─" * w for w in widths))
    lines.append("")
    lines.append(
        "window KV by layer, from layer 0: relative L2 in [H-W, H), the worst cut; 0 identical, ~ inside the floor"
        + (", · a global layer" if "global" in kinds else "")
    )
    if len(set(kinds)) > 1:
        lines.append("layers: " + "; ".join(f"{kind} {layers}" for kind, layers in by_kind(kinds).items()))
    smooth = smooth_shares(trace)
    data = {
        "layer_kinds": list(kinds),
        "arms": [row.__dict__ for row in rows],
        "smooth": [s.__dict__ for s in smooth],
        "verdict": {
            "ok": judged.ok,
            "notes": judged.notes,
            "missed": judged.missed,
            "unjudged": judged.unjudged,
            "bugs": [b.__dict__ for b in judged.bugs],
        },
    }
    return "\n".join([*lines, *verdict_lines(trace, judged, smooth)]), data, judged.ok


def verdict_lines(trace: TraceReader, judged: Verdict, smooth: list[SmoothShare]) -> list[str]:
    """What was found: bugs in right arms, planted faults, and what limits the claims."""
    unexpected = [b for b in judged.bugs if not b.expected]
    planted = [r for r in trace.runs if r.arm.startswith("broken:")]
    out = []
    for b in unexpected:
        out.append(f"BUG   {trace.runs[b.run].label}: {b.where}, {b.value:.1e} over {b.bound:.1e} ({b.kind})")
    if not unexpected:
        out.append(f"right arms: {_right_arms(trace)}")
    if planted:
        found = {b.run for b in judged.bugs}
        rest = (
            f", {len(judged.unjudged)} not judged (no oracle, or no claim in this precision)" if judged.unjudged else ""
        )
        out.append(f"planted faults: {sum(r.index in found for r in planted)} of {len(planted)} found{rest}")
        out += [f"MISSED {trace.runs[i].label}" for i in judged.missed]
    out += _smooth_lines(smooth)
    return out + [f"note: {n}" for n in judged.notes]


def _right_arms(trace: TraceReader) -> str:
    """What may be said of arms in which no bug was found: it depends on what they were held against."""
    right = [r for r in trace.runs if r.arm != "full" and not r.arm.startswith(("broken:", "oracle:"))]
    if not right and not any(r.arm.startswith("oracle:") for r in trace.runs):
        return "none ran but full, which was held against nothing"
    if dtype_of(trace) not in RULES.bounds:
        return f"not judged, {dtype_of(trace)} allows no claim"
    told = sum(is_judged(trace, r) for r in right)
    if told == len(right):
        return "no bug"
    exact = "nothing wrong in the exact region"
    return f"no bug in {told} of {len(right)} runs, {exact} in the others" if told else f"{exact}; no oracle ran"


def _smooth_lines(shares: list[SmoothShare]) -> list[str]:
    """Per arm that also ran with full's choices: how much of its divergence that leaves."""
    by_arm: dict[str, list[str]] = {}
    for s in shares:
        place = {"window": "in the window", "suffix": "from H on"}[s.region]
        name = s.arm if s.semantics == "paper" else f"{s.arm} {s.semantics}"
        by_arm.setdefault(name, []).append(f"{s.point} {place} {s.share:.0%}")
    return [
        f"smooth share of {arm}, the rest comes from changed top-k and experts: {', '.join(parts)}"
        for arm, parts in by_arm.items()
    ]


def _cells(row: ArmRow, tiny: float) -> tuple[str, ...]:
    layers = "–"
    if any(v is not None for v in row.window):
        layers = " ".join(_layer(v, f, tiny) for v, f in zip(row.window, row.window_floor, strict=True))
    name = row.arm if row.replay is None else f"{row.arm} R={row.replay}"
    name += "" if row.semantics == "paper" else f" {row.semantics}"
    return (
        *(name, str(len(row.runs)), _number(row.oracle), _number(row.exact), _number(row.floor), layers),
        *(_number(row.kl_max), _count(row.top1), _count(row.flips)),
        *map(str, (row.replayed, row.cached, row.fresh, row.bugs)),
    )


def _layer(value: float | None, floor: float | None, tiny: float) -> str:
    """Three places: 0 identical, ~ noise, otherwise two digits (.34), or the power of ten of what is smaller (e-5)."""
    if value is None:
        return "  ·"
    if value == 0:
        return "  0"
    if value <= max(floor or 0.0, tiny):
        return "  ~"
    if value >= 0.995:
        return f"{value:3.0f}"
    return f"{value:.2f}"[1:] if value >= 0.01 else f"{value:.0e}"[1:].replace("e-0", "e-")


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)
