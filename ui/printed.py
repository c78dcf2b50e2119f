"""A figure drawn by matplotlib, for machines without a browser: the same cells, curves, marks and words.

Knows only what the figures of this project are made of: heat maps, scatter lines, patterned bars, lines and notes.
"""

from __future__ import annotations

import base64
import html
import io
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

DPI = 100  # figures are laid out in pixels of this many to the inch, and drawn at twice that
LEFT, RIGHT, BAR = 78, 24, 104
LETTER, BESIDE = 7, 42  # pixels that a letter beside the y axis takes, and its title, ticks and gaps
DASHES = {"dash": (0, (6, 4)), "dot": (0, (1.5, 2.5)), "dashdot": "-.", "3px,3px": (0, (3, 3))}
MARKERS = {"diamond": "D", "x": "X", "square": "s", "circle-open": "o"}
HATCHES = {"/": "////", ".": "..."}


def render(figure: go.Figure, kind: str, width: int, height: int) -> bytes:
    """png, svg or pdf of a figure; width and height in pixels."""
    layout: Any = figure.layout
    base = layout.template.layout
    ink, ground = base.font.color, base.paper_bgcolor
    canvas = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=ground)
    FigureCanvasAgg(canvas)
    margin = layout.margin
    top, bottom = margin.t or base.margin.t, (margin.b or base.margin.b) + 26
    bars = any(trace.type == "heatmap" and trace.showscale is not False for trace in figure.data)  # type: ignore[attr-defined]
    left, right = _left(layout), BAR if bars else RIGHT
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    panels = {n: _axes(canvas, layout, n, box, base) for n in _numbers(layout)}
    named: dict[str, Any] = {}
    before: Any = None
    for trace in figure.data:
        one: Any = trace
        axes = panels[(one.xaxis or "x")[1:]]
        handle = _draw(axes, one, before)
        before = one
        if handle is not None and one.name and one.showlegend is not False and one.type != "heatmap":
            named.setdefault(_plain(one.name), handle)
        if one.type == "heatmap" and one.showscale is not False:
            _bar(canvas, axes, handle, one, base, width)
    for shape in layout.shapes:
        axes = panels[_number(shape)]
        axes.plot(
            [shape.x0, shape.x1], [shape.y0, shape.y1], transform=_transform(axes, shape), scalex=False, scaley=False,
            color=shape.line.color, linewidth=_points(shape.line.width), linestyle=DASHES.get(shape.line.dash, "-"),
            clip_on=False, zorder=6,
        )  # fmt: skip
    for note in layout.annotations:
        _note(panels[_number(note)], note, ink, box)
    title = layout.title
    canvas.text(left / width, 1 - 16 / height, _plain(title.text), size=_points(17), weight="bold", va="top", color=ink)
    lines = title.text.count("<br>")
    canvas.text(
        left / width, 1 - (42 + 24 * lines) / height, _plain(title.subtitle.text), size=_points(12), va="top",
        color=base.title.subtitle.font.color,
    )  # fmt: skip
    if named:
        canvas.legend(
            list(named.values()), list(named), loc="lower left", bbox_to_anchor=(left / width - 0.006, 2 / height),
            ncols=min(6, len(named)), frameon=False, fontsize=_points(12), labelcolor=base.legend.font.color,
            handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip
    out = io.BytesIO()
    # The same figure gives the same bytes as far as matplotlib allows it.
    date = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    canvas.savefig(out, format=kind, dpi=2 * DPI, facecolor=ground, metadata=date)
    return out.getvalue()


def _points(pixels: float) -> float:
    return pixels * 72 / DPI


def _plain(text: str) -> str:
    """Plotly's pseudo-HTML as text."""
    return html.unescape(re.sub(r"<[^>]+>", "", str(text or "").replace("<br>", "\n")))


def _numbers(layout: Any) -> list[str]:
    return [key[5:] for key in layout.to_plotly_json() if re.fullmatch(r"xaxis\d*", key)]


def _left(layout: Any) -> int:
    """Pixels left of the axes, so that the longest text of a row and the title beside it have room."""
    texts = (_plain(text) for n in _numbers(layout) for text in layout[f"yaxis{n}"].ticktext or ())
    return max([LEFT, *(BESIDE + LETTER * len(text) for text in texts)])


def _number(item: Any) -> str:
    """The panel that a shape or note belongs to: the number of its axes."""
    for reference in (item.xref, item.yref):
        if reference and reference != "paper":
            return reference.split()[0][1:]
    return ""


def _axes(canvas: Figure, layout: Any, n: str, box: tuple[float, float, float, float], base: Any) -> Axes:
    x, y = layout[f"xaxis{n}"], layout[f"yaxis{n}"]
    left, bottom, width, height = box
    low, high = y.domain or (0.0, 1.0)
    axes = canvas.add_axes((left, bottom + low * height, width, (high - low) * height), facecolor=base.plot_bgcolor)
    for side in axes.spines.values():
        side.set_visible(False)
    for axis, set_ticks, limits, label in (
        (x, axes.set_xticks, axes.set_xlim, axes.set_xlabel), (y, axes.set_yticks, axes.set_ylim, axes.set_ylabel),
    ):  # fmt: skip
        if axis.range is not None:
            limits(*axis.range)
        if axis.tickvals is not None:
            set_ticks(list(axis.tickvals), [_plain(text) for text in axis.ticktext])
        label(_plain(axis.title.text), size=_points(13), color=base.xaxis.title.font.color)
    axes.tick_params(labelsize=_points(12), color=base.xaxis.tickcolor, labelcolor=base.xaxis.tickfont.color, length=3)
    if y.showgrid:
        axes.grid(axis="y", color=y.gridcolor, linewidth=0.8)
        axes.set_axisbelow(True)
    return axes


def _draw(axes: Axes, trace: Any, before: Any) -> Any:
    """Draws one trace and returns what stands for it in the key."""
    if trace.type == "heatmap":
        z = _array(trace.z)
        colours = LinearSegmentedColormap.from_list("scale", [(at, colour) for at, colour in trace.colorscale])
        gap: dict[str, Any] = (
            {"edgecolors": axes.get_facecolor(), "linewidth": 0.8} if trace.xgap else {"rasterized": True}
        )
        edges = [np.arange(size + 1) - 0.5 for size in (z.shape[1], z.shape[0])]
        masked = np.ma.masked_invalid(z)
        return axes.pcolormesh(*edges, masked, cmap=colours, vmin=trace.zmin, vmax=trace.zmax, zorder=1, **gap)
    if trace.type == "bar":
        pattern = trace.marker.pattern
        solid = pattern.bgcolor if len(pattern.bgcolor) == 7 else "none"
        patch: Any = None
        for middle, wide, base, tall in zip(
            *(_array(v) for v in (trace.x, trace.width, trace.base, trace.y)), strict=True
        ):
            patch = Rectangle((middle - wide / 2, base), wide, tall, facecolor=solid, edgecolor=pattern.fgcolor,
                              hatch=HATCHES[pattern.shape], linewidth=0, zorder=2)  # fmt: skip
            axes.add_patch(patch)
        return patch
    x, y = _array(trace.x), _array(trace.y)
    if trace.fill == "tonexty":
        low = _array(before.y)
        pattern = trace.fillpattern
        return axes.fill_between(x, low, y, facecolor=pattern.bgcolor, edgecolor=pattern.fgcolor, hatch="...",
                                 linewidth=0, zorder=0.5, alpha=0.6)  # fmt: skip
    mode = trace.mode or "lines"
    style: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 4, "alpha": trace.opacity}
    if "lines" in mode:
        style |= {"color": trace.line.color, "linewidth": _points(trace.line.width or 0),
                  "linestyle": DASHES.get(trace.line.dash, "-")}  # fmt: skip
    if "markers" in mode:
        marker = trace.marker
        hollow = str(marker.symbol or "").endswith("open")
        style |= {
            "marker": MARKERS.get(marker.symbol, "o"), "markersize": (marker.size or 6) * 0.75,
            "markerfacecolor": "none" if hollow else marker.color,
            "markeredgecolor": (marker.line.color if marker.line and marker.line.color else marker.color)
            if not hollow else marker.color,
            "markeredgewidth": marker.line.width if marker.line and marker.line.width is not None else 0,
            "zorder": 5 if mode == "markers" else 4,
        }  # fmt: skip
    return axes.plot(x, y, **style)[0]


