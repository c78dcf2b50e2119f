"""What one cell of a map says, in words and a few numbers: HTML for the panel beside the map."""

from __future__ import annotations

import math

import numpy as np

from replayscope.inspector.classes import bound, headline, region_floor
from replayscope.inspector.metrics import METRICS, metric, metrics_of
from replayscope.traces import TraceReader
from replayscope.traces.schema import REGIONS, RunInfo, Table
from replayscope.ui.cells import classes
from replayscope.ui.grid import ABSENT, Grid, MapChart
from replayscope.ui.heatmap import CLASS_WORDS
from replayscope.ui.parts import card
from replayscope.ui.tables import html_table
from replayscope.ui.theme import count, escape, number
from replayscope.ui.view import Choice, chosen_run
from replayscope.ui.words import REGION_WORDS, metric_words

_CLASS = {"absent": "–", "noise": "noise", "flip": "flip", "design": "design"}
_SHORT = {"all": "all rows", "window": "[H−W, H)", "suffix": "suffix", "last": "last row", "exact": "exact region"}


def at_cut(trace: TraceReader, chart: MapChart, c: Choice) -> str:
    """The panel of the cell at the chosen cut and layer."""
    grid = chart.grid
    row, column = min(c.layer, grid.shape[0] - 1), int(np.searchsorted(grid.start, c.cut))
    run, found = chosen_run(trace, c), trace.table(c.reference, c.point)
    where = f"H {count(c.cut)} · {escape(chart.row_name(row))}" if grid.shape[0] > 1 else f"H {count(c.cut)}"
    body = (
        _number(chart, row, column)
        + _facts(trace, found, grid, run, c, row, column)
        + _regions(trace, found, run, c, row)
        + _metrics(found, run, c, row)
    )
    return card(where, f"{escape(c.arm)} · {escape(REGION_WORDS[c.region])}", body, "rs-cell")


def at_position(trace: TraceReader, chart: MapChart, c: Choice) -> str:
    """The panel of the cell at the chosen position and layer."""
    grid = chart.grid
    row = min(c.layer, grid.shape[0] - 1)
    column = max(int(np.searchsorted(grid.start, c.position, "right")) - 1, 0)
    if not grid.shape[1]:
        return ""
    first, last = int(grid.start[column]), int(grid.stop[column]) - 1
    place = f"position {count(first)}" if first == last else f"positions {count(first)} to {count(last)}"
    run, found = chosen_run(trace, c), trace.table(c.reference, c.point)
    where = place + (f" · {escape(chart.row_name(row))}" if grid.shape[0] > 1 else "")
    side = "before the cut" if run.cut is not None and last < run.cut else "in the suffix"
    distance = f"{count(first - run.start)} behind the replay start"
    body = _number(chart, row, column) + _facts(trace, found, grid, run, c, row, column)
    return card(where, f"{escape(c.arm)} at cut {count(c.cut)} · {side}, {distance}", body, "rs-cell")


def _number(chart: MapChart, row: int, column: int) -> str:
    """The value, large, and what it is called."""
    grid = chart.grid
    kind, value = str(grid.kind[row, column]), float(grid.value[row, column])
    shown = "–" if kind == ABSENT else "undefined" if math.isnan(value) else number(value, 3)
    unit = f" {chart.scale.unit}" if chart.scale.unit and kind != ABSENT else ""
    said = CLASS_WORDS.get(kind, kind)
    return (
        f'<div class="rs-big"><span class="v">{shown}{escape(unit)}</span>'
        f'<span class="rs-class {kind}">{escape(said)}</span><span class="k">{escape(chart.scale.label)}</span></div>'
    )


def _facts(
    trace: TraceReader, found: Table, grid: Grid, run: RunInfo, c: Choice, row: int, column: int
) -> str:  # fmt: skip
    floor, value = float(grid.floor[row, column]), float(grid.value[row, column])
    facts = [("noise floor", "unknown" if math.isnan(floor) else number(floor))]
    if floor > 0 and math.isfinite(value) and value > 0 and METRICS[c.metric].scale == "log":
        facts.append(("times the floor", f"{number(value / floor)} ×"))
    limit = bound(trace, c.point)[run.index]
    if c.metric == headline(found) and math.isfinite(at := float(limit[min(row, len(limit) - 1)])):
        facts.append(("a bug lies above", number(at)))
    facts.append(("rows compared", count(grid.n[row, column])))
    facts.append(("must be exact", "yes" if grid.exact[row, column] else "no"))
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts) + "</dl>"


def _regions(trace: TraceReader, found: Table, run: RunInfo, c: Choice, row: int) -> str:
    """The chosen metric in every region at this cut and layer."""
    values = metric(found, c.metric)[run.index, row]
    floors = region_floor(trace, c.point, c.metric)[run.index, row]
    kinds = classes(trace, c.reference, c.point)[run.index, row]
    rows = []
    for name in (r for r in REGIONS if r in found.buckets):
        b = found.bucket(name)
        n = int(found.arrays["n"][run.index, row, b])
        kind = str(kinds[b]) if n else ABSENT
        tone = "" if name == c.region else "dim"
        rows.append([
            (_SHORT[name], tone), (number(float(values[b])) if n else "–", tone),
            ("–" if math.isnan(floors[b]) else number(float(floors[b])), "dim"), (count(n), "dim"),
            (_CLASS.get(kind, kind), kind if kind in ("bug", "flip") else "dim"),
        ])  # fmt: skip
    return html_table(("region", metric_words(c.metric), "floor", "rows", ""), rows)


def _metrics(found: Table, run: RunInfo, c: Choice, row: int) -> str:
    """Every metric of this cell."""
    b = found.bucket(c.region)
    if not found.arrays["n"][run.index, row, b]:
        return ""
    rows = []
    for name in metrics_of(found):
        unit = METRICS[name].unit
        value = float(metric(found, name)[run.index, row, b])
        place = ""
        if name == "max_abs" and "max_row" in found.arrays and "max_col" in found.arrays:
            at, channel = (int(found.arrays[key][run.index, row, b]) for key in ("max_row", "max_col"))
            place = f"position {count(at)}, channel {count(channel)}" if at >= 0 and channel >= 0 else ""
        shown = "–" if math.isnan(value) else number(value, 3) + (f" {unit}" if unit else "")
        rows.append([(escape(metric_words(name)), ""), (escape(shown), ""), (place, "dim")])
    return f"<details><summary>every metric of this cell</summary>{html_table(('metric', 'value', ''), rows)}</details>"
