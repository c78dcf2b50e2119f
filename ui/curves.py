"""Curves over positions, replay lengths or distances, on a log axis with a place for exact zeros."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go

from replayscope.ui.axis import LogAxis
from replayscope.ui.grid import Chart
from replayscope.ui.heading import heading, message
from replayscope.ui.theme import LIGHT, escape, template

CSS_DASH = {"solid": "solid", "dash": "dashed", "dot": "dotted"}


@dataclass(frozen=True)
class Curve:
    """One curve. x, y: [point], NaN in y where there is no number; hover: [point] HTML that is escaped already.

    weight: width in pixels; marks: a dot on every point; listed: it has a place of its own in the key.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    hover: list[str]
    colour: str
    weight: float = 2.0
    dash: str = "solid"
    marks: bool = False
    listed: bool = True


@dataclass(frozen=True)
class CurveChart(Chart):
    """Curves with their axes.

    axis, label, unit: title of x; what y is, and its unit. log: y on a log axis with lanes, else linear around 0.
    ticks: (place, text of one or more lines) on x, empty for plotly's own. span: where x begins and ends.
    marks: (x, label, strong) vertical lines. limits: (y, label) horizontal dashed lines.
    floor: (x, y) of the noise floor, drawn as a band from below. flips: (x, y, hover) of orange marks.
    infinite: what the lane above the axis is called. empty: what a figure without numbers says.
    names, rows: the numbers as a long table. columns: what x means on a click, one per point.
    """

    curves: tuple[Curve, ...] = ()
    axis: str = ""
    label: str = ""
    unit: str = ""
    log: bool = True
    ticks: tuple[tuple[float, str], ...] = ()
    span: tuple[float, float] = (0.0, 1.0)
    marks: tuple[tuple[float, str, bool], ...] = ()
    limits: tuple[tuple[float, str], ...] = ()
    floor: tuple[np.ndarray, np.ndarray] | None = None
    flips: tuple[tuple[float, float, str], ...] = ()
    infinite: str = "inf"
    empty: str = "nothing recorded for this choice"
    names: tuple[str, ...] = ()
    rows: list[list] = field(default_factory=list)
    columns: tuple[int, ...] = ()