def _array(values: Any) -> np.ndarray:
    """Numbers of a trace, None as NaN; a figure that went through JSON holds them as base64."""
    if isinstance(values, dict):
        shape = [int(size) for size in str(values.get("shape", "-1")).split(",")]
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).reshape(shape).astype(float)
    return np.array(
        [np.nan if v is None else v for v in values] if not isinstance(values, np.ndarray) else values, float
    )


def _bar(canvas: Figure, axes: Axes, handle: Any, trace: Any, base: Any, width: int) -> None:
    """The colour bar beside a panel, with the real values."""
    place = axes.get_position()
    bar = canvas.add_axes((place.x1 + 22 / width, place.y0, 10 / width, place.height * 0.93), facecolor="none")
    drawn = canvas.colorbar(handle, cax=bar)
    drawn.set_ticks(list(trace.colorbar.tickvals), labels=list(trace.colorbar.ticktext))
    drawn.outline.set_visible(False)  # type: ignore[operator]
    dim = base.xaxis.tickfont.color
    bar.tick_params(labelsize=_points(11), labelcolor=dim, color=base.xaxis.tickcolor, length=3)
    bar.set_title(_plain(trace.colorbar.title.text), size=_points(11), color=dim, loc="left", pad=6)


def _transform(axes: Axes, item: Any) -> Any:
    """From the references of a shape or note to matplotlib: data, or share of the panel."""
    domain = [reference == "paper" or " domain" in (reference or "") for reference in (item.xref, item.yref)]
    if all(domain):
        return axes.transAxes
    if domain[0]:
        return axes.get_yaxis_transform()
    return axes.get_xaxis_transform() if domain[1] else axes.transData


def _note(axes: Axes, note: Any, ink: str, box: tuple[float, float, float, float]) -> None:
    paper = note.xref == "paper" and note.yref == "paper"
    place = (box[0] + note.x * box[2], box[1] + note.y * box[3]) if paper else (note.x, note.y)
    text = axes.annotate(
        _plain(note.text), place, xycoords="figure fraction" if paper else _transform(axes, note),
        xytext=((note.xshift or 0) * 0.72, (note.yshift or 0) * 0.72 + 1), textcoords="offset points",
        ha={"left": "left", "right": "right"}.get(note.xanchor, "center"),
        va={"bottom": "bottom", "top": "top"}.get(note.yanchor, "center"),
        size=_points(note.font.size or 12), color=note.font.color or ink, zorder=7, annotation_clip=False,
        rotation=-(note.textangle or 0), weight="bold" if str(note.text).startswith("<b>") else "normal",
    )  # fmt: skip
    if note.bgcolor:
        text.set_bbox(
            {"facecolor": note.bgcolor, "edgecolor": note.bordercolor or "none", "pad": 2 + (note.borderpad or 0) / 2}
        )
