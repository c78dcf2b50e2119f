"""From raw states to maps: layer, head, row and channel of both sides and their difference, read row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from replayscope.inspector import verdict
from replayscope.inspector.errors import UsageError
from replayscope.inspector.layer_kinds import layer_kinds
from replayscope.inspector.metrics import metrics_of
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.traces.schema import POINTS, RunInfo
from replayscope.ui import states
from replayscope.ui.cells import regions
from replayscope.ui.grid import ABSENT, DESIGN, IDENTICAL, NOISE, VALUE, Chart, Grid, MapChart
from replayscope.ui.scale import Scale, fit
from replayscope.ui.series import run_of, series_of
from replayscope.ui.states import NotRecorded, Pair
from replayscope.ui.theme import count, number, plural
from replayscope.ui.words import POINT_WORDS, against, arm_words, context

ROWS = 32  # positions around the chosen one that a layer is shown at
Level = Literal["layers", "heads", "rows"]
HEADS = {"streams": "stream"}  # what the heads of a hook point are called
SIDES = ("reference", "arm", "arm − reference")


@dataclass(frozen=True)
class TensorChart(Chart):
    """The same part of a state on both sides, and the difference; the first two share one scale.

    panels: `reference`, `arm` and `arm − reference`, each [row, channel].
    """

    panels: dict[str, MapChart] = None  # type: ignore[assignment]


def tensor_chart(
    trace: TraceReader,
    run: int | None = None,
    point: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    position: int | None = None,
    arm: str | None = None,
    reference: str = "full",
) -> TensorChart:
    """Single values of a hook point. The more is chosen, the deeper: every layer at one position; with `layer`, every
    head there (or the rows around it, where the point has one head); with `head` too, the rows around the position.

    run: None takes the middle cut of `arm`, at which states are stored. position: None takes the last one before the
    cut, or the nearest to it that is stored. Reads the rows shown and no others. Raises NotRecorded where raw states
    are missing, UsageError on bad names.
    """
    info, point = _stored(trace, run, arm, point, reference)
    other = states.other_run(trace, info, reference)
    names = _names(trace, info.index, other, point)
    if layer is not None and layer not in names:
        raise UsageError(f"no {point} of layer {layer}; stored are {', '.join(map(str, names))}")
    # The first layer that has rows: of one token only layers of ratio 1 have an entry.
    among = [layer] if layer is not None else list(names)
    there = next((at for i in among if len(at := trace.positions(info.index, names[i]))), np.array([], np.int64))
    if not len(there):
        raise NotRecorded(f"{info.label} wrote no {point} there; choose another run, layer or hook point")
    if position is None:
        position = int(np.clip((info.cut or 1) - 1, there[0], there[-1]))
    position = _nearest(there, position)
    if layer is None and len(names) > 1:
        both = _stack([states.pair(trace, info.index, other, n, np.array([position])) for n in names.values()])
        if head is not None:
            both = _head(both, head)
        labels, row, level = [str(i) for i in names], "layer", "layers"
        arm_cells, ref_cells = (side.reshape(len(labels), -1) for side in (both.arm, both.ref))
        exact = [_in(regions(info, point, len(trace.runs[0].exact_in or ())), i, position) for i in names]
    else:
        layer = layer if layer is not None else next(iter(names))
        heads, _ = states.heads(trace, info.index, names[layer])
        if head is None and heads > 1:
            both = states.pair(trace, info.index, other, names[layer], np.array([position]))
            arm_cells, ref_cells = both.arm[0], both.ref[0]
            labels, row, level = [str(h) for h in range(heads)], HEADS.get(point, "head"), "heads"
            exact = [_in(regions(info, point, len(info.exact_in)), layer, position)] * heads
        else:
            around = _around(there, position)
            both = _head(states.pair(trace, info.index, other, names[layer], around), head or 0)
            arm_cells, ref_cells = both.arm[:, 0], both.ref[:, 0]
            labels, row, level = [count(p) for p in around], "position", "rows"
            exact = [_in(regions(info, point, len(info.exact_in)), layer, int(p)) for p in around]
    made = _panels(trace, info, point, layer, arm_cells, ref_cells, labels, row, np.array(exact, bool))
    kinds = layer_kinds(trace.config)
    if level == "layers" and max(names) < len(kinds):
        made = {n: replace(p, kinds=tuple(kinds[i] for i in names)) for n, p in made.items()}
    if row == "position" and info.cut is not None:
        before = sum(int(label.replace(",", "")) < info.cut for label in labels)
        made = {n: replace(p, divider=(before, f"cut H {count(info.cut)}")) for n, p in made.items()}
    where = _where(point, layer, head, position, level)
    return TensorChart(
        title=_title(info, point, where, arm_cells, ref_cells, labels, row),
        sentence=f"values of the {POINT_WORDS[point]}{where} beside {against(reference)} · "
        f"{context(trace, series_of(trace, info), info)} · run {info.index}",
        meta={
            "trace": trace.path.name, "arm": info.arm, "semantics": info.semantics, "replay": info.replay,
            "cut": info.cut, "run": info.index, "point": point, "layer": layer, "head": head, "position": position,
            "reference": reference, "level": level, "tokens": len(trace.tokens.ids), "window": info.window,
            "metric": "value", "unit": "",
        },
        panels=made,
    )  # fmt: skip


def stored_points(trace: TraceReader, run: int, reference: str = "full") -> dict[str, list[int]]:
    """Hook points whose raw values both sides store, with their layers (none for `embed`, `final` and `logits`)."""
    info = trace.runs[run]
    other = states.other_run(trace, info, reference)
    stored = set(trace.states())
    found: dict[str, list[int]] = {}
    for index, name in trace.states():
        parts = name.split(".")
        if index == run and (other, name) in stored and parts[-1] in POINTS:
            found.setdefault(parts[-1], []).extend([int(parts[1])] if len(parts) == 3 else [])
    return {point: sorted(found[point]) for point in POINTS if point in found}


def _stored(
    trace: TraceReader, run: int | None, arm: str | None, point: str | None, reference: str
) -> tuple[RunInfo, str]:
    """The run, and the hook point where none is named."""
    wanted = point or "window_kv"
    option = f"record it with --hooks 'layers.*.{wanted}'" if wanted not in ("embed", "final", "logits") else (
        f"record it with --hooks {wanted}"
    )  # fmt: skip
    info = run_of(trace, run, arm)
    points = stored_points(trace, info.index, reference)
    if run is None and not points:
        # Any cut that was recorded will do.
        for one in series_of(trace, info).runs:
            if points := stored_points(trace, one.index, reference):
                info = one
                break
    if not points:
        raise NotRecorded(f"{trace.path} stores no raw states of {info.label} and its reference; {option}")
    if point is None:
        return info, wanted if wanted in points else next(iter(points))
    choose("hook point", point, list(POINTS))
    if point not in points:
        raise NotRecorded(f"{trace.path} stores no {point} of {info.label} and its reference; {option}")
    return info, point


def _names(trace: TraceReader, run: int, other: int, point: str) -> dict[int, str]:
    """Layer -> name of the state on both sides; layer 0 for points that have none."""
    stored = set(trace.states())
    names = {}
    for index, name in trace.states():
        parts = name.split(".")
        if index == run and parts[-1] == point and (other, name) in stored:
            names[int(parts[1]) if len(parts) == 3 else 0] = name
    return dict(sorted(names.items()))


def _nearest(there: np.ndarray, wanted: int) -> int:
    if not there[0] <= wanted <= there[-1]:
        raise UsageError(f"position {wanted} is outside the stored rows, {there[0]} … {there[-1]}")
    return int(there[np.abs(there - wanted).argmin()])


def _around(there: np.ndarray, position: int) -> np.ndarray:
    """At most `ROWS` stored positions, with the chosen one in the middle as far as there are enough on both sides."""
    at = int(np.searchsorted(there, position))
    first = max(0, min(at - ROWS // 2, len(there) - ROWS))
    return there[first : first + ROWS]


def _stack(parts: list[Pair]) -> Pair:
    """One row of several layers, one below the other. Raises UsageError where their shapes differ."""
    if len({part.arm.shape for part in parts}) > 1:
        raise UsageError("the layers of this state differ in shape; choose one layer")
    return Pair(parts[0].position, np.concatenate([p.arm for p in parts]), np.concatenate([p.ref for p in parts]))


def _head(both: Pair, head: int) -> Pair:
    if not 0 <= head < both.arm.shape[1]:
        raise UsageError(f"no head {head}; there are {both.arm.shape[1]}")
    return Pair(both.position, both.arm[:, head : head + 1], both.ref[:, head : head + 1])


def _in(spans, layer: int, position: int) -> bool:
    return layer < len(spans) and any(a <= position < b for a, b in spans[layer])


def _panels(
    trace: TraceReader, info: RunInfo, point: str, layer: int | None, arm: np.ndarray, ref: np.ndarray,
    labels: list[str], row: str, exact: np.ndarray,
) -> dict[str, MapChart]:  # fmt: skip
    both = fit(np.stack([arm, ref]), POINT_WORDS[point], "signed")
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.where((arm == ref) | (np.isnan(arm) & np.isnan(ref)), 0.0, arm - ref)
    missing = np.isnan(arm) | np.isnan(ref)
    floor = np.broadcast_to(_floors(trace, info, point, layer, row, len(labels))[:, None], arm.shape)
    with np.errstate(invalid="ignore"):
        kind = np.where(np.abs(gap) <= floor, NOISE, DESIGN)
    kind = np.where(missing, ABSENT, np.where(gap == 0, IDENTICAL, kind))
    outline = np.broadcast_to(exact[:, None], arm.shape)
    made = {}
    for name, value, classes, scale in (
        (SIDES[0], ref, np.where(np.isnan(ref), ABSENT, VALUE), both),
        (SIDES[1], arm, np.where(np.isnan(arm), ABSENT, VALUE), both),
        (SIDES[2], np.where(missing, np.nan, gap), kind, fit(gap, "arm − reference", "signed")),
    ):
        made[name] = _panel(value, classes, scale, floor, outline, labels, row)
    return made


def _panel(
    value: np.ndarray, kind: np.ndarray, scale: Scale, floor: np.ndarray, exact: np.ndarray, labels: list[str],
    row: str,
) -> MapChart:  # fmt: skip
    channels = np.arange(value.shape[1])
    n = np.where(kind == ABSENT, 0, 1)
    grid = Grid(value, n, floor, kind.astype(str), exact, labels, channels, channels + 1)
    return MapChart("", "", grid=grid, scale=scale, axis="channel", column="channel", row=row)


def _floors(trace: TraceReader, info: RunInfo, point: str, layer: int | None, row: str, rows: int) -> np.ndarray:
    """Largest abs difference of the noise runs, for each row of a panel; NaN where it is unknown."""
    unknown = np.full(rows, np.nan)
    if "full" not in trace.references() or point not in trace.points("full"):
        return unknown
    if "max_abs" not in metrics_of(trace.table("full", point)):
        return unknown
    floor = verdict.floor(trace, point, "max_abs")[info.index]
    if row == "layer":
        return floor[:rows] if len(floor) >= rows else unknown
    return np.full(rows, floor[layer if layer is not None and layer < len(floor) else 0])


def _where(point: str, layer: int | None, head: int | None, position: int, level: Level) -> str:
    said = "" if layer is None or point in ("embed", "final", "logits") else f", layer {layer}"
    said += "" if head is None else f", {HEADS.get(point, 'head')} {head}"
    return said + (f", around position {count(position)}" if level == "rows" else f", position {count(position)}")


def _title(info: RunInfo, point: str, where: str, arm: np.ndarray, ref: np.ndarray, labels: list[str], row: str) -> str:
    head = f"{arm_words(info.arm)}{'' if info.cut is None else f' at cut {count(info.cut)}'}: the {POINT_WORDS[point]}"
    if np.isnan(arm).all() or np.isnan(ref).all():
        return f"{head}{where} is stored on one side only"
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.abs(np.where(arm == ref, 0.0, arm - ref))
    size = np.nan_to_num(gap, nan=-1.0, posinf=np.inf)
    differ = int((size > 0).sum())
    if not differ:
        return f"{head}{where} is identical in every channel"
    r, c = (int(i) for i in np.unravel_index(size.argmax(), size.shape))
    shares = f"{count(differ)} of {plural(int((size >= 0).sum()), 'value')}"
    return (
        f"{head}{where}: {shares} differ, most in {row} {labels[r]}, channel {count(c)}: "
        f"{number(float(arm[r, c]), 3)} for {number(float(ref[r, c]), 3)}"
    )
