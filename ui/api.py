"""The same data for programs: what `gradio_client` can ask of a running page. docs/web-ui.md has an example of each."""

from __future__ import annotations

import json
import math
from inspect import signature
from typing import Any

import gradio as gr
import numpy as np
from gradio.events import api

from replayscope.inspector.errors import ReplayScopeError
from replayscope.inspector.names import choose
from replayscope.ui import maps, view
from replayscope.ui.checked import told
from replayscope.ui.figures import FIGURES
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.view import Choice


def publish(library: Library) -> None:
    """Adds the endpoints to the Blocks that is being built."""

    def list_traces() -> list[str]:
        """Names of the traces, newest first."""
        return library.names()

    def divergence_map(
        trace: str, arm: str = "", point: str = "window_kv", metric: str = "rel_l2", region: str = "window",
        reference: str = "full",
    ) -> dict[str, Any]:  # fmt: skip
        """A metric by layer and cut of one arm, as numbers: value, floor, rows and class are [layer][cut].

        NaN is null, and infinities are "inf" and "-inf". An empty arm is the first one.
        """
        return _answer(library, trace, lambda: _numbers(
            library, Choice(trace, arm, reference, point, region, metric)
        ))  # fmt: skip

    def figure(
        trace: str, name: str = "cut-layer", arm: str = "", point: str = "window_kv", metric: str = "rel_l2",
        region: str = "window", reference: str = "full", cut: int = -1,
    ) -> dict[str, Any]:  # fmt: skip
        """A named figure as plotly JSON, which `plotly.graph_objects.Figure` takes."""
        choice = Choice(trace, arm, reference, point, region, metric, cut)
        return _answer(library, trace, lambda: _figure(library, choice, name))

    for endpoint in (list_traces, divergence_map, figure):
        api(endpoint, api_name=endpoint.__name__, concurrency_limit=2)


def _answer(library: Library, trace: str, make: Any) -> Any:
    """What `make` gives; a fault of the question or of the file is one line without a path."""
    try:
        with told(trace, "answer"):
            return make()
    except ReplayScopeError as error:
        raise gr.Error(library.public(error, trace), print_exception=False) from None


def _numbers(library: Library, asked: Choice) -> dict[str, Any]:
    choice = view.menus(library.open(asked.trace), _named(library, asked)).choice
    chart = maps.cut_chart(library, choice)
    grid = chart.grid
    return {
        **chart.meta, "title": chart.title, "cuts": grid.start.tolist(), "layers": grid.rows,
        "layer_kinds": list(chart.kinds),
        "value": _strict(grid.value), "floor": _strict(grid.floor), "rows": grid.n.tolist(),
        "class": grid.kind.tolist(), "must_be_exact": grid.exact.tolist(),
    }  # fmt: skip


def _figure(library: Library, asked: Choice, name: str) -> dict[str, Any]:
    trace = library.open(asked.trace)
    choice = view.menus(trace, _named(library, asked)).choice
    draw = FIGURES[choose("figure", name, list(FIGURES))]
    taken = signature(draw).parameters
    options = {
        "point": choice.point, "metric_name": choice.metric, "bucket": choice.region, "arm": choice.arm,
        "reference": choice.reference, "run": view.chosen_run(trace, choice).index,
    }  # fmt: skip
    return json.loads(figure_json(draw(trace, **{key: value for key, value in options.items() if key in taken})))


def _named(library: Library, asked: Choice) -> Choice:
    """The choice if all of it is there; a program is told what the page would mend. Raises UsageError."""
    trace = library.open(asked.trace)
    shown = view.menus(trace, asked)
    for what, options in (
        ("arm", shown.arms), ("reference", shown.references), ("point", shown.points), ("region", shown.regions),
        ("metric", shown.metrics),
    ):  # fmt: skip
        if (given := getattr(asked, what)) or what != "arm":
            choose(what, given, [value for _, value in options])
    return asked


def _strict(values: np.ndarray) -> list:
    """Rows of numbers as strict JSON has them."""
    return [[value if math.isfinite(value) else _word(value) for value in row] for row in values.tolist()]


def _word(value: float) -> str | None:
    return None if math.isnan(value) else "inf" if value > 0 else "-inf"
