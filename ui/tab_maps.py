"""Cut × layer and position × layer: a wide map, and beside it all that is known of the chosen cell."""

from __future__ import annotations

from collections.abc import Callable

import gradio as gr
from gradio.components import Component

from replayscope.traces import TraceReader
from replayscope.ui import cell, maps
from replayscope.ui.grid import MapChart
from replayscope.ui.library import Library
from replayscope.ui.parts import Content, Tab, figure, html
from replayscope.ui.view import Choice


def _tab(
    axis: str, title: str, controls: tuple[str, ...],
    drawn: Callable[[Library, Choice], str], chart: Callable[[Library, Choice], MapChart],
    said: Callable[[TraceReader, MapChart, Choice], str],
) -> Tab:  # fmt: skip
    """axis: what a column of the map stands for. drawn, chart: the map of a choice, and its numbers. said: its cell."""

    def place() -> dict[str, Component]:
        with gr.Row(elem_classes="rs-beside"):
            return {f"{axis}_map": figure(f"rs-{axis}-large", axis), f"{axis}_cell": html(f"rs-{axis}-cell")}

    def content(library: Library, c: Choice) -> Content:
        return {f"{axis}_map": drawn(library, c), f"{axis}_cell": said(library.open(c.trace), chart(library, c), c)}

    return Tab(axis, title, controls, place, content)


CUT = _tab(
    "cut", "Cut × layer", ("trace", "arm", "reference", "point", "region", "metric", "cut", "layer"),
    maps.cut_map, maps.cut_chart, cell.at_cut,
)  # fmt: skip
POSITION = _tab(
    "position", "Position × layer", ("trace", "arm", "reference", "point", "metric", "cut", "layer", "position"),
    maps.position_map, maps.position_chart, cell.at_position,
)  # fmt: skip
