"""The logits of one run, row by row: divergence, flips, and the most likely tokens of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replayscope.inspector import verdict
from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import logits_sums, metric, metrics_of
from replayscope.traces import TraceReader
from replayscope.traces.schema import RunInfo, Table
from replayscope.ui import states
from replayscope.ui.cells import checked_points, row_grid
from replayscope.ui.grid import DESIGN, FLIP, IDENTICAL, NOISE
from replayscope.ui.states import NotRecorded

ROW_METRICS = ("kl", "kl_rev", "js", "dlogp")
MOST_READ = 64  # flips whose raw logits are read one by one to learn their margin


@dataclass(frozen=True)
class Flip:
    """A row whose most likely token changed.

    margin: gap between the reference's two largest logits there, None if it is not known. noise: by how much two runs
    that are equal on paper may move such a gap, None if unknown. inside: whether the margin lies within it.
    """

    position: int
    margin: float | None
    noise: float | None

    @property
    def inside(self) -> bool | None:
        """None if it cannot be told."""
        return None if self.margin is None or self.noise is None else self.margin <= self.noise


@dataclass(frozen=True)
class LogitRows:
    """Logits of one run against a reference, row by row: arrays [row], NaN where nothing was compared.

    value, floor: by the name of a metric; kind: class of each row. flips: in order of position.
    """

    info: RunInfo
    reference: str
    position: np.ndarray
    value: dict[str, np.ndarray]
    floor: dict[str, float]
    kind: np.ndarray
    flips: tuple[Flip, ...] = field(default_factory=tuple)


def logit_rows(trace: TraceReader, info: RunInfo, reference: str = "full") -> LogitRows:
    """From the row tables, or else from the raw logits of both sides.

    Raises NotRecorded, with the option to record with, if the trace has neither.
    """
    points = checked_points(trace, reference)
    floor = {name: _floor(trace, name, info) for name in ROW_METRICS} if "logits" in points else {}
    if "logits" in points and "logits" in trace.row_points(reference):
        table = trace.rows(reference, "logits", info.index)
        value = {name: metric(table, name)[0] for name in ROW_METRICS if name in metrics_of(table)}
        flip = table.arrays["flips"][0] > 0
        kind = row_grid(trace, info, "logits", "kl", reference).kind[0]
        return _rows(trace, info, reference, table.position, value, floor, kind, flip)
    other = states.other_run(trace, info, reference)
    try:
        states.need(trace, (info.index, other), "logits")
    except NotRecorded:
        raise NotRecorded(
            f"{trace.path} keeps the logits neither row by row nor raw; record it with --rows or --hooks logits"
        ) from None
    position = trace.positions(info.index, "logits")
    both = states.pair(trace, info.index, other, "logits", position)
    ids = trace.tokens.ids
    following = np.array([ids[p + 1] if p + 1 < len(ids) else -1 for p in position], np.int64)
    sums = logits_sums(both.arm[:, 0], both.ref[:, 0], following)
    value = {name: sums[name] for name in ROW_METRICS}
    with np.errstate(invalid="ignore"):
        kind = np.where(value["kl"] <= floor.get("kl", -1.0), NOISE, DESIGN)
    kind = np.where(value["kl"] == 0, IDENTICAL, kind)
    flip = sums["flip"] > 0
    return _rows(trace, info, reference, position, value, floor, np.where(flip, FLIP, kind), flip)


def _rows(
    trace: TraceReader, info: RunInfo, reference: str, position: np.ndarray, value: dict[str, np.ndarray],
    floor: dict[str, float], kind: np.ndarray, flip: np.ndarray,
) -> LogitRows:  # fmt: skip
    at = [int(p) for p in position[flip]]
    margins = _margins(trace, info, reference, at)
    noise = gap_noise(trace, info)
    flips = tuple(Flip(p, margins.get(p), noise) for p in at)
    return LogitRows(info, reference, position, value, floor, kind.astype(str), flips)


def gap_noise(trace: TraceReader, info: RunInfo) -> float | None:
    """By how much noise may move the gap between two logits: each of them by the largest abs change of the noise runs.

    None where no noise run was compared, or only its KL was kept.
    """
    if "full" not in trace.references() or "logits" not in trace.points("full"):
        return None
    if "max_abs" not in metrics_of(trace.table("full", "logits")):
        return None
    largest = float(verdict.floor(trace, "logits", "max_abs")[info.index, 0])
    return None if np.isnan(largest) else 2 * largest


def _floor(trace: TraceReader, name: str, info: RunInfo) -> float:
    """What a single row of the noise runs reaches."""
    return float(np.abs(verdict.floor(trace, "logits", f"{name}_max")[info.index, 0]))


def _margins(trace: TraceReader, info: RunInfo, reference: str, at: list[int]) -> dict[int, float]:
    """Position -> margin of the reference: from its raw logits where they are stored, or else of every flip that is the
    only one in a region whose smallest margin the trace keeps."""
    try:
        other = states.other_run(trace, info, reference)
        states.need(trace, (other,), "logits")
    except NotRecorded:
        if "logits" not in trace.points(reference):
            return {}
        return _lone_margins(trace.table(reference, "logits"), info, at)
    found = {}
    for position in at[:MOST_READ]:
        row = states.rows(trace, other, "logits", np.array([position]))[0, 0]
        if np.isfinite(row).sum() > 1:
            first, second = np.sort(row[np.isfinite(row)])[:-3:-1]
            found[position] = float(first - second)
    return found


def _lone_margins(table: Table, info: RunInfo, at: list[int]) -> dict[int, float]:
    found = {}
    for name, lowest in zip(table.buckets, table.arrays["min_flip_margin"][info.index, 0], strict=True):
        if not name.startswith("d:") or np.isnan(lowest):
            continue
        first, last = (info.start + int(end) for end in name[2:].split("-"))
        inside = [p for p in at if first <= p <= last]
        if len(inside) == 1:
            found[inside[0]] = float(lowest)
    return found


@dataclass(frozen=True)
class Candidate:
    """A token among the most likely: its place (1 is the most likely, None below the list), probability and logit on
    each side."""

    token: int
    text: str | None
    ref_rank: int | None
    arm_rank: int | None
    ref_p: float
    arm_p: float
    ref_logit: float
    arm_logit: float


@dataclass(frozen=True)
class TopK:
    """The most likely next tokens after a position, on both sides, by the reference's probability.

    ref_margin, arm_margin: gap of the two largest logits. noise: what noise may move a gap by, None if unknown.
    follows: the token that really follows, None at the end.
    """

    position: int
    candidates: tuple[Candidate, ...]
    ref_margin: float
    arm_margin: float
    flipped: bool
    noise: float | None
    follows: int | None

    @property
    def inside(self) -> bool | None:
        """Whether the reference's margin lies within the noise; None if unknown."""
        return None if self.noise is None else self.ref_margin <= self.noise


