"""Compare: two traces or two arms on one colour scale, their difference, and the first cell that differs."""

from __future__ import annotations

import json
from dataclasses import replace

import gradio as gr
from gradio.components import Component

from replayscope.traces import TraceReader
from replayscope.ui.compare import compare_chart
from replayscope.ui.heatmap import draw
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.parts import Content, Tab, attempt, figure, html
from replayscope.ui.view import Choice

_PARTS = ("compare_first", "compare_second", "compare_difference")


def place() -> dict[str, Component]:
    """The difference above the two that it is of."""
    difference, hint = figure("rs-difference", "cut"), html("rs-compare-hint")
    with gr.Row(elem_classes="rs-halves", equal_height=True):
        first, second = figure("rs-first", "cut"), figure("rs-second", "cut")
    return {
        "compare_difference": difference, "compare_hint": hint, "compare_first": first, "compare_second": second,
    }  # fmt: skip


def content(library: Library, c: Choice) -> Content:
    """The maps of both sides and the second minus the first."""
    other = library.open(c.other) if c.other else None
    version = library.version(c.other) if c.other else ()
    what = ("compare", c.arm, c.reference, c.point, c.region, c.metric, c.other, version, c.other_arm)
    made, hint = attempt(library, c, lambda: library.cached(c.trace, what, lambda trace: _figures(trace, other, c)))
    figures = json.loads(made) if made else dict.fromkeys(_PARTS, "")
    return {**figures, "compare_hint": hint}


def _figures(trace: TraceReader, other: TraceReader | None, c: Choice) -> str:
    """The three figures by the part that they fill, as JSON of JSON."""
    made = compare_chart(trace, other, c.point, c.metric, c.region, c.arm, c.other_arm, c.reference)
    panels = [replace(panel, title=name) for name, panel in made.panels.items()]
    panels[2] = replace(panels[2], title=made.title, sentence=made.sentence, notes=made.notes)
    return json.dumps({part: figure_json(draw(panel)) for part, panel in zip(_PARTS, panels, strict=True)})


TAB = Tab(
    "compare", "Compare", ("trace", "arm", "other", "other_arm", "reference", "point", "region", "metric"), place,
    content,
)  # fmt: skip
