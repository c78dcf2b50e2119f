"""Position × layer: one run with its exact region, the chosen cell, and the text around it."""

from __future__ import annotations

import gradio as gr
from gradio.components import Component

from replayscope.ui import cell, maps
from replayscope.ui.library import Library
from replayscope.ui.parts import Content, Tab, figure, html
from replayscope.ui.view import Choice


def place() -> dict[str, Component]:
    """A wide map with its cell beside it."""
    with gr.Row(elem_classes="rs-beside"):
        return {"position_map": figure("rs-position-large", "position"), "position_cell": html("rs-position-cell")}


def content(library: Library, c: Choice) -> Content:
    """The map of the chosen run, and the cell at the chosen position and layer."""
    return {
        "position_map": maps.position_map(library, c),
        "position_cell": cell.at_position(library.open(c.trace), maps.position_chart(library, c), c),
    }


TAB = Tab(
    "position", "Position × layer", ("trace", "arm", "reference", "point", "metric", "cut", "layer", "position"),
    place, content,
)  # fmt: skip
