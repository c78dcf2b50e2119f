"""The named figures: each a pure function from a trace to a plotly figure in light colours."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import METRICS
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.ui.charts import cut_layer_chart, position_layer_chart, reach_chart
from replayscope.ui.grid import Chart, MapChart
from replayscope.ui.heatmap import draw
from replayscope.ui.lines import draw_lines
from replayscope.ui.logits import logits_chart


def cut_layer(
    trace: TraceReader, point: str = "window_kv", metric_name: str = "rel_l2", bucket: str = "window",
    arm: str | None = None, reference: str = "full",
) -> go.Figure:  # fmt: skip
    """What one arm changes, by cut H and layer."""
    return draw(cut_layer_chart(trace, point, metric_name, bucket, arm, reference))


def position_layer(
    trace: TraceReader, run: int | None = None, point: str = "window_kv", metric_name: str = "rel_l2",
    reference: str = "full", arm: str | None = None,
) -> go.Figure:  # fmt: skip
    """What one arm changes at one cut, by position and layer, with the exact region drawn in."""
    return draw(position_layer_chart(trace, run, point, metric_name, reference, arm))


def reach(
    trace: TraceReader, point: str = "hidden", metric_name: str = "rel_l2", arm: str | None = None,
    reference: str = "full",
) -> go.Figure:  # fmt: skip
    """How far behind the replay start a difference reaches, by layer, at the worst cut."""
    return draw(reach_chart(trace, point, metric_name, arm, reference))


def logits_by_cut(
    trace: TraceReader, metric_name: str = "kl", arms: list[str] | None = None, reference: str = "full"
) -> go.Figure:
    """How far each arm moves the next-token distribution, by cut, with top-1 flips."""
    return draw_lines(logits_chart(trace, metric_name, arms, reference))


FIGURES: dict[str, Callable[..., go.Figure]] = {
    "cut-layer": cut_layer,
    "position-layer": position_layer,
    "reach": reach,
    "logits-kl": logits_by_cut,
}
CHARTS: dict[str, Callable[..., Chart]] = {
    "cut-layer": cut_layer_chart,
    "position-layer": position_layer_chart,
    "reach": reach_chart,
    "logits-kl": logits_chart,
}


def chart(trace: TraceReader, name: str, metric_name: str | None = None, **options) -> Chart:
    """The numbers of a named figure. `rel_l2`, the metric of states, stands for a figure's own where it has no states.

    Raises UsageError on an unknown figure and on a metric the figure does not have.
    """
    choose("figure", name, FIGURES)
    if metric_name is not None and (name != "logits-kl" or metric_name != "rel_l2"):
        options["metric_name"] = metric_name
    if name != "logits-kl" and metric_name and "point" not in options:
        kinds = METRICS[metric_name].kinds if metric_name in METRICS else ()
        if kinds and "state" not in kinds:
            raise UsageError(f"{name} shows states; {metric_name} belongs to {kinds[0]}, see --figure logits-kl")
    return CHARTS[name](trace, **options)


def figure(made: Chart) -> go.Figure:
    """Draws a chart of any kind."""
    return draw(made) if isinstance(made, MapChart) else draw_lines(made)  # type: ignore[arg-type]
