"""A heat map in numbers, before anything is drawn: what the figure shows and what CSV and JSON export."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from replayscope.ui.scale import Scale

MAX_CELLS = 200_000
ABSENT, IDENTICAL, NOISE, FLIP, BUG, DESIGN = "absent", "identical", "noise", "flip", "bug", "design"
VALUE = "value"  # a number of a state, which belongs to no class


@dataclass(frozen=True)
class Grid:
    """Cells [row, column]; row 0 is drawn at the bottom, column 0 at the left.

    value: the metric, NaN where there is no number, inf kept. n: rows compared, 0 where the arm computed nothing.
    floor: noise floor of the cell in the metric's unit, NaN if unknown. kind: class name of each cell.
    exact: the cell lies wholly in the exact region.
    start, stop: the span [start, stop) each column covers on the x axis, in tokens; for cuts, stop = start + 1.
    """

    value: np.ndarray
    n: np.ndarray
    floor: np.ndarray
    kind: np.ndarray
    exact: np.ndarray
    rows: list[str]
    start: np.ndarray
    stop: np.ndarray
    pooled: int = 1

    def __post_init__(self) -> None:
        for name in ("n", "floor", "kind", "exact"):
            if getattr(self, name).shape != self.value.shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, value has {self.value.shape}")
        if self.value.shape != (len(self.rows), len(self.start)) or len(self.start) != len(self.stop):
            raise ValueError(f"value is {self.value.shape} for {len(self.rows)} rows and {len(self.start)} columns")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.value.shape

    def pool(self, keep: Collection[int] = (), cells: int = MAX_CELLS) -> Grid:
        """At most `cells` cells: neighbouring columns are merged, each row showing its largest cell, never a mean.

        keep: columns that stay alone (the window boundary and its neighbours, the chosen cut). No row is ever merged,
        so the last layer stays. A bug wins over a larger value, so that none is hidden.
        """
        rows, columns = self.shape
        if rows * columns <= cells:
            return self
        budget = max(1, cells // max(1, rows))
        alone = {c for c in keep if 0 <= c < columns}
        width = -(-columns // max(1, budget - 2 * len(alone)))
        return self.merge({*range(0, columns, width), *alone, *(c + 1 for c in alone)}, width)

    def merge(self, edges: Collection[int], width: int) -> Grid:
        """The grid with columns merged between `edges`, at most `width` to one; the rules are those of `pool`."""
        rows, columns = self.shape
        ends = sorted({0, columns} | {edge for edge in edges if 0 < edge < columns})
        starts = np.array(ends[:-1])
        # By size: of signed differences a large negative one is as large.
        rank = np.nan_to_num(np.abs(self.value), nan=-np.inf, posinf=np.finfo(float).max)
        rank = np.where(self.kind == BUG, np.inf, rank)
        groups = zip(starts, ends[1:], strict=True)
        best = np.stack([a + rank[:, a:b].argmax(axis=1) for a, b in groups], axis=1)
        rowwise = np.arange(rows)[:, None]
        flips = np.logical_or.reduceat(self.kind == FLIP, starts, axis=1)
        kind = self.kind[rowwise, best]
        return replace(
            self,
            value=self.value[rowwise, best],
            n=self.n[rowwise, best],
            floor=self.floor[rowwise, best],
            kind=np.where(flips & (kind != BUG), FLIP, kind),
            exact=np.logical_and.reduceat(self.exact, starts, axis=1),
            start=self.start[starts],
            stop=self.stop[np.array(ends[1:]) - 1],
            pooled=max(self.pooled, width),
        )


@dataclass(frozen=True)
class Chart:
    """What every figure carries besides its numbers.

    title: what is seen. sentence: metric, region, suffix, design, arm, N, W. notes: what else a reader must know.
    meta: the same facts as plain values, for JSON.
    """

    title: str
    sentence: str
    notes: tuple[str, ...] = ()
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class MapChart(Chart):
    """A heat map with its axes.

    axis: title of the x axis; column: the letter a column is called by (`H`, `p`).
    outline: per row the token intervals [a, b) of the exact region; None takes it from `grid.exact`, cell by cell.
    marks: (position in tokens, label) of vertical lines that lie before that token; the one at `cut` is the strongest.
    divider: (row, label), a line under that row, where the decoder half begins, or the cut where rows are positions.
    row: what a row is called. kinds: what kind of layer each row is, empty where rows are no layers or nobody knows.
    fine: a long axis is drawn column by column this far, and merged to half as many columns beyond it.
    """

    grid: Grid = field(default=None)  # type: ignore[assignment]
    scale: Scale = field(default=None)  # type: ignore[assignment]
    axis: str = ""
    column: str = "H"
    row: str = "layer"
    kinds: tuple[str, ...] = ()
    outline: tuple[tuple[tuple[float, float], ...], ...] | None = None
    marks: tuple[tuple[float, str], ...] = ()
    cut: float | None = None
    divider: tuple[int, str] | None = None
    fine: int | None = None

    def row_name(self, row: int) -> str:
        """What a row is called in a sentence: `layer 6, window`."""
        return f"{self.row} {self.grid.rows[row]}" + (f", {self.kinds[row]}" if self.kinds else "")

    def edge(self, token: float) -> float:
        """Where a token begins on the axis, in columns from the left edge; inside a wide column it is interpolated."""
        grid = self.grid
        edges = np.append(grid.start, grid.stop[-1:])
        return float(np.interp(token, edges, np.arange(len(edges)))) if len(edges) > 1 else 0.0

    def spans(self) -> list[list[tuple[float, float]]]:
        """The exact region per row, as intervals in columns."""
        if self.outline is not None:
            clipped = [[(self.edge(a), self.edge(b)) for a, b in row] for row in self.outline]
            return [[(a, b) for a, b in row if b > a] for row in clipped]
        return [runs_of(row) for row in self.grid.exact]


def runs_of(mask: np.ndarray) -> list[tuple[float, float]]:
    """Intervals [a, b) where a 1-d mask is true."""
    steps = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(float(a), float(b)) for a, b in zip(steps[::2], steps[1::2], strict=True)]
