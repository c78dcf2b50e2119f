"""From a trace to cells: classes, the exact region, and the grids of one run, row by row or in bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from replayscope.inspector import verdict
from replayscope.inspector.classes import downstream, headline, region_floor
from replayscope.inspector.errors import UsageError
from replayscope.inspector.layer_kinds import layer_kinds
from replayscope.inspector.metrics import ENTERING, METRICS, metric, metrics_of
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.traces.schema import POINTS, RunInfo, Table
from replayscope.ui.grid import ABSENT, BUG, DESIGN, FLIP, IDENTICAL, NOISE, Grid
from replayscope.ui.scale import Scale, fit
from replayscope.ui.series import NOISE_ARMS
from replayscope.ui.words import metric_words

DIFFERS = (DESIGN, FLIP, BUG)


def checked_points(trace: TraceReader, reference: str | None = None) -> list[str]:
    """Hook points compared with a reference, or with the first one. Raises UsageError if there is none."""
    references = trace.references()
    if not references:
        raise UsageError(
            f"{trace.path}: /divergence is empty: no run was compared with another; record full with another arm, "
            "or set it against another trace with replayscope compare"
        )
    reference = references[0] if reference is None else choose("reference", reference, references)
    if not (points := trace.points(reference)):
        raise UsageError(f"{trace.path}: /divergence/{reference} is empty: no hook point was compared; record it again")
    return points


def checked_table(trace: TraceReader, reference: str, point: str, metric_name: str, bucket: str) -> Table:
    """The table of a point, after every name was checked. Raises UsageError with the valid names."""
    points = checked_points(trace, reference)
    if point in POINTS and point not in points:
        raise UsageError(f"{trace.path}: /divergence/{reference} has no {point}; it has {', '.join(points)}")
    choose("hook point", point, points)
    table = trace.table(reference, point)
    choose(f"metric of {point}", metric_name, metrics_of(table))
    choose("region", bucket, list(table.buckets))
    return table


def colour_scale(trace: TraceReader, reference: str, point: str, metric_name: str) -> Scale:
    """One fixed range for a metric at a point: all cuts, layers and regions of the arms that are meant to be right."""
    table = trace.table(reference, point)
    value = metric(table, metric_name)
    floor = region_floor(trace, point, metric_name)
    right = [run.index for run in trace.runs if ":" not in run.arm and run.arm not in (*NOISE_ARMS, "full")]
    arms = right or [run.index for run in trace.runs if run.arm != "full"]
    shown = value[arms]
    above = shown[shown > np.nan_to_num(floor[arms])]
    top = float(np.nan_to_num(floor[arms]).max(initial=0.0))
    info = METRICS[metric_name]
    kind: Any = "ratio" if metric_name == "norm_ratio" else info.scale
    return fit(above if kind == "log" and above.size else shown, metric_words(metric_name), kind, info.unit, top)


def classes(trace: TraceReader, reference: str, point: str) -> np.ndarray:
    """Class of every cell [run, layer, bucket]; a bug found against the oracle shows against `full` too."""
    kind = verdict.classify(trace, reference, point)
    if reference == "full" and "oracle" in trace.references() and point in trace.points("oracle"):
        kind = np.where((verdict.classify(trace, "oracle", point) == BUG) & np.isin(kind, (DESIGN, FLIP)), BUG, kind)
    return kind


def settle(kind: np.ndarray, value: np.ndarray, exact: np.ndarray, claim: np.ndarray) -> np.ndarray:
    """Class names as a map shows them.

    A cell without a number is not called identical. Nothing is by design in the exact region: what lies there and is no
    bug is noise, where the precision allows the claim (`claim`, which broadcasts to the cells).
    """
    kind = np.where(np.isnan(value) & (kind == IDENTICAL), ABSENT, kind)
    return np.where((kind == DESIGN) & exact & claim, NOISE, kind).astype(str)


def claims(trace: TraceReader, point: str) -> np.ndarray:
    """Where a bound of a bug is known: bool [run, layer]."""
    return np.isfinite(verdict.bound(trace, point))


def inside(run: RunInfo, point: str, layer: int, layers: int, bucket: str) -> bool:
    """Whether every row of a region lies in the exact region of a run; `layers`: of the point's table."""
    cut = run.start if run.cut is None else run.cut
    spans = {
        "window": (max(run.start, cut - run.window), cut), "suffix": (cut, run.stop), "last": (run.stop - 1, run.stop),
        "all": (run.start, run.stop),
    }  # fmt: skip
    if bucket not in spans:
        return bucket == "exact"
    first, stop = spans[bucket]
    region = regions(run, point, layers)[layer]
    return first < stop and any(a <= first and stop <= b for a, b in region)


