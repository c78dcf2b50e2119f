"""Tensor: from every layer at one position down to single values of both sides, read as they are shown."""

from __future__ import annotations

from typing import Any

from gradio.components import Component

from replayscope.traces import TraceReader
from replayscope.ui.controls import Slider
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.panels import draw_panels
from replayscope.ui.parts import Tab, attempt, figure, html
from replayscope.ui.states import NotRecorded, heads, need, other_run
from replayscope.ui.tensor import stored_points, tensor_chart
from replayscope.ui.theme import count
from replayscope.ui.view import Choice, chosen_run


def place() -> dict[str, Component]:
    """Layers, then the heads of the chosen one, then the rows around the chosen position."""
    return {
        "tensor_layers": figure("rs-tensor-layers", "layer"), "tensor_heads": figure("rs-tensor-heads"),
        "tensor_rows": figure("rs-tensor-rows"), "tensor_hint": html("rs-tensor-hint"),
    }  # fmt: skip


def content(library: Library, c: Choice) -> dict[str, Any]:
    """Every level at the chosen run, position, layer and head. Nothing is kept: what is read is small."""
    trace = library.open(c.trace)
    run = chosen_run(trace, c).index
    layers = stored_points(trace, run, c.reference).get(c.point, []) if trace.states() else []
    layer = min(layers, key=lambda one: abs(one - c.layer)) if layers else 0
    many = _heads(trace, run, c, layer if layers else None)
    head = min(c.head, many - 1)

    def level(chosen: int | None, at: int | None) -> str:
        made = tensor_chart(trace, run, c.point, chosen, at, c.position, reference=c.reference)
        return figure_json(draw_panels(made, made.panels))

    top, hint = attempt(library, c, lambda: level(None, head if many > 1 else None))
    drawn = not hint and len(layers) > 1
    return {
        "tensor_layers": top, "tensor_hint": hint,
        "tensor_heads": level(layer, None) if drawn and many > 1 else "",
        "tensor_rows": level(layer, head if many > 1 else None) if drawn else "",
        "head": Slider(0, many - 1, head, f"head {count(head)}", many > 1),
    }  # fmt: skip


def _heads(trace: TraceReader, run: int, c: Choice, layer: int | None) -> int:
    """Heads of the hook point, 1 where it has none or is not stored."""
    name = c.point if layer is None else f"layers.{layer}.{c.point}"
    try:
        need(trace, (run, other_run(trace, trace.runs[run], c.reference)), name)
    except NotRecorded:
        return 1
    return heads(trace, run, name)[0]


TAB = Tab(
    "tensor", "Tensor", ("trace", "arm", "reference", "point", "cut", "layer", "position", "head"), place, content
)
