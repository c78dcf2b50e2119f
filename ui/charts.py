"""From a trace to the numbers and words of a map. Nothing is drawn here; every number comes from the trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replayscope.inspector.classes import region_floor
from replayscope.inspector.metrics import METRICS, metric
from replayscope.traces import TraceReader
from replayscope.ui.cells import (
    DIFFERS,
    bin_grid,
    checked_table,
    claims,
    classes,
    colour_scale,
    inside,
    regions,
    row_grid,
    row_kinds,
    row_labels,
    settle,
)  # fmt: skip
from replayscope.ui.grid import ABSENT, BUG, IDENTICAL, Grid, MapChart
from replayscope.ui.series import Series, pick, run_of, series_of
from replayscope.ui.theme import count, plural
from replayscope.ui.titles import cut_title, position_title, reach_title
from replayscope.ui.words import POINT_WORDS, REGION_WORDS, against, context, metric_words, suffix_and_design


def cut_layer_chart(
    trace: TraceReader,
    point: str = "window_kv",
    metric_name: str = "rel_l2",
    bucket: str = "window",
    arm: str | None = None,
    reference: str = "full",
) -> MapChart:
    """x = cut H, y = layer, colour = a metric of `point` in the rows of `bucket`, for one arm.

    arm: label of a series, None for the first. Raises UsageError on unknown names.
    """
    one, table = pick(trace, arm), checked_table(trace, reference, point, metric_name, bucket)
    runs = [run.index for run in one.runs]
    b = table.bucket(bucket)
    value = metric(table, metric_name)[runs, :, b].T
    layers = value.shape[0]
    exact = [[inside(run, point, layer, layers, bucket) for run in one.runs] for layer in range(layers)]
    exact = np.array(exact, bool).reshape(value.shape)
    kind = classes(trace, reference, point)[runs, :, b].T
    wrong = classes(trace, reference, point)[runs, :, table.bucket("exact")].T == BUG
    kind = np.where(wrong & exact & np.isin(kind, DIFFERS), BUG, kind)
    kind = settle(kind, value, exact, claims(trace, point)[runs].T)
    cuts = np.array(one.cuts)
    grid = Grid(
        value, table.arrays["n"][runs, :, b].T, region_floor(trace, point, metric_name)[runs, :, b].T,
        kind, exact, row_labels(value.shape[0], point), cuts, cuts + 1,
    )  # fmt: skip
    window = one.runs[0].window
    past = cuts[cuts > window]
    crosses = one.has_cut and 0 < len(past) < len(cuts)
    return MapChart(
        title=cut_title(one, point, metric_name, grid, reference),
        sentence=f"{metric_words(metric_name)} of the {POINT_WORDS[point]} in {REGION_WORDS.get(bucket, bucket)} "
        f"against {against(reference)} · {context(trace, one)}",
        notes=_notes(one),
        meta=_meta(trace, one, point, metric_name, bucket, reference),
        grid=grid,
        scale=colour_scale(trace, reference, point, metric_name),
        axis="cut H, tokens of cached prefix (one column per cut)" if one.has_cut else "the arm has no cut",
        marks=((float(past[0]), f"H > W = {count(window)}"),) if crosses else (),
        divider=_divider(trace, value.shape[0]),
        kinds=row_kinds(trace, value.shape[0]),
    )


def position_layer_chart(
    trace: TraceReader,
    run: int | None = None,
    point: str = "window_kv",
    metric_name: str = "rel_l2",
    reference: str = "full",
    arm: str | None = None,
) -> MapChart:
    """x = absolute position, y = layer, for one run: row by row if the trace keeps rows, else in bins.

    run: index of the run; None takes the middle one of the cuts of `arm` behind the first window.
    """
    table = checked_table(trace, reference, point, metric_name, "all")
    info = run_of(trace, run, arm)
    one = series_of(trace, info)
    if point in trace.row_points(reference):
        grid = row_grid(trace, info, point, metric_name, reference)
        note = "one column per position"
    else:
        grid = bin_grid(trace, table, info, point, metric_name, reference)
        note = "each column is a bin of the distance from s, twice as wide as the one before"
    layers = len(grid.rows)
    outline = tuple(tuple((float(a), float(b)) for a, b in region) for region in regions(info, point, layers))
    return MapChart(
        title=position_title(info, point, grid),
        sentence=f"{metric_words(metric_name)} of the {POINT_WORDS[point]} against {against(reference)} · "
        f"{context(trace, one, info)} · run {info.index}",
        notes=(note,),
        meta=_meta(trace, one, point, metric_name, "all", reference) | {"run": info.index, "cut": info.cut},
        grid=grid,
        scale=colour_scale(trace, reference, point, metric_name),
        axis=f"position in tokens; the run starts at s = {count(info.start)}",
        column="position",
        outline=outline,
        # Short: in a narrow map the mark where columns are merged stands close by.
        marks=() if info.cut is None else ((float(info.cut), f"cut H {count(info.cut)}"),),
        cut=None if info.cut is None else float(info.cut),
        fine=4 * info.window if note == "one column per position" else None,
        divider=_divider(trace, layers),
        kinds=row_kinds(trace, layers),
    )


def reach_chart(
    trace: TraceReader,
    point: str = "hidden",
    metric_name: str = "rel_l2",
    arm: str | None = None,
    reference: str = "full",
) -> MapChart:
    """x = distance from the replay start, y = layer, colour = the largest value over all cuts beyond the window."""
    one, table = pick(trace, arm), checked_table(trace, reference, point, metric_name, "all")
    runs = [run for run in one.runs if run.start > 0] or list(one.runs)
    index = [run.index for run in runs]
    bins = [(i, *map(int, name[2:].split("-"))) for i, name in enumerate(table.buckets) if name.startswith("d:")]
    at = [i for i, _, _ in bins]
    values = metric(table, metric_name)[index][:, :, at]
    kinds = classes(trace, reference, point)[index][:, :, at]
    floors = region_floor(trace, point, metric_name)[index][:, :, at]
    best = np.where(np.isnan(values), -np.inf, values).argmax(axis=0)[None]
    value = np.take_along_axis(values, best, 0)[0]
    kind = np.take_along_axis(kinds, best, 0)[0]
    kind = np.where(np.isnan(value) & (kind == IDENTICAL), ABSENT, kind)
    kind = np.where((kinds == BUG).any(axis=0), BUG, kind)
    n = table.arrays["n"][index][:, :, at].sum(axis=0)
    used = n.sum(axis=0) > 0
    window, layers = runs[0].window, value.shape[0]
    longest = max(run.stop - run.start for run in runs)
    start, stop = np.array([a for _, a, _ in bins]), np.array([min(b + 1, longest) for _, _, b in bins])
    grid = Grid(
        value[:, used], n[:, used], np.take_along_axis(floors, best, 0)[0][:, used], kind[:, used],
        np.zeros((layers, int(used.sum())), bool), row_labels(layers, point), start[used], stop[used],
    )  # fmt: skip
    return MapChart(
        title=reach_title(one, point, grid),
        sentence=f"largest {metric_words(metric_name)} of the {POINT_WORDS[point]} over {plural(len(runs), 'cut')} "
        f"against {against(reference)} · {context(trace, one)}",
        notes=("bins of the distance from s, each twice as wide as the one before",),
        meta=_meta(trace, one, point, metric_name, "d:*", reference),
        grid=grid,
        scale=colour_scale(trace, reference, point, metric_name),
        axis="distance from the replay start s, tokens",
        column="distance",
        marks=tuple((float(k * window), f"{k}W"[k == 1 :]) for k in (1, layers) if k * window < longest),
        divider=_divider(trace, layers),
        kinds=row_kinds(trace, layers),
    )


def _notes(one: Series) -> tuple[str, ...]:
    return ("these runs follow no single design",) if one.design == "mixed" else ()


def _meta(trace: TraceReader, one: Series, point: str, metric_name: str, bucket: str, reference: str) -> dict:
    suffix, design = suffix_and_design(trace, one)
    return {
        "trace": trace.path.name, "arm": one.arm, "semantics": one.semantics, "replay": one.replay,
        "design": design, "suffix": suffix, "point": point, "metric": metric_name,
        "unit": METRICS[metric_name].unit, "region": bucket,
        "reference": reference, "tokens": len(trace.tokens.ids), "window": one.runs[0].window,
    }  # fmt: skip


def _divider(trace: TraceReader, layers: int) -> tuple[int, str] | None:
    """Where the decoder half begins: the last layer that makes global KV of its own."""
    config = trace.config.get("text_config", trace.config)
    sources: Sequence[int] = config.get("kv_source_layer_ids") or ()
    return (int(sources[-1]), "decoder half") if sources and 0 < sources[-1] < layers else None
