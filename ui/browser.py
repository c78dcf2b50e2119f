"""Figures drawn by Chrome or Chromium, through kaleido."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import numpy as np
import plotly.graph_objects as go

LEFT, RIGHT = 64, 112  # pixels beside the axes of a map: ticks and title, and the colour bar


def drawn(figure: go.Figure, kind: str, width: int, height: int) -> bytes:
    """png, svg or pdf of a figure; width and height in pixels. Raises what plotly and kaleido raise where they cannot.

    What the packages log about their own pipe to the browser goes nowhere, unless the program listens to their loggers:
    a browser that ends while it still speaks is an error to them, and the picture is whole.
    """
    for package in ("kaleido", "choreographer", "browser_proc"):
        log = logging.getLogger(package)
        if not log.handlers:
            log.addHandler(logging.NullHandler())
    # Not for the time of the call: that would be every thread's filters. At the front once, however often it is called.
    warnings.filterwarnings("ignore", module=r"(kaleido|choreographer)\b")
    # Of a pattern Chromium makes a picture for each box in a PDF: hundreds, of a tenth of a megabyte each.
    shown = plain(figure, width, height) if kind == "pdf" else figure
    return shown.to_image(format=kind, width=width, height=height, scale=2)


def plain(figure: go.Figure, width: int, height: int) -> go.Figure:
    """The same figure with the pattern of every box drawn as lines or dots; one box of each stays as it is, in the key.

    width, height: of the whole figure in pixels, which say how far lines and dots are apart.
    """
    data: list[Any] = []
    for one in figure.data:
        trace: Any = one
        if trace.type != "bar" or not trace.marker.pattern.shape:
            data.append(trace)
            continue
        pattern, axes = trace.marker.pattern, {"xaxis": trace.xaxis, "yaxis": trace.yaxis}
        boxes = _boxes(trace)
        if pattern.shape == "/":
            ground = go.Bar(trace)
            ground.marker = {"color": pattern.bgcolor, "line": {"width": 0}}
            ground.showlegend = False
            data.append(ground)
        key = go.Bar(trace)
        key.update(x=[None], y=[None], base=None, width=None)
        data.append(key)
        made = _hatch if pattern.shape == "/" else _dots
        # Across and up in pixels, so that the distances are those of the pattern.
        across, up = _pixels(figure, trace, width, height)
        x, y = made(boxes * [across, across, up, up], float(pattern.size))
        thick = pattern.solidity * pattern.size  # as plotly draws them: lines so thick, dots of the same share
        data.append(
            go.Scatter(
                x=(x / across).tolist(), y=(y / up).tolist(), mode="lines" if pattern.shape == "/" else "markers",
                name=trace.name, hoverinfo="skip", showlegend=False,
                line={"color": pattern.fgcolor, "width": thick},
                marker={"color": pattern.fgcolor, "size": 2 * math.sqrt(thick * pattern.size / math.pi)}, **axes,
            )
        )  # fmt: skip
    return go.Figure(data, figure.layout)


def _boxes(trace: Any) -> np.ndarray:
    """[box, (left, right, bottom, top)] of a trace of bars, in the units of its axes."""
    x, width, base, y = (np.asarray(values, float) for values in (trace.x, trace.width, trace.base, trace.y))
    return np.stack([x - width / 2, x + width / 2, base, base + y], 1)


def _pixels(figure: go.Figure, trace: Any, width: int, height: int) -> tuple[float, float]:
    """Pixels per unit of a trace's axes, across and up."""
    layout: Any = figure.layout
    margin, usual = layout.margin, layout.template.layout.margin
    x, y = layout[f"xaxis{(trace.xaxis or 'x')[1:]}"], layout[f"yaxis{(trace.yaxis or 'y')[1:]}"]
    low, high = y.domain or (0.0, 1.0)
    inner = height - (margin.t or usual.t) - (margin.b or usual.b)
    return (width - LEFT - RIGHT) / (x.range[1] - x.range[0]), inner * (high - low) / (y.range[1] - y.range[0])


def _hatch(boxes: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Lines that rise at 45 degrees, `size` pixels from one to the next, through all boxes in pixels, at least one
    through each; NaN between two lines."""
    size *= math.sqrt(2)  # along an axis
    left, right, bottom, top = boxes.T
    x: list[float] = []
    y: list[float] = []
    for a, b, low, high in zip(left, right, bottom, top, strict=True):
        # Of the lines y - x = c, of which all boxes see the same, the ones that pass this box.
        c = np.arange(math.ceil((low - b) / size), math.floor((high - a) / size) + 1) * size
        c = c if c.size else np.array([(low + high - a - b) / 2])
        first, last = np.maximum(a, low - c), np.minimum(b, high - c)
        gap = np.full(len(c), np.nan)
        x += np.stack([first, last, gap], 1).ravel().tolist()
        y += np.stack([first + c, last + c, gap], 1).ravel().tolist()
    return np.array(x), np.array(y)


def _dots(boxes: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Centres of dots `size` pixels apart in all boxes in pixels, at least one in each."""
    x: list[float] = []
    y: list[float] = []
    for a, b, low, high in boxes:
        across, up = _along(a, b, size), _along(low, high, size)
        x += np.tile(across, len(up)).tolist()
        y += np.repeat(up, len(across)).tolist()
    return np.array(x), np.array(y)


def _along(low: float, high: float, size: float) -> np.ndarray:
    """The odd multiples of half of `size` in [low, high), so that neighbours go on alike; the middle if none is."""
    found = (np.arange(math.ceil(low / size - 0.5), math.ceil(high / size - 0.5)) + 0.5) * size
    return found if found.size else np.array([(low + high) / 2])
