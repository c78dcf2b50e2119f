"""The first wrong place of every run of a trace, and one line per arm that sums it up.

Other `Rules` give another verdict from the same file; what they mean is in `classes` and in docs/numerics.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from replayscope.inspector.classes import (
    CLASSES,
    NOISE_ARMS,
    RULES,
    Rules,
    asserted,
    bound,
    bugs,
    classify,
    dtype_of,
    floor,
    headline,
    region_floor,
)
from replayscope.inspector.metrics import metric
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import POINTS, SINGLE_POINTS, THRESHOLDS, RunInfo, Table, kind_of

__all__ = [
    "CLASSES", "RULES", "ArmRow", "Bug", "Rules", "Verdict", "all_bugs", "arm_table", "bound", "classify", "floor",
    "region_floor", "verdict",
]  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """A wrong place of a run.

    kind: 'oracle' (differs from its own semantics), 'exact' (differs from full where it must not), 'cached' (bytes of
    cached global entries changed; layer and position are None and value counts the entries).
    layer: None also for embed, final and logits. position: first row above the bound, None for topk and router, where
    value counts the rows. value: largest error of a row there; bound: what it exceeds.
    """

    run: int
    arm: str
    cut: int | None
    kind: str
    point: str
    layer: int | None
    position: int | None
    value: float
    bound: float

    @property
    def expected(self) -> bool:
        """True for an arm that is broken on purpose."""
        return self.arm.startswith("broken:")

    @property
    def where(self) -> str:
        """In words: 'layers.2.attn_out at position 32'."""
        name = self.point if self.layer is None else f"layers.{self.layer}.{self.point}"
        if self.kind == "cached":
            return "cached bytes changed"
        return name if self.position is None else f"{name} at position {self.position}"


@dataclass(frozen=True)
class Verdict:
    """bugs: the first of each run, by run. missed: runs broken on purpose in which no bug was found; unjudged: those
    that nothing could convict, for want of an oracle or of precision. notes: what limits the claims. asserted: whether
    'bug' is certain (fp64, or fp32 with audit) or needs an audit to be."""

    bugs: list[Bug] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asserted: bool = True
    unjudged: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No bug in an arm that is meant to be right, and every planted fault found."""
        return not self.missed and all(bug.expected for bug in self.bugs)


@dataclass(frozen=True)
class ArmRow:
    """One arm of a trace, the worst over its cuts.

    oracle, exact: largest relative L2 of a row against its oracle, and against full in the exact region. floor:
    largest noise floor, over the same rows as the arm's. window, window_floor: relative L2 of the window against full,
    and what of it is noise, per layer. kl_max: nats, and top1: rows whose most likely token changed, both from the cut
    on; changed, flips: rows whose top-k or experts changed, and with a margin inside the floor; all cuts together.
    replayed, cached, fresh: rows of the largest run. bugs: runs with a bug. None where nothing was compared.
    """

    arm: str
    semantics: str
    replay: int | None
    runs: list[int]
    oracle: float | None
    exact: float | None
    floor: float | None
    window: list[float | None]
    window_floor: list[float | None]
    kl_max: float | None
    top1: int | None
    changed: int | None
    flips: int | None
    replayed: int
    cached: int
    fresh: int
    bugs: int


def all_bugs(trace: TraceReader, rules: Rules = RULES) -> list[Bug]:
    """Every point and layer at which a run is wrong, by run, layer, position and point."""
    found = [
        Bug(run.index, run.arm, run.cut, "cached", "global_kv", None, None, float(run.cached_changed), 0.0)
        for run in trace.runs
        if run.cached_changed > 0
    ]
    for reference, bucket in (("oracle", "all"), ("full", "exact")):
        for point in _points(trace, reference):
            table = trace.table(reference, point)
            cells = bugs(trace, reference, point, rules)[:, :, table.bucket(bucket)]
            if not cells.any():
                continue
            limits = bound(trace, point, rules)
            for run, layer in np.argwhere(cells).tolist():
                found.append(_bug(trace.runs[run], reference, point, layer, table, float(limits[run, layer])))
    return sorted(found, key=_order)


