"""Draws one number per cut and arm on a log axis, with a lane of its own for exact zeros and one for inf."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from replayscope.ui.axis import LogAxis
from replayscope.ui.grid import Chart
from replayscope.ui.heading import heading, message
from replayscope.ui.theme import LIGHT, count, escape, number, template
from replayscope.ui.words import size_words

DASHES = ("solid", "dash", "dot", "dashdot")
CSS_DASH = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dashed"}


@dataclass(frozen=True)
class Line:
    """One arm. All arrays are [cut], over `LineChart.cuts`, NaN where the arm has no run or computed nothing.

    mean, largest, last: the metric over the suffix, its largest row, and the last row. n: rows. flips: rows whose most
    likely token changed. everywhere: an arm without a cut, one value drawn across the figure.
    """

    label: str
    mean: np.ndarray
    largest: np.ndarray
    last: np.ndarray
    n: np.ndarray
    flips: np.ndarray
    quiet: bool = False
    everywhere: bool = False


@dataclass(frozen=True)
class LineChart(Chart):
    """Lines over cuts [cut]; floor: noise floor at each cut, NaN if unknown. window: W, marked where H passes it."""

    cuts: tuple[int, ...] = ()
    lines: tuple[Line, ...] = ()
    floor: np.ndarray | None = None
    label: str = ""
    unit: str = ""
    window: int | None = None


def draw_lines(chart: LineChart, height: int = 400) -> go.Figure:
    """A LineChart as a plotly figure in light colours; without a line it gives the axes and a message."""
    figure = go.Figure(layout={"template": template()})
    key: list = []
    everything = [values for line in chart.lines for values in (line.mean, line.largest, line.last)]
    floor = chart.floor if chart.floor is not None else np.full(len(chart.cuts), np.nan)
    axis = LogAxis.over(np.concatenate([*everything, floor[floor > 0]]) if everything else np.zeros(0))
    x = np.arange(len(chart.cuts))
    if chart.lines and np.isfinite(floor).any():
        _band(figure, x, axis, floor)
        key.append("within the noise")
    for i, line in enumerate(chart.lines):
        colour = LIGHT.arms[-1] if line.quiet else LIGHT.arms[i % (len(LIGHT.arms) - 1)]
        # An arm without a cut is one value for all: dashed, so that what it covers still shows.
        dash = "dash" if line.everywhere else DASHES[i // (len(LIGHT.arms) - 1) % len(DASHES)]
        _line(figure, chart, x, axis, line, colour, dash)
        key.append([line.label, colour, CSS_DASH[dash]])
    if chart.lines:
        key += [["largest row", LIGHT.dim, "dotted"], *_flips(figure, chart, x, axis)]
    if axis.below and chart.lines:
        figure.add_hline(y=axis.low - axis.lane / 2, line={"color": LIGHT.line, "width": 1})
    _frame(figure, chart, axis)
    said = "" if any(np.isfinite(v).any() for v in everything) else "nothing recorded for this choice"
    if chart.lines and not said and all((v[~np.isnan(v)] == 0).all() for v in everything):
        said = "all zero: identical everywhere"
    message(figure, said)
    heading(figure, chart, height, key, list(chart.cuts))
    return figure


def _band(figure: go.Figure, x: np.ndarray, axis: LogAxis, floor: np.ndarray) -> None:
    """The area under the noise floor: what lies in it is no finding."""
    low = axis.range[0]
    top = np.where(np.nan_to_num(floor) > 0, axis.place(floor), low)
    xs = np.repeat(x.astype(float), 2) + np.tile([-0.5, 0.5], len(x))
    hidden = {"mode": "lines", "hoverinfo": "skip", "line": {"width": 0}, "showlegend": False}
    figure.add_scatter(x=xs.tolist(), y=np.full(len(xs), low).tolist(), **hidden)
    figure.add_scatter(
        x=xs.tolist(), y=np.repeat(top, 2).tolist(), fill="tonexty", **(hidden | {"showlegend": True}),
        fillpattern={"shape": ".", "fgcolor": LIGHT.dim, "bgcolor": LIGHT.absent, "size": 5, "solidity": 0.2},
        name="within the noise",
    )  # fmt: skip


def _line(
    figure: go.Figure, chart: LineChart, x: np.ndarray, axis: LogAxis, line: Line, colour: str, dash: str
) -> None:
    unit = f" {chart.unit}" if chart.unit else ""
    n, flips = np.nan_to_num(line.n), np.nan_to_num(line.flips)
    floor = chart.floor if chart.floor is not None else np.full(len(chart.cuts), np.nan)
    text = [
        ""
        if np.isnan(line.mean[i])
        else f"<b>{escape(line.label)}</b>{'' if line.everywhere else f' · H {count(cut)}'}<br>"
        f"mean <b>{number(line.mean[i], 3)}{unit}</b> over {count(n[i])} rows, "
        f"{size_words(float(line.mean[i]), float(floor[i]))}<br>"
        f"largest row {number(line.largest[i], 3)} · last row {number(line.last[i], 3)}<br>"
        f"top-1 flips {count(flips[i])}"
        for i, cut in enumerate(chart.cuts)
    ]
    common = {"x": x.tolist(), "hovertemplate": "%{text}<extra></extra>", "text": text, "cliponaxis": False}
    figure.add_scatter(
        y=axis.place(line.largest).tolist(), mode="lines", name=f"{line.label}, largest row", showlegend=False,
        line={"color": colour, "width": 1, "dash": "dot"}, opacity=0.75, **common,
    )  # fmt: skip
    if not line.quiet:
        last = np.where(np.arange(len(x)) == len(x) - 1, line.last, np.nan) if line.everywhere else line.last
        figure.add_scatter(
            y=axis.place(last).tolist(), mode="markers", name=f"{line.label}, last row", showlegend=False,
            marker={"symbol": "circle-open", "size": 5, "color": colour, "line": {"width": 1}}, opacity=0.7, **common,
        )  # fmt: skip
    marks = len(x) <= 80 and not line.everywhere
    figure.add_scatter(
        y=axis.place(line.mean).tolist(), mode="lines+markers" if marks or len(x) == 1 else "lines", name=line.label,
        line={"color": colour, "width": 1.5 if line.quiet else 2.5, "dash": dash},
        marker={"size": 5, "color": colour}, **common,
    )  # fmt: skip


def _flips(figure: go.Figure, chart: LineChart, x: np.ndarray, axis: LogAxis) -> list:
    """Orange marks on the line of an arm at the cuts where a most likely token changed."""
    at_x: list[float] = []
    at_y: list[float] = []
    for line in chart.lines:
        where = np.nan_to_num(line.flips) > 0
        if line.everywhere:
            where &= np.arange(len(x)) == len(x) - 1
        at_x += x[where].tolist()
        at_y += axis.place(line.mean)[where].tolist()
    if not at_x:
        return []
    size = 9 if len(at_x) <= 24 else 6
    marker = {"symbol": "diamond", "size": size, "color": LIGHT.flip, "line": {"color": LIGHT.card, "width": 1}}
    figure.add_scatter(x=at_x, y=at_y, mode="markers", name="flip", hoverinfo="skip", cliponaxis=False, marker=marker)
    return ["flip"]


def _frame(figure: go.Figure, chart: LineChart, axis: LogAxis) -> None:
    columns = len(chart.cuts)
    places, texts = axis.ticks()
    chosen: list[int] = []
    for column in [0, columns - 1, *(round(i * columns / 8) for i in range(1, 8))]:
        if 0 <= column < columns and all(abs(column - c) >= columns * 0.07 for c in chosen):
            chosen.append(column)
    figure.update_xaxes(
        title_text="cut H, tokens of cached prefix (one step per cut)", range=[-0.5, max(columns, 1) - 0.5],
        tickangle=0, tickvals=sorted(chosen), ticktext=[count(chart.cuts[c]) for c in sorted(chosen)],
    )  # fmt: skip
    figure.update_yaxes(
        title_text=escape(f"{chart.label}, {chart.unit}" if chart.unit else chart.label), range=axis.range,
        tickvals=places, ticktext=texts, showgrid=True, gridcolor=LIGHT.line, gridwidth=1,
    )  # fmt: skip
    past = sum(cut <= (chart.window or 0) for cut in chart.cuts)
    if chart.window and 0 < past < columns:
        figure.add_vline(x=past - 0.5, line={"color": LIGHT.ink, "width": 1, "dash": "dot"})
        figure.add_annotation(
            text=f"H > W = {count(chart.window)}", x=past - 0.5, y=1, yref="paper", yanchor="bottom", xanchor="left",
            xshift=-4, showarrow=False, font={"size": 12, "color": LIGHT.dim},
        )  # fmt: skip
    figure.update_layout(legend={"itemclick": False, "itemdoubleclick": False}, hovermode="closest")
