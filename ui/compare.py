"""Two arms, or the same arm of two traces, side by side: one colour scale, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from replayscope.inspector.errors import UsageError
from replayscope.traces import TraceReader
from replayscope.ui.cells import DIFFERS
from replayscope.ui.charts import cut_layer_chart
from replayscope.ui.grid import ABSENT, BUG, DESIGN, IDENTICAL, NOISE, Chart, Grid, MapChart
from replayscope.ui.scale import Scale, fit
from replayscope.ui.series import NOISE_ARMS, pick, series
from replayscope.ui.states import NotRecorded
from replayscope.ui.theme import count, number, plural
from replayscope.ui.words import POINT_WORDS, REGION_WORDS, against, metric_words, suffix_words


@dataclass(frozen=True)
class CompareChart(Chart):
    """The maps of A and of B on one scale, and B − A round zero, at the cuts that both have.

    first: (layer, cut) of the first cell that differs by more than noise, by layer and then by cut; None if none does.
    """

    panels: dict[str, MapChart] = None  # type: ignore[assignment]
    first: tuple[str, int] | None = None


def compare_chart(
    trace: TraceReader,
    other: TraceReader | None = None,
    point: str = "window_kv",
    metric_name: str = "rel_l2",
    bucket: str = "window",
    arm: str | None = None,
    other_arm: str | None = None,
    reference: str = "full",
) -> CompareChart:
    """x = cut H, y = layer: a metric of A (`arm` of `trace`), of B, and their difference.

    other: None compares two arms of one trace. other_arm: None takes the same arm of the other trace, or the next arm
    of this one. Raises UsageError where prompts, designs, layers or cuts of the two do not fit each other.
    """
    second = trace if other is None else other
    _same_prompt(trace, second)
    one = pick(trace, arm)
    if other_arm is None:
        other_arm = _same_arm(second, one.label) if other is not None else _next(trace, one.label)
    two = pick(second, other_arm)
    if one.has_cut and two.has_cut and one.design != two.design:
        raise UsageError(
            f"{one.label} follows the design {one.design} and {two.label} {two.design}: they share no figure; "
            "record both with the same --suffix"
        )
    a, b = (
        cut_layer_chart(t, point, metric_name, bucket, s.label, reference) for t, s in ((trace, one), (second, two))
    )
    if a.grid.rows != b.grid.rows:
        raise UsageError(f"A has {plural(len(a.grid.rows), 'layer')} and B {len(b.grid.rows)}: they do not compare")
    shared = np.intersect1d(a.grid.start, b.grid.start)
    if not len(shared):
        raise UsageError(f"{one.label} and {two.label} have no cut in common; record both with the same --cuts")
    scale = _common(a.scale, b.scale)
    left, right = (replace(c, grid=_columns(c.grid, shared), scale=scale) for c in (a, b))
    gap = _difference(left.grid, right.grid)
    between = replace(left, grid=gap, scale=fit(gap.value, "B − A", "signed", scale.unit))
    names = [f"{s.label}, {t.path.name}" if other is not None else s.label for t, s in ((trace, one), (second, two))]
    first = _first(gap)
    dropped = len(one.cuts) + len(two.cuts) - 2 * len(shared)
    notes = [f"{plural(dropped, 'cut')} of one side only left out"] if dropped else []
    window = one.runs[0].window
    if window != two.runs[0].window:
        notes.append(f"the windows differ: {count(window)} and {count(two.runs[0].window)}")
    return CompareChart(
        title=_title(names, point, metric_name, left.grid, right.grid, gap, first),
        sentence=f"{metric_words(metric_name)} of the {POINT_WORDS[point]} in {REGION_WORDS.get(bucket, bucket)} "
        f"against {against(reference)} · {suffix_words(trace, one)} · N {count(len(trace.tokens.ids))} · "
        f"W {count(window)}",
        notes=tuple(notes),
        meta={
            **a.meta, "trace": trace.path.name, "other_trace": second.path.name, "arm": one.label,
            "other_arm": two.label, "first_layer": first[0] if first else None,
            "first_cut": first[1] if first else None,
        },
        panels={f"A: {names[0]}": left, f"B: {names[1]}": right, "B − A": between},
        first=first,
    )  # fmt: skip


def _next(trace: TraceReader, label: str) -> str:
    """The first other arm: one that replays, else an oracle or a planted fault, else a measure of noise."""
    others = [s for s in series(trace.runs) if s.label != label]
    if not others:
        raise NotRecorded(f"{trace.path} has no second arm to compare with; record another, or name a second trace")
    return min(others, key=lambda s: (s.arm in NOISE_ARMS, not s.has_cut, ":" in s.arm)).label


def _same_arm(other: TraceReader, label: str) -> str:
    labels = [s.label for s in series(other.runs)]
    if labels and label not in labels:
        there = ", ".join(labels)
        raise UsageError(f"{other.path.name} has no arm {label} to stand beside; name one with --other-arm: {there}")
    return label


def _same_prompt(one: TraceReader, two: TraceReader) -> None:
    a, b = one.tokens.ids, two.tokens.ids
    if len(a) != len(b):
        raise UsageError(
            f"the prompts differ: {count(len(a))} tokens in {one.path.name}, {count(len(b))} in {two.path.name}"
        )
    if differ := np.flatnonzero(a != b).tolist():
        raise UsageError(f"the prompts of {one.path.name} and {two.path.name} differ first at token {count(differ[0])}")


def _columns(grid: Grid, cuts: np.ndarray) -> Grid:
    at = np.searchsorted(grid.start, cuts)
    cells = {name: getattr(grid, name)[:, at] for name in ("value", "n", "floor", "kind", "exact")}
    return replace(grid, **cells, start=grid.start[at], stop=grid.stop[at])


def _common(a: Scale, b: Scale) -> Scale:
    """The range of both."""
    return replace(a, low=min(a.low, b.low), high=max(a.high, b.high), saturates=a.saturates or b.saturates)


def _difference(a: Grid, b: Grid) -> Grid:
    """B − A. A cell is noise where it is within the larger floor, absent where one side is, equal numbers identical."""
    missing = np.isnan(a.value) | np.isnan(b.value)
    with np.errstate(invalid="ignore"):
        value = np.where(a.value == b.value, 0.0, b.value - a.value)
        floor = np.fmax(a.floor, b.floor)
        kind = np.where(np.abs(value) <= floor, NOISE, DESIGN)
    kind = np.where((a.kind == BUG) ^ (b.kind == BUG), BUG, kind)
    kind = np.where(missing, ABSENT, np.where(value == 0, IDENTICAL, kind)).astype(str)
    value = np.where(missing, np.nan, value)
    return replace(a, value=value, n=np.minimum(a.n, b.n), floor=floor, kind=kind, exact=a.exact & b.exact)


def _first(gap: Grid) -> tuple[str, int] | None:
    at = np.argwhere(np.isin(gap.kind, DIFFERS))
    return (gap.rows[int(at[0][0])], int(gap.start[int(at[0][1])])) if len(at) else None


def _title(
    names: list[str], point: str, metric_name: str, a: Grid, b: Grid, gap: Grid, first: tuple[str, int] | None
) -> str:
    what = POINT_WORDS[point]
    if (gap.kind == ABSENT).all():
        return f"{names[0]} and {names[1]} share no cell of the {what}"
    if first is None:
        noise = (gap.kind == NOISE).any()
        return f"{names[0]} and {names[1]} differ {'by noise only' if noise else 'nowhere'} in the {what}"
    size = np.where(np.isin(gap.kind, DIFFERS), np.nan_to_num(np.abs(gap.value), nan=-1.0), -1.0)
    row, column = (int(i) for i in np.unravel_index(size.argmax(), size.shape))
    layer = f"layer {gap.rows[row]}, " if len(gap.rows) > 1 else ""
    most = f"{number(float(b.value[row, column]))} for {number(float(a.value[row, column]))}"
    start = f"layer {first[0]}, cut {count(first[1])}" if len(gap.rows) > 1 else f"cut {count(first[1])}"
    return (
        f"{names[1]} and {names[0]} part in the {what} first at {start}, "
        f"most at {layer}cut {count(gap.start[column])}: {metric_words(metric_name)} {most}"
    )
