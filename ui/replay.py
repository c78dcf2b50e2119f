"""From a trace to curves: how far an arm is from its reference, by the length of the replay."""

from __future__ import annotations

import numpy as np

from replayscope.inspector.classes import region_floor
from replayscope.inspector.layer_kinds import named
from replayscope.inspector.metrics import METRICS, metric, metrics_of
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.ui.cells import checked_table, row_kinds, row_labels
from replayscope.ui.curves import Curve, CurveChart, layer_colours
from replayscope.ui.series import Series, pick, series
from replayscope.ui.states import NotRecorded
from replayscope.ui.theme import LIGHT, count, number, plural
from replayscope.ui.words import (
    POINT_WORDS,
    REGION_WORDS,
    against,
    arm_words,
    metric_words,
    size_words,
    suffix_and_design,
    suffix_words,
)


def replay_chart(
    trace: TraceReader,
    point: str = "window_kv",
    metric_name: str = "rel_l2",
    bucket: str = "window",
    arm: str | None = None,
    reference: str = "full",
    threshold: float = 1e-2,
) -> CurveChart:
    """x = replay length R, y = a metric of `point` in the rows of `bucket`, the worst over the cuts that all R share.

    One curve per layer and one for the worst of them. arm: label of a series, whose other replay lengths are taken too.
    Raises NotRecorded where the arm was recorded with one replay length only, UsageError on unknown names.
    """
    table = checked_table(trace, reference, point, metric_name, bucket)
    choose("metric of this figure", metric_name, [m for m in metrics_of(table) if METRICS[m].scale == "log"])
    lengths, cuts, left = _lengths(trace, arm)
    value, b = metric(table, metric_name), table.bucket(bucket)
    floors = region_floor(trace, point, metric_name)
    runs = [[one.at(cut).index for cut in cuts] for one in lengths]
    cells = np.stack([value[at][:, :, b] for at in runs])  # [R, cut, layer]
    floor = np.stack([floors[at][:, :, b] for at in runs])
    worst = np.fmax.reduce(cells, axis=1)  # [R, layer]
    n = np.stack([table.arrays["n"][at][:, :, b] for at in runs])
    replays = [int(one.replay or 0) for one in lengths]
    whole = np.fmax.reduce(worst, axis=1)
    below = _below(replays, whole, threshold)
    head, unit = lengths[0], METRICS[metric_name].unit
    notes = ["the worst of the cuts that all replay lengths share; where H ≤ R the replay starts at 0"]
    if left:
        notes.append(f"of another design or without these cuts, and left out: {', '.join(left)}")
    x = np.log2(np.array(replays, float))
    places = tuple(
        (float(p), f"{count(r)}{' = W' if r == head.runs[0].window else ''}") for p, r in zip(x, replays, strict=True)
    )
    suffix, design = suffix_and_design(trace, head)
    labels, kinds = row_labels(cells.shape[2], point), row_kinds(trace, cells.shape[2])
    names = [f"layer {named(name, kinds)}" for name in labels] if len(labels) > 1 else labels
    return CurveChart(
        title=_title(head, point, whole, replays, below, threshold, unit),
        sentence=f"{metric_words(metric_name)} of the {POINT_WORDS[point]} in {REGION_WORDS.get(bucket, bucket)} "
        f"against {against(reference)} · arm {head.arm} · {plural(len(cuts), 'cut')} · {suffix_words(trace, head)} · "
        f"N {count(len(trace.tokens.ids))} · W {count(head.runs[0].window)} · {head.semantics}",
        notes=tuple(notes),
        meta={
            "trace": trace.path.name, "arm": head.arm, "semantics": head.semantics, "replays": replays, "cuts": cuts,
            "design": design, "suffix": suffix, "point": point, "metric": metric_name, "unit": unit, "region": bucket,
            "reference": reference, "threshold": threshold, "below_from": below,
            "tokens": len(trace.tokens.ids), "window": head.runs[0].window,
        },
        curves=_curves(x, replays, cuts, cells, worst, whole, n, floor, names, metric_words(metric_name), unit),
        axis="replay length R, tokens (each recorded length marked)",
        label=metric_words(metric_name),
        unit=unit,
        ticks=_thin(places, float(x[0]), float(x[-1])),
        span=_span(x),
        limits=((threshold, f"threshold {number(threshold)}"),),
        marks=((float(np.log2(below)), f"below it from R = {count(below)} on", True),) if below else (),
        floor=(np.r_[_span(x)[0], x, _span(x)[1]], _ends(np.fmax.reduce(floor, axis=(1, 2)))),
        names=("replay", "layer", "layer_kind", "cut", "value", "rows", "floor"),
        rows=[
            [replays[r], int(layer) if layer.isdecimal() else layer, kinds[i] if kinds else "", cuts[c],
             float(cells[r, c, i]), int(n[r, c, i]), float(floor[r, c, i])]
            for r in range(len(replays)) for i, layer in enumerate(labels)
            for c in range(len(cuts))
        ],
        columns=tuple(replays),
    )  # fmt: skip


