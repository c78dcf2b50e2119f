"""What stands above every figure: its title, the sentence below it, and the message of a figure without content."""

from __future__ import annotations

import textwrap
from typing import Any

import plotly.graph_objects as go

from replayscope.ui.grid import Chart
from replayscope.ui.theme import LIGHT, escape

# Pixels from the axes to below the title of x under ticks of one line, and what every further line of them adds.
UNDER, TICK_LINE = 42, 16
# Characters that fit beside the margins of an image 1,100 pixels wide, in DejaVu Sans, the widest font of the stack.
TITLE_WIDTH, SENTENCE_WIDTH = 94, 158


def heading(figure: go.Figure, chart: Chart, height: int, key: list, columns: list[int]) -> None:
    """Title and sentence, wrapped, with the margin they need, in pixels; `height` is that of a title of one line each
    and of ticks of one line. The key stands below the title of x.

    key, columns: what a page needs to write the key beside the figure and to know what was clicked.
    """
    title = wrap(chart.title, TITLE_WIDTH)
    below = wrap(" · ".join((chart.sentence, *chart.notes)), SENTENCE_WIDTH)
    over = 22 * (len(title) - 1) + 17 * (len(below) - 1)
    layout: Any = figure.layout
    under = TICK_LINE * max((text.count("<br>") for text in layout.xaxis.ticktext or ()), default=0)
    margin = layout.template.layout.margin
    axes = height - margin.t - margin.b
    given = layout.legend.y if layout.legend.y is not None else layout.template.layout.legend.y
    height += over + under
    figure.update_layout(
        height=height,
        title={
            "text": "<br>".join(title), "subtitle": {"text": "<br>".join(below)},
            "pad": {"t": 18 + 11 * (len(title) - 1)},
        },
        margin={"t": margin.t + over, "b": margin.b + under},
        legend={"y": min(given, -(UNDER + under) / axes)},
        meta={
            "title": chart.title, "sentence": chart.sentence, "notes": list(chart.notes),
            "key": key, "columns": columns, "height": height,
        },
    )  # fmt: skip


def message(figure: go.Figure, text: str) -> None:
    """A box in the middle that says why there is nothing to see; empty text leaves the figure as it is."""
    if text:
        figure.add_annotation(
            text=escape(text), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, bgcolor=LIGHT.card,
            bordercolor=LIGHT.line, borderpad=8, font={"size": 14, "color": LIGHT.ink},
        )  # fmt: skip


def wrap(text: str, width: int) -> list[str]:
    """Escaped lines of at most `width` characters, about equally long: no word stands alone, no dot leads."""
    lines = _split(text, width)
    for narrower in range(width - 1, width // 2, -1):
        again = _split(text, narrower)
        if len(again) > len(lines):
            break
        lines = again
    return [escape(line) for line in lines]


def _split(text: str, width: int) -> list[str]:
    held = textwrap.wrap(text.replace(" · ", "\u00a0· "), width, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in held] or [""]