def verdict(trace: TraceReader, rules: Rules = RULES) -> Verdict:
    """The first bug of every run, and what limits the claims."""
    first: dict[int, Bug] = {}
    for bug in all_bugs(trace, rules):
        first.setdefault(bug.run, bug)
    judged = [run.index for run in trace.runs if is_judged(trace, run, rules)]
    silent = [run.index for run in trace.runs if run.arm.startswith("broken:") and run.index not in first]
    missed, unjudged = ([i for i in silent if (i in judged) == told] for told in (True, False))
    return Verdict(list(first.values()), missed, list(_notes(trace, rules)), asserted(trace), unjudged)


def is_judged(trace: TraceReader, run: RunInfo, rules: Rules = RULES) -> bool:
    """Whether a fault anywhere in the run would have been seen: it has an oracle, and the precision allows a claim."""
    return run.oracle is not None and "oracle" in trace.references() and dtype_of(trace) in rules.bounds


def arm_table(trace: TraceReader, rules: Rules = RULES, judged: Verdict | None = None) -> list[ArmRow]:
    """One row per arm, semantics and replay length, in the order of the runs; full, the reference, has none.

    judged: the trace's verdict under these rules, where the caller has it already.
    """
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    for run in trace.runs:
        if run.arm != "full":
            groups.setdefault((run.arm, run.semantics, run.replay), []).append(run.index)
    wrong = {bug.run for bug in (judged or verdict(trace, rules)).bugs}
    floors = [
        np.fmax.reduce(region_floor(trace, point, rules=rules)[:, :, 0], axis=1) for point in _states(trace, "full")
    ]
    return [
        ArmRow(
            arm, semantics, replay, runs,
            oracle=_worst_row(trace, "oracle", "all", runs),
            exact=_worst_row(trace, "full", "exact", runs),
            floor=_most([worst[runs] for worst in floors]),
            window=_window(trace, runs),
            window_floor=_window_floor(trace, runs, rules),
            kl_max=_most(_cells(trace, "full", "logits", "kl_max", runs, "suffix")),
            top1=_count(trace, ("logits",), "flips", runs, "suffix"),
            changed=_count(trace, ("topk", "router"), "changed", runs),
            flips=_count(trace, ("topk", "router"), "flips", runs),
            replayed=max(trace.runs[i].replayed for i in runs),
            cached=max(trace.runs[i].cached for i in runs),
            fresh=max(trace.runs[i].fresh for i in runs),
            bugs=len(wrong & set(runs)),
        )
        for (arm, semantics, replay), runs in groups.items()
    ]  # fmt: skip


def _order(bug: Bug) -> tuple[int, float, float, int]:
    if bug.kind == "cached":
        return bug.run, -2, -1, 0
    single = math.inf if bug.point in ("final", "logits") else -1
    position = math.inf if bug.position is None else bug.position
    return bug.run, single if bug.layer is None else bug.layer, position, POINTS.index(bug.point)


def _bug(run: RunInfo, reference: str, point: str, layer: int, table: Table, limit: float) -> Bug:
    kind, bucket = ("oracle", "all") if reference == "oracle" else ("exact", "exact")
    arrays, at = table.arrays, (run.index, layer, table.bucket(bucket))
    where = None if point in SINGLE_POINTS else layer
    if table.kind == "discrete":
        rows = float(arrays["changed"][at] - arrays["flips"][at])
        return Bug(run.index, run.arm, run.cut, kind, point, where, None, rows, 0.0)
    rows_known = "rel_max" in arrays
    position = int(arrays["rel_max_row" if rows_known else "max_row"][at])
    if reference == "oracle" and "first_at" in arrays:
        # The first row above the bound is known to the next threshold; if none is that high, the worst row stands in.
        above = [i for i, threshold in enumerate(THRESHOLDS) if threshold >= limit]
        first = int(arrays["first_at"][run.index, layer, above[0]]) if above else -1
        position = first if first >= 0 else position
    value = metric(table, "rel_max" if rows_known else headline(table))[at]
    return Bug(run.index, run.arm, run.cut, kind, point, where, position, float(value), limit)