def _lengths(trace: TraceReader, arm: str | None) -> tuple[list[Series], list[int], list[str]]:
    """The series of one arm by replay length, the cuts they share, and the labels of those that do not belong."""
    found = series(trace.runs)
    many = [s for s in found if s.replay and s.has_cut and _kin(s, found) > 1]
    if arm is None:
        right = [s for s in many if ":" not in s.arm] or many
        if not right:
            raise NotRecorded(f"{trace.path} has {_one_length(found)}")
        head = right[0]
    else:
        head = pick(trace, arm)
        if head not in many:
            raise NotRecorded(f"{trace.path}: of {head.arm} it has {_one_length([head])}")
    kin = sorted((s for s in many if (s.arm, s.semantics) == (head.arm, head.semantics)), key=lambda s: s.replay or 0)
    same = [s for s in kin if s.design == head.design]
    shared = set(same[0].cuts).intersection(*(s.cuts for s in same))
    if not shared:
        raise NotRecorded(f"{trace.path}: no cut was run with every replay length of {head.arm}; sweep them together")
    return same, sorted(shared), [s.label for s in kin if s not in same]


def _one_length(found: list[Series]) -> str:
    """What is missing, and how to record it: only arms with a cut and a replay can have several lengths."""
    if any(s.replay and s.has_cut for s in found):
        return "one replay length only; record it with --replay W,2W,4W,exact"
    return "no replay; record an arm that replays, with --arms full,encoder --replay W,2W,4W,exact"


def _kin(one: Series, found: list[Series]) -> int:
    return len({s.replay for s in found if (s.arm, s.semantics) == (one.arm, one.semantics)})


def _below(replays: list[int], worst: np.ndarray, threshold: float) -> int | None:
    """The shortest replay length from which on no value is above the threshold; None if the longest still is."""
    above = np.flatnonzero(~(worst <= threshold))
    first = int(above[-1]) + 1 if above.size else 0
    return replays[first] if first < len(replays) else None


def _curves(
    x: np.ndarray, replays: list[int], cuts: list[int], cells: np.ndarray, worst: np.ndarray, whole: np.ndarray,
    n: np.ndarray, floor: np.ndarray, names: list[str], label: str, unit: str,
) -> tuple[Curve, ...]:  # fmt: skip
    layers = worst.shape[1]
    colours = layer_colours(layers)
    seen: set[str] = set()
    curves = []
    at = np.nan_to_num(cells, nan=-1.0).argmax(axis=1)  # [R, layer]

    def said(r: int, i: int) -> str:
        c = int(at[r, i])
        return (
            f"<b>R {count(replays[r])}</b> · {names[i]}<br>{label} "
            f"<b>{number(float(worst[r, i]), 3)}{f' {unit}' if unit else ''}</b> at cut {count(cuts[c])}<br>"
            f"{count(n[r, c, i])} rows, {size_words(float(worst[r, i]), float(floor[r, c, i]))}"
        )

    for i in range(layers if layers > 1 else 0):
        shade = [int(k) for k, c in enumerate(colours) if c == colours[i]]
        group = f"layers {shade[0]} to {shade[-1]}" if len(shade) > 1 else f"layer {i}"
        texts = [said(r, i) for r in range(len(replays))]
        curves.append(Curve(group, x, worst[:, i], texts, colours[i], 1.3, listed=group not in seen))
        seen.add(group)
    top = np.nan_to_num(worst, nan=-1.0).argmax(axis=1)
    texts = [said(r, int(top[r])) for r in range(len(replays))]
    name = "worst layer" if layers > 1 else names[0]
    return (*curves, Curve(name, x, whole, texts, LIGHT.ink, 2.5, marks=True))


def _title(
    head: Series, point: str, whole: np.ndarray, replays: list[int], below: int | None, threshold: float, unit: str
) -> str:
    who, what = arm_words(head.arm), POINT_WORDS[point]
    limit = f"{number(threshold)}{f' {unit}' if unit else ''}"
    if np.isnan(whole).all():
        return f"{who} computes no {what} here"
    first, last = (f"{number(float(v))}{f' {unit}' if unit else ''}" for v in (whole[0], whole[-1]))
    moves = f"{who} moves the {what} by {first} at R = {count(replays[0])} and by {last} at R = {count(replays[-1])}"
    if below is None:
        return f"{moves}: never below {limit} for good"
    return f"{moves}: below {limit} from R = {count(below)} on"


def _span(x: np.ndarray) -> tuple[float, float]:
    room = max(0.04 * float(x[-1] - x[0]), 0.1)
    return float(x[0]) - room, float(x[-1]) + room


def _ends(y: np.ndarray) -> np.ndarray:
    return np.r_[y[0], y, y[-1]]


def _thin(places: tuple[tuple[float, str], ...], first: float, last: float) -> tuple[tuple[float, str], ...]:
    """Ticks that do not touch: of close neighbours the earlier one stays, and the last always."""
    kept: list[tuple[float, str]] = []
    for place in places:
        if not kept or place[0] - kept[-1][0] >= 0.055 * (last - first):
            kept.append(place)
    if kept[-1] != places[-1]:
        kept[-1] = places[-1]
    return tuple(kept)
