"""Cut × layer: the map of one arm, and all that is known of the chosen cell."""

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
        return {"cut_map": figure("rs-cut-large", "cut"), "cut_cell": html("rs-cut-cell")}


def content(library: Library, c: Choice) -> Content:
    """The map, and the cell at the chosen cut and layer."""
    return {
        "cut_map": maps.cut_map(library, c),
        "cut_cell": cell.at_cut(library.open(c.trace), maps.cut_chart(library, c), c),
    }


TAB = Tab(
    "cut", "Cut × layer", ("trace", "arm", "reference", "point", "region", "metric", "cut", "layer"), place, content
)