def _notes(trace: TraceReader, rules: Rules) -> Iterator[str]:
    dtype = dtype_of(trace)
    if not trace.complete:
        yield "the trace is partial: runs or points may be missing"
    if dtype not in rules.bounds:
        yield f"{dtype or 'an unknown dtype'} allows no claim of a bug; use --audit in fp64 or fp32"
    elif not asserted(trace):
        yield "recorded without --audit: in fp32 a flip of rounding can look like a bug; repeat it with --audit"
    yield from _not_finite(trace)
    if "oracle" not in trace.references():
        yield "no arm was compared with its oracle; faults outside the exact region cannot be seen"
    if not any(run.arm in NOISE_ARMS for run in trace.runs):
        yield "no noise runs: the floor was not measured; add repeat, rechunk or hit"
    elif dtype in rules.bounds:
        floors = {point: _most([floor(trace, point, rules=rules)]) or 0.0 for point in _states(trace, "full")}
        point, worst = max(floors.items(), key=lambda item: item[1], default=("", 0.0))
        if worst > 1e3 * rules.bounds[dtype]:
            frozen = bool(trace.provenance.get("audit"))
            why = "look at them first" if frozen else "choices or roundings flipped; --audit freezes them"
            yield f"runs that are equal on paper differ by up to {worst:.1e} ({point}): {why}"


def _not_finite(trace: TraceReader) -> Iterator[str]:
    """Where a run first holds a number that is not finite: no distance is known from there on."""
    for point in _states(trace, "full"):
        table = trace.table("full", point)
        first = table.arrays.get("first_nonfinite")
        if first is None:
            continue
        for run, layer in np.argwhere(first[:, :, table.bucket("all")] >= 0).tolist()[:1]:
            name = point if point in SINGLE_POINTS else f"layers.{layer}.{point}"
            row = int(first[run, layer, table.bucket("all")])
            yield f"not finite: {name} of {trace.runs[run].label} from position {row} on; nothing behind it is compared"
            return


def _points(trace: TraceReader, reference: str) -> list[str]:
    return trace.points(reference) if reference in trace.references() else []


def _states(trace: TraceReader, reference: str) -> list[str]:
    return [point for point in _points(trace, reference) if kind_of(point) == "state"]


def _cells(trace: TraceReader, reference: str, point: str, name: str, runs: list[int], bucket: str = "all") -> list:
    """A metric of some runs as a list of one array [run, layer], or [] where the trace has no such table."""
    if point not in _points(trace, reference):
        return []
    table = trace.table(reference, point)
    return [metric(table, name)[runs, :, table.bucket(bucket)]]


def _worst_row(trace: TraceReader, reference: str, bucket: str, runs: list[int]) -> float | None:
    points = _states(trace, reference)
    return _most([cells for p in points for cells in _cells(trace, reference, p, "rel_max", runs, bucket)])


def _window(trace: TraceReader, runs: list[int]) -> list[float | None]:
    cells = _cells(trace, "full", "window_kv", "rel_l2", runs, "window")
    return [_most([column]) for column in cells[0].T] if cells else []


def _window_floor(trace: TraceReader, runs: list[int], rules: Rules) -> list[float | None]:
    if "window_kv" not in _points(trace, "full"):
        return []
    table = trace.table("full", "window_kv")
    floors = region_floor(trace, "window_kv", rules=rules)[runs, :, table.bucket("window")]
    return [_most([column]) for column in floors.T]


def _count(trace: TraceReader, points: tuple[str, ...], name: str, runs: list[int], bucket: str = "all") -> int | None:
    """Rows counted by an array of the tables against full, over all layers."""
    tables = [trace.table("full", point) for point in points if point in _points(trace, "full")]
    return sum(int(t.arrays[name][runs, :, t.bucket(bucket)].sum()) for t in tables) if tables else None


def _most(values: list[np.ndarray]) -> float | None:
    """Largest of all numbers, None if there is none."""
    known = [v[~np.isnan(v)] for v in values]
    known = [v for v in known if v.size]
    return float(max(v.max() for v in known)) if known else None