def layer_colours(layers: int) -> list[str]:
    """A colour per layer, pale to dark in four steps: their order can be read, and each has its partner in the dark."""
    return [LIGHT.magnitude[2 + 4 * layer // layers] for layer in range(layers)]


def draw_curves(chart: CurveChart, height: int = 420) -> go.Figure:
    """A CurveChart as a plotly figure in light colours; without a curve it gives the axes and a message."""
    figure = go.Figure(layout={"template": template()})
    values = [curve.y for curve in chart.curves]
    limits = np.array([value for value, _ in chart.limits])
    floor = chart.floor[1] if chart.floor is not None else np.zeros(0)
    axis = LogAxis.over(np.concatenate([*values, limits, floor[floor > 0]]) if values else np.zeros(0))
    place = axis.place if chart.log else np.asarray
    key: list = []
    if chart.floor is not None and np.isfinite(chart.floor[1]).any():
        _band(figure, chart.floor, axis)
        key.append("within the noise")
    for curve in chart.curves:
        figure.add_scatter(
            x=curve.x.tolist(), y=place(curve.y).tolist(), name=escape(curve.label), text=curve.hover,
            mode="lines+markers" if curve.marks or len(curve.x) == 1 else "lines",
            hovertemplate="%{text}<extra></extra>", cliponaxis=False, showlegend=curve.listed,
            line={"color": curve.colour, "width": curve.weight, "dash": curve.dash},
            marker={"size": 6, "color": curve.colour},
        )  # fmt: skip
        if curve.listed:
            key.append([curve.label, curve.colour, CSS_DASH[curve.dash]])
    if chart.flips:
        _flips(figure, chart, place)
        key.append("flip")
    _frame(figure, chart, axis)
    message(figure, _said(chart, values))
    heading(figure, chart, height, key, list(chart.columns))
    return figure


def _lines(text: str) -> str:
    return "<br>".join(map(escape, text.split("\n")))


def _said(chart: CurveChart, values: list[np.ndarray]) -> str:
    known = [v[~np.isnan(v)] for v in values]
    if not any(v.size for v in known):
        return chart.empty
    if not any(np.isfinite(v).any() for v in known):
        return "no finite values"
    return "all zero: identical everywhere" if all((v == 0).all() for v in known) else ""


def _band(figure: go.Figure, floor: tuple[np.ndarray, np.ndarray], axis: LogAxis) -> None:
    """The area under the noise floor: what lies in it is no finding."""
    x, y = floor
    low = axis.range[0]
    top = np.where(np.nan_to_num(y) > 0, axis.place(y), low)
    hidden = {"mode": "lines", "hoverinfo": "skip", "line": {"width": 0}, "showlegend": False}
    figure.add_scatter(x=x.tolist(), y=np.full(len(x), low).tolist(), **hidden)
    figure.add_scatter(
        x=x.tolist(), y=top.tolist(), fill="tonexty", name="within the noise", **(hidden | {"showlegend": True}),
        fillpattern={"shape": ".", "fgcolor": LIGHT.dim, "bgcolor": LIGHT.absent, "size": 5, "solidity": 0.2},
    )  # fmt: skip


def _flips(figure: go.Figure, chart: CurveChart, place) -> None:
    x, y, text = zip(*chart.flips, strict=True)
    size = 10 if len(x) <= 24 else 7
    figure.add_scatter(
        x=list(x), y=place(np.array(y, float)).tolist(), text=list(text), mode="markers", name="flip",
        hovertemplate="%{text}<extra></extra>", cliponaxis=False,
        marker={"symbol": "diamond", "size": size, "color": LIGHT.flip, "line": {"color": LIGHT.card, "width": 1}},
    )  # fmt: skip


def _frame(figure: go.Figure, chart: CurveChart, axis: LogAxis) -> None:
    figure.update_xaxes(title_text=escape(chart.axis), range=list(chart.span), tickangle=0)
    if chart.ticks:
        figure.update_xaxes(tickvals=[p for p, _ in chart.ticks], ticktext=[_lines(t) for _, t in chart.ticks])
    name = f"{chart.label}, {chart.unit}" if chart.unit else chart.label
    figure.update_yaxes(title_text=escape(name), showgrid=True, gridcolor=LIGHT.line, gridwidth=1)
    if chart.log:
        places, texts = axis.ticks(chart.infinite)
        figure.update_yaxes(range=axis.range, tickvals=places, ticktext=texts)
        if axis.below:
            figure.add_hline(y=axis.low - axis.lane / 2, line={"color": LIGHT.line, "width": 1})
    else:
        figure.update_yaxes(zeroline=True, zerolinecolor=LIGHT.dim, zerolinewidth=1)
    for value, label in chart.limits:
        y = float(axis.place(np.array([value]))[0]) if chart.log else value
        figure.add_hline(y=y, line={"color": LIGHT.ink, "width": 1.2, "dash": "dash"})
        figure.add_annotation(
            text=escape(label), x=1, xref="paper", xanchor="right", y=y, yanchor="bottom", showarrow=False,
            font={"size": 12, "color": LIGHT.ink}, bgcolor=LIGHT.card, opacity=0.9, borderpad=1,
        )  # fmt: skip
    width = chart.span[1] - chart.span[0]
    for x, label, strong in chart.marks:
        colour = LIGHT.accent if strong else LIGHT.dim
        figure.add_vline(x=x, line={"color": colour, "width": 2 if strong else 1.2, "dash": "3px,3px"})
        left = x < chart.span[0] + 0.85 * width
        figure.add_annotation(
            text=escape(label), x=x, y=1, yref="paper", yanchor="bottom", xanchor="left" if left else "right",
            xshift=-4 if left else 4, showarrow=False, font={"size": 12, "color": colour},
        )  # fmt: skip
    figure.update_layout(legend={"itemclick": False, "itemdoubleclick": False}, hovermode="closest")