def regions(info: RunInfo, point: str, layers: int) -> Sequence[Sequence[Sequence[int]]]:
    """The exact intervals of each layer of a point; `final` and `logits` have that of what leaves the last layer."""
    regions = info.exact_in if point in ENTERING else info.exact_out
    if layers == 1 and len(regions) > 1:
        return [regions[0] if point == "embed" else regions[-1]]
    return regions if len(regions) == layers else [()] * layers


def row_labels(layers: int, point: str) -> list[str]:
    return [str(layer) for layer in range(layers)] if layers > 1 else [point]


def row_kinds(trace: TraceReader, layers: int) -> tuple[str, ...]:
    """What kind of layer each of so many rows is; empty where they are not the model's layers, or nobody knows."""
    kinds = layer_kinds(trace.config)
    return kinds if len(kinds) == layers > 1 else ()


def row_grid(trace: TraceReader, info: RunInfo, point: str, metric_name: str, reference: str) -> Grid:
    """Every position of a run in a column of its own, classed by the point's headline metric, as cells are."""
    rows = trace.rows(reference, point, info.index)
    value = metric(rows, metric_name)
    head = _row_headline(trace, reference, point)
    error = metric(rows, head)
    table = trace.table(reference, point)
    limit = np.nan_to_num(verdict.floor(trace, point, headline(table))[info.index], nan=-1.0)[:, None]
    n = rows.arrays["n"] if "n" in rows.arrays else np.ones(value.shape, int)
    exact = np.zeros(value.shape, bool)
    for layer, region in enumerate(regions(info, point, value.shape[0])):
        for a, b in region:
            exact[layer] |= (rows.position >= a) & (rows.position < b)
    with np.errstate(invalid="ignore"):
        kind = np.where(error <= limit, NOISE, DESIGN)
        wrong = _wrong_rows(trace, info, point, reference, error, exact)
    if "flips" in rows.arrays:
        kind = np.where(rows.arrays["flips"] > 0, FLIP, kind)
    kind = np.where(wrong, BUG, kind)
    kind = np.where(error == METRICS[head].same, IDENTICAL, kind)
    kind = settle(np.where(n == 0, ABSENT, kind), value, exact, claims(trace, point)[info.index][:, None])
    floor = np.broadcast_to(verdict.floor(trace, point, metric_name)[info.index][:, None], value.shape)
    labels = row_labels(value.shape[0], point)
    return Grid(value, n, floor, kind, exact, labels, rows.position, rows.position + 1)


def _row_headline(trace: TraceReader, reference: str, point: str) -> str:
    """The metric that classes a single row: of one row the mean of KL is its largest."""
    name = headline(trace.table(reference, point))
    return "kl" if name == "kl_max" else name


def _wrong_rows(
    trace: TraceReader, info: RunInfo, point: str, reference: str, error: np.ndarray, exact: np.ndarray
) -> np.ndarray:
    """Rows [layer, row] above the bound of a bug: against the oracle anywhere, against `full` in the exact region."""
    if trace.table(reference, point).kind == "discrete":
        return np.zeros(error.shape, bool)
    limit = verdict.bound(trace, point)[info.index][:, None]
    region = "exact" if reference == "full" else "all"
    wrong = (error > limit) & ~downstream(trace, reference, point, region)[info.index][:, None]
    if reference == "oracle":
        return wrong
    wrong &= exact
    if info.oracle is not None and point in trace.row_points("oracle"):
        judged = trace.rows("oracle", point, info.index)
        if judged.position.shape == error.shape[1:]:
            value = metric(judged, _row_headline(trace, "oracle", point))
            wrong |= (value > limit) & ~downstream(trace, "oracle", point)[info.index][:, None]
    return wrong


def bin_grid(trace: TraceReader, table: Table, info: RunInfo, point: str, metric_name: str, reference: str) -> Grid:
    """A run in bins of the distance from s, the last one clipped at the run's end."""
    bins = [(i, *map(int, name[2:].split("-"))) for i, name in enumerate(table.buckets) if name.startswith("d:")]
    bins = [(i, info.start + a, min(info.start + b + 1, info.stop)) for i, a, b in bins if info.start + a < info.stop]
    at = [i for i, _, _ in bins]
    start, stop = np.array([a for _, a, _ in bins]), np.array([b for _, _, b in bins])
    value = metric(table, metric_name)[info.index][:, at]
    exact = np.zeros(value.shape, bool)
    for layer, region in enumerate(regions(info, point, value.shape[0])):
        for a, b in region:
            exact[layer] |= (start >= a) & (stop <= b)
    floor = region_floor(trace, point, metric_name)[info.index][:, at]
    kind = classes(trace, reference, point)[info.index][:, at]
    kind = settle(kind, value, exact, claims(trace, point)[info.index][:, None])
    n = table.arrays["n"][info.index][:, at]
    return Grid(value, n, floor, kind, exact, row_labels(value.shape[0], point), start, stop)
