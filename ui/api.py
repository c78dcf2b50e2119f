"""The same data for programs: what `gradio_client` can ask of a running page. docs/web-ui.md has an example of each."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from inspect import signature
from typing import Any

import gradio as gr
import numpy as np
from gradio.events import api

from replayscope.inspector.errors import ReplayScopeError, UsageError
from replayscope.inspector.names import choose
from replayscope.ui import figures, maps, view
from replayscope.ui.checked import told
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.view import Choice

_SHOWN = 20  # cuts in a message


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
        _texts(trace=trace, arm=arm, point=point, metric=metric, region=region, reference=reference)
        return _answer(library, trace, lambda: _numbers(
            library, Choice(trace, arm, reference, point, region, metric)
        ))  # fmt: skip

    def figure(
        trace: str, name: str = "cut-layer", arm: str = "", point: str = "", metric: str = "", region: str = "",
        reference: str = "full", cut: int = -1,
    ) -> dict[str, Any]:  # fmt: skip
        """A named figure as plotly JSON, which `plotly.graph_objects.Figure` takes.

        What is left empty is the figure's own, a cut of -1 the middle one.
        """
        _texts(trace=trace, name=name, arm=arm, point=point, metric=metric, region=region, reference=reference)
        if type(cut) is not int:
            raise gr.Error(f"cut must be a whole number, not {cut!r:.60}", print_exception=False)
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
    for what in ("point", "region", "metric"):
        if not getattr(asked, what):
            raise UsageError(f"{what} is empty; name one")
    choice = _named(library, asked)
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
    taken = signature(figures.CHARTS[choose("figure", name, list(figures.FIGURES))]).parameters
    # The metric is checked by the figure: which ones there are depends on it.
    choice = _named(library, replace(asked, metric=""))
    options: dict[str, Any] = {"reference": choice.reference}
    for what, parameter, value in (
        ("point", "point", choice.point), ("region", "bucket", choice.region), ("arm", "arm", choice.arm),
        ("cut", "run", view.chosen_run(trace, choice).index),
    ):  # fmt: skip
        given = getattr(asked, what) not in ("", -1)
        if given and parameter not in taken:
            raise UsageError(f"figure {name} has no {what} to choose; leave it out")
        if given or (what in ("arm", "cut") and parameter in taken):
            options[parameter] = value
    return json.loads(figure_json(figures.figure(figures.chart(trace, name, asked.metric or None, **options))))


def _named(library: Library, asked: Choice) -> Choice:
    """The choice, with what is left open filled in; a program is told what the page would mend. Raises UsageError."""
    shown = view.menus(library.open(asked.trace), asked)
    for what, options in (
        ("arm", shown.arms), ("reference", shown.references), ("point", shown.points), ("region", shown.regions),
        ("metric", shown.metrics),
    ):  # fmt: skip
        if given := getattr(asked, what):
            choose(what, given, [value for _, value in options])
    if asked.cut != -1 and asked.cut not in shown.cuts:
        raise UsageError(f"unknown cut {asked.cut} of {shown.choice.arm}; valid: {_listed(shown.cuts)}")
    return shown.choice


def _texts(**given: object) -> None:
    """Raises gr.Error that names an argument which is no text: the trace is not to blame."""
    for what, value in given.items():
        if not isinstance(value, str):
            raise gr.Error(f"{what} must be text, not {value!r:.60}", print_exception=False)


def _listed(cuts: list[int]) -> str:
    """All of few cuts; of many the first, and how far they go."""
    if len(cuts) <= _SHOWN:
        return ", ".join(map(str, cuts))
    return f"{', '.join(map(str, cuts[:_SHOWN]))} and {len(cuts) - _SHOWN} more, up to {cuts[-1]}"


def _strict(values: np.ndarray) -> list:
    """Rows of numbers as strict JSON has them."""
    return [[value if math.isfinite(value) else _word(value) for value in row] for row in values.tolist()]


def _word(value: float) -> str | None:
    return None if math.isnan(value) else "inf" if value > 0 else "-inf"
