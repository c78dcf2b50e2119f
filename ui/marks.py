"""What lies over the cells of a map: hatch, dots, the exact region, flips, and the lines that name s, H and W."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from replayscope.ui.grid import ABSENT, FLIP, NOISE, Grid, MapChart, runs_of
from replayscope.ui.theme import LIGHT, escape

CLEAR = "#0000"
MAX_PATCHES = 3000


def add_patches(figure: go.Figure, grid: Grid) -> None:
    """Hatch where nothing was computed, dots where a difference is within the floor; drawn over the cells."""
    for name, mask, shape, colour, size in (
        ("not computed", grid.kind == ABSENT, "/", LIGHT.hatch, 7),
        ("within the noise", grid.kind == NOISE, ".", LIGHT.dim, 6),
    ):
        if not mask.any():
            continue
        boxes = _boxes(mask)
        if len(boxes) > MAX_PATCHES:
            continue
        left, right, bottom, top = np.array(boxes, float).T
        figure.add_bar(
            x=((left + right - 1) / 2).tolist(), width=(right - left).tolist(),
            base=(bottom - 0.5).tolist(), y=(top - bottom).tolist(), name=name, hoverinfo="skip",
            marker={
                "color": CLEAR, "line": {"width": 0},
                "pattern": {
                    "shape": shape, "fgcolor": colour, "bgcolor": LIGHT.absent if shape == "/" else CLEAR,
                    "size": size, "solidity": 0.2, "fillmode": "replace",
                },
            },
        )  # fmt: skip


def _boxes(mask: np.ndarray) -> list[tuple[int, int, int, int]]:
    """True cells as few rectangles (left, right, bottom, top), ends excluded: equal runs of neighbours are joined."""
    boxes: list[tuple[int, int, int, int]] = []
    growing: dict[tuple[int, int], int] = {}
    for row in range(mask.shape[0] + 1):
        runs = {(int(a), int(b)) for a, b in runs_of(mask[row])} if row < mask.shape[0] else set()
        boxes.extend((a, b, growing.pop((a, b)), row) for a, b in list(growing) if (a, b) not in runs)
        for run in runs:
            growing.setdefault(run, row)
    return boxes


def add_outline(figure: go.Figure, chart: MapChart) -> None:
    """The border of the exact region: the ends of each row's intervals, and where neighbouring rows differ."""
    spans = chart.spans()
    if not any(spans):
        return
    x: list[float | None] = []
    y: list[float | None] = []

    def line(x0: float, y0: float, x1: float, y1: float) -> None:
        x.extend((x0 - 0.5, x1 - 0.5, None))
        y.extend((y0, y1, None))

    for row, intervals in enumerate(spans):
        for a, b in intervals:
            line(a, row - 0.5, a, row + 0.5)
            line(b, row - 0.5, b, row + 0.5)
    for row in range(len(spans) + 1):
        below, above = (spans[r] if 0 <= r < len(spans) else [] for r in (row - 1, row))
        for a, b in _difference(below, above):
            line(a, row - 0.5, b, row - 0.5)
    for colour, width, listed in ((LIGHT.card, 3.5, False), (LIGHT.accent, 1.5, True)):
        figure.add_scatter(
            x=x, y=y, mode="lines", name="must be exact", hoverinfo="skip", cliponaxis=False, showlegend=listed,
            line={"color": colour, "width": width},
        )  # fmt: skip


def _difference(below: list[tuple[float, float]], above: list[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Intervals covered by exactly one of two sets of disjoint intervals."""
    ends = sorted({e for pair in (*below, *above) for e in pair})
    for a, b in pairwise(ends):
        inside = [any(lo <= a and b <= hi for lo, hi in side) for side in (below, above)]
        if inside[0] != inside[1]:
            yield a, b


def add_points(figure: go.Figure, grid: Grid) -> None:
    """Marks on single cells. All above a flip is downstream of it, so only the lowest flip of a column is marked."""
    rows, columns = grid.shape
    size = max(4, min(9, 560 // max(columns, 1), 300 // max(rows, 1)))
    flips = grid.kind == FLIP
    flips[1:] &= ~(grid.kind[:-1] == FLIP)
    flip = {"symbol": "diamond", "color": LIGHT.flip, "line": {"color": LIGHT.card, "width": 1 if size > 5 else 0}}
    infinite = {"symbol": "x", "color": LIGHT.card, "line": {"color": LIGHT.ink, "width": 1}}
    for name, mask, marker in (("flip, and all above it", flips, flip), ("not finite", np.isinf(grid.value), infinite)):
        at = np.argwhere(mask)
        if len(at):
            figure.add_scatter(
                x=at[:, 1].tolist(), y=at[:, 0].tolist(), mode="markers", name=name, hoverinfo="skip",
                marker={"size": size, **marker},
            )  # fmt: skip


def add_marks(figure: go.Figure, chart: MapChart) -> None:
    rows, columns = chart.grid.shape
    for token, label in chart.marks:
        at = chart.edge(token)
        if 0 <= at <= columns:
            strong = token == chart.cut
            # A dotted line on a pale one shows on light and on dark cells.
            for line in (
                {"color": LIGHT.card, "width": 3},
                {"color": LIGHT.accent if strong else LIGHT.ink, "width": 2 if strong else 1.2, "dash": "3px,3px"},
            ):
                figure.add_shape(
                    type="line", x0=at - 0.5, x1=at - 0.5, y0=0, y1=1, yref="paper", layer="above", line=line
                )
            figure.add_annotation(
                text=escape(label), x=at - 0.5, y=1, yref="paper", yanchor="bottom", showarrow=False,
                xanchor="left" if at < columns * 0.9 else "right", xshift=-4 if at < columns * 0.9 else 4,
                font={"size": 12, "color": LIGHT.accent if strong else LIGHT.dim},
            )  # fmt: skip
    if chart.divider and 0 < chart.divider[0] < rows:
        row, label = chart.divider
        figure.add_shape(
            type="line", x0=0, x1=1, xref="paper", y0=row - 0.5, y1=row - 0.5, layer="above",
            line={"color": LIGHT.ink, "width": 1, "dash": "dot"},
        )  # fmt: skip
        # Upwards beside the rows that it names: over the cells it would hide some.
        figure.add_annotation(
            text=escape(label), x=1, xref="paper", xanchor="left", xshift=2, y=row - 0.5, yanchor="bottom",
            textangle=-90, showarrow=False, borderpad=0, font={"size": 11, "color": LIGHT.dim},
        )  # fmt: skip