def top_k(trace: TraceReader, info: RunInfo, position: int, reference: str = "full", k: int = 8) -> TopK:
    """The k most likely tokens of either side after `position`. Reads that one row of each.

    Raises NotRecorded where the raw logits of a side are not stored, UsageError for a position that the run has not.
    """
    other = states.other_run(trace, info, reference)
    states.need(trace, (info.index, other), "logits")
    both = states.pair(trace, info.index, other, "logits", np.array([position]))
    arm, ref = both.arm[0, 0], both.ref[0, 0]
    if np.isnan(arm).all() or np.isnan(ref).all():
        raise UsageError(f"{info.label} and {trace.runs[other].label} have no logits at position {position}")
    sides = {"ref": _ranked(ref), "arm": _ranked(arm)}
    k = min(k, len(ref))
    p, q = _softmax(ref), _softmax(arm)
    shown = sorted({*sides["ref"][:k].tolist(), *sides["arm"][:k].tolist()}, key=lambda t: (-p[t], -q[t], t))
    rank = {side: {int(t): i + 1 for i, t in enumerate(order[:k])} for side, order in sides.items()}
    ids, texts = trace.tokens.ids, trace.tokens.texts
    known = dict(zip(ids.tolist(), texts, strict=True))
    candidates = tuple(
        Candidate(t, known.get(t), rank["ref"].get(t), rank["arm"].get(t), float(p[t]), float(q[t]), float(ref[t]),
                  float(arm[t]))
        for t in shown
    )  # fmt: skip
    gap = {side: float(x[order[0]] - x[order[1]]) if len(order) > 1 else np.inf for side, x, order in
           (("ref", ref, sides["ref"]), ("arm", arm, sides["arm"]))}  # fmt: skip
    follows = int(ids[position + 1]) if position + 1 < len(ids) else None
    flipped = bool(sides["ref"][0] != sides["arm"][0])
    return TopK(position, candidates, gap["ref"], gap["arm"], flipped, gap_noise(trace, info), follows)


def _ranked(logits: np.ndarray) -> np.ndarray:
    """Token ids, the most likely first; of equal ones the lower id, and NaN last."""
    return np.argsort(-np.nan_to_num(logits, nan=-np.inf), kind="stable")


def _softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        weight = np.exp(logits - np.nanmax(logits))
    return np.nan_to_num(weight / np.nansum(weight))
