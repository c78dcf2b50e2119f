"""Draws a MapChart. One look for every map: magnitude in one hue, grey for identical, hatch for not computed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from replayscope.ui.grid import ABSENT, BUG, DESIGN, FLIP, IDENTICAL, MAX_CELLS, NOISE, VALUE, Grid, MapChart
from replayscope.ui.heading import heading, message
from replayscope.ui.marks import add_marks, add_outline, add_patches, add_points
from replayscope.ui.theme import LIGHT, count, escape, number, template

CLASS_WORDS = {
    ABSENT: "not computed",
    IDENTICAL: "identical",
    NOISE: "within the noise",
    FLIP: "downstream of a flip",
    BUG: "bug",
    DESIGN: "by design",
}


def draw(chart: MapChart, height: int | None = None, cells: int = MAX_CELLS) -> go.Figure:
    """A MapChart as a plotly figure in light colours, of at most `cells` cells; a grid without any gives the axes and a
    message."""
    chart = _fitted(chart, cells)
    grid = chart.grid
    figure = go.Figure(layout={"template": template()})
    rows, columns = grid.shape
    if rows and columns:
        _cells(figure, chart)
        add_patches(figure, grid)
        add_outline(figure, chart)
        add_points(figure, grid)
        add_marks(figure, chart)
    _axes(figure, chart)
    message(figure, _message(grid))
    key = [trace.name for trace in _traces(figure) if trace.type != "heatmap" and trace.showlegend is not False]
    heading(figure, chart, height or max(280, min(560, 170 + 22 * rows)), key, [int(c) for c in grid.start])
    facts: Any = figure.layout["meta"]
    figure.update_layout(meta=facts | {"pooled": grid.pooled > 1, "cut": chart.cut})
    return figure


def _traces(figure: go.Figure) -> tuple:
    return figure.data  # type: ignore[return-value]


def _fitted(chart: MapChart, cells: int) -> MapChart:
    """The chart with columns merged: the far end of a long axis, and whatever is more than a browser should be sent."""
    grid, marks = chart.grid, list(chart.marks)
    columns, fine = grid.shape[1], chart.fine
    if fine and columns > fine * 3 // 2:
        width = -(-(columns - fine) // max(1, fine // 2))
        marks.append((float(grid.start[fine]), f"{count(width)} per column"))
        grid = grid.merge({*range(fine), *range(fine, columns, width)}, width)
        notes = (
            *chart.notes,
            f"from position {count(chart.grid.start[fine])} on the largest of {count(width)} positions",
        )
        chart = replace(chart, grid=grid, marks=tuple(marks), notes=notes)
    keep = {int(chart.edge(token)) + d for token, _ in chart.marks for d in (-1, 0)}
    if chart.cut is not None:
        keep.add(int(chart.edge(chart.cut)))
    pooled = grid.pool(keep, cells)
    if pooled is grid:
        return chart
    note = f"each cell is the largest of up to {count(pooled.pooled)} neighbours, never a mean"
    return replace(chart, grid=pooled, notes=(*chart.notes, note))


def _cells(figure: go.Figure, chart: MapChart) -> None:
    grid, scale = chart.grid, chart.scale
    rows, columns = grid.shape
    gap = 1 if columns <= 72 and rows <= 48 else 0
    base = {
        "x0": 0, "dx": 1, "y0": 0, "dy": 1, "xgap": gap, "ygap": gap, "hoverongaps": False,
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    hover = _hover(chart)
    shown = ~np.isin(grid.kind, (ABSENT, IDENTICAL, BUG)) & ~np.isnan(grid.value)
    low, high = scale.ends
    places, texts = scale.ticks()
    # Half of the bytes, unless the bar goes farther than they do.
    narrow = np.float32 if max(abs(low), abs(high)) < float(np.finfo(np.float32).max) else np.float64
    figure.add_heatmap(
        z=np.where(shown, scale.place(grid.value), np.nan).astype(narrow),
        text=np.where(shown, hover, ""),
        name="magnitude", zmin=low, zmax=high, colorscale=scale.colours,
        colorbar={
            "title": {"text": escape(scale.label), "side": "top", "font": {"size": 12, "color": LIGHT.dim}},
            "tickvals": places, "ticktext": texts, "tickfont": {"size": 12, "color": LIGHT.dim},
            "thickness": 10, "len": 1, "outlinewidth": 0, "ticklen": 3, "tickcolor": LIGHT.line, "xpad": 12, "ypad": 0,
        },
        **base,
    )  # fmt: skip
    flat = (
        ("identical", grid.kind == IDENTICAL, LIGHT.identical),
        ("not computed", grid.kind == ABSENT, LIGHT.absent),
        ("undefined", np.isnan(grid.value) & ~np.isin(grid.kind, (ABSENT, IDENTICAL, BUG)), LIGHT.absent),
        ("bug", grid.kind == BUG, LIGHT.bug),
    )
    for name, mask, colour in flat:
        if mask.any():
            figure.add_heatmap(
                z=np.where(mask, 1.0, np.nan).astype(np.float32), text=np.where(mask, hover, ""),
                name=name, zmin=0, zmax=1, colorscale=[[0, colour], [1, colour]], showscale=False, **base,
            )  # fmt: skip
            if name in ("identical", "bug"):
                figure.add_scatter(
                    x=[None], y=[None], mode="markers", name=name, hoverinfo="skip",
                    marker={"symbol": "square", "color": colour, "size": 11},
                )  # fmt: skip


def _axes(figure: go.Figure, chart: MapChart) -> None:
    grid = chart.grid
    rows, columns = grid.shape
    ticks = _ticks(chart)
    figure.update_xaxes(
        title_text=escape(chart.axis), range=[-0.5, max(columns, 1) - 0.5], tickvals=[t - 0.5 for t, _ in ticks],
        ticktext=[escape(label) for _, label in ticks], tickangle=0,
    )  # fmt: skip
    step = max(1, -(-rows // 24))
    shown = list(range(rows - 1, -1, -step))
    figure.update_yaxes(
        title_text=escape(chart.row) if rows > 1 else "", range=[-0.5, max(rows, 1) - 0.5], tickvals=shown,
        ticktext=[escape(text) for text in _row_ticks(chart, shown)],
    )  # fmt: skip
    figure.update_layout(
        barmode="overlay", bargap=0, legend={"itemclick": False, "itemdoubleclick": False, "itemsizing": "trace"}
    )


def _row_ticks(chart: MapChart, shown: list[int]) -> list[str]:
    """What stands beside the rows that have a tick, from the top. A layer's kind is written where one begins: a tick
    without it is of the same kind as all rows down to the tick below."""
    texts = [chart.grid.rows[row] for row in shown]
    if len(set(chart.kinds)) < 2:
        return texts
    for i, row in enumerate(shown):
        below = shown[i + 1] if row != shown[-1] else None
        if below is None or len(set(chart.kinds[below : row + 1])) > 1:
            texts[i] += f" {chart.kinds[row]}"
    return texts


def _ticks(chart: MapChart) -> list[tuple[float, str]]:
    """Tick places in columns from the left edge: both ends and evenly spread others between; of a few columns all."""
    grid = chart.grid
    columns = grid.shape[1]
    if not columns:
        return []
    cuts = chart.column == "H"
    middle = 0.5 if cuts else 0.0
    wanted = [0, columns - 1 if cuts else columns]
    wanted += range(columns) if columns <= 12 else [round(i * columns / 8) for i in range(1, 8)]
    edges = np.append(grid.start, grid.stop[-1:])
    chosen: list[int] = []
    for column in wanted:
        if column < len(edges) - (1 if cuts else 0) and all(abs(column - c) >= columns * 0.07 for c in chosen):
            chosen.append(column)
    return [(c + middle, count(edges[c])) for c in sorted(chosen)]


def _hover(chart: MapChart) -> np.ndarray:
    """Hover text of every cell [row, column]: place, value, n, floor and class. Few tags: it is most of a figure."""
    grid, unit = chart.grid, f" {chart.scale.unit}" if chart.scale.unit else ""
    heads = [
        f"{chart.column} {count(a)}" if b - a <= 1 or (chart.column == "H" and not grid.pooled > 1)
        else f"{chart.column} {count(a)} … {count(b - 1)}"
        for a, b in zip(grid.start, grid.stop, strict=True)
    ]  # fmt: skip
    floors = {v: "unknown" if math.isnan(v) else number(v) for v in set(grid.floor.ravel().tolist())}
    text = np.empty(grid.shape, dtype=object)
    for r in range(len(grid.rows)):
        where = f", {escape(chart.row_name(r))}<br>"
        values, floor, n, exact = (side[r].tolist() for side in (grid.value, grid.floor, grid.n, grid.exact))
        for c, kind in enumerate(grid.kind[r].tolist()):
            head = heads[c] + where
            if kind == ABSENT:
                text[r, c] = head + CLASS_WORDS[ABSENT]
                continue
            shown = "undefined" if math.isnan(values[c]) else number(values[c], 3) + unit
            if kind == VALUE:
                text[r, c] = head + shown
                continue
            said = (CLASS_WORDS.get(kind) or kind) + (", must be exact" if exact[c] else "")
            text[r, c] = f"{head}{shown}, n {n[c]:,}, floor {floors.get(floor[c], 'unknown')}<br>{said}"
    return text


def _message(grid: Grid) -> str:
    """What the picture cannot say: that there is nothing in it."""
    if not grid.value.size:
        return "no cells: nothing was recorded for this choice"
    if (grid.kind == ABSENT).all():
        return "nothing computed here"
    if ((grid.kind == IDENTICAL) | (grid.kind == ABSENT)).all():
        return "all zero: identical everywhere"
    if not np.isfinite(grid.value).any():
        return "no finite values"
    return ""
