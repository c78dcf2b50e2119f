"""The named figures: each a pure function from a trace to a plotly figure in light colours."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import plotly.graph_objects as go

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import METRICS
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.ui.charts import cut_layer_chart, position_layer_chart, reach_chart
from replayscope.ui.compare import CompareChart, compare_chart
from replayscope.ui.curves import CurveChart, draw_curves
from replayscope.ui.grid import Chart, MapChart
from replayscope.ui.healing import healing_chart
from replayscope.ui.heatmap import draw
from replayscope.ui.lines import LineChart, draw_lines
from replayscope.ui.logits import logits_chart
from replayscope.ui.panels import draw_panels
from replayscope.ui.replay import replay_chart
from replayscope.ui.suffix import suffix_chart
from replayscope.ui.tensor import TensorChart, tensor_chart


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


def healing(
    trace: TraceReader, point: str = "hidden", metric_name: str = "rel_l2", arm: str | None = None,
    reference: str = "full", threshold: float = 1e-3,
) -> go.Figure:  # fmt: skip
    """How many tokens after the cut the difference needs to fall below a threshold, by layer."""
    return draw_curves(healing_chart(trace, point, metric_name, arm, reference, threshold))


def replay_length(
    trace: TraceReader, point: str = "window_kv", metric_name: str = "rel_l2", bucket: str = "window",
    arm: str | None = None, reference: str = "full", threshold: float = 1e-2,
) -> go.Figure:  # fmt: skip
    """How the difference falls as the replay grows, by layer, and from where on it is below a threshold."""
    return draw_curves(replay_chart(trace, point, metric_name, bucket, arm, reference, threshold))


def logits_by_cut(
    trace: TraceReader, metric_name: str = "kl", arms: list[str] | None = None, reference: str = "full"
) -> go.Figure:
    """How far each arm moves the next-token distribution, by cut, with top-1 flips."""
    return draw_lines(logits_chart(trace, metric_name, arms, reference))


def logits_by_token(
    trace: TraceReader, run: int | None = None, metric_name: str = "kl", arm: str | None = None,
    reference: str = "full",
) -> go.Figure:  # fmt: skip
    """How far one arm moves the next-token distribution at one cut, token by token, with top-1 flips."""
    return draw_curves(suffix_chart(trace, run, metric_name, arm, reference))


def tensor(
    trace: TraceReader, run: int | None = None, point: str | None = None, layer: int | None = None,
    head: int | None = None, position: int | None = None, arm: str | None = None, reference: str = "full",
) -> go.Figure:  # fmt: skip
    """Single values of a hook point on both sides, by layer, by head or by position, and their difference."""
    made = tensor_chart(trace, run, point, layer, head, position, arm, reference)
    return draw_panels(made, made.panels)


def compare(
    trace: TraceReader, other: TraceReader | None = None, point: str = "window_kv", metric_name: str = "rel_l2",
    bucket: str = "window", arm: str | None = None, other_arm: str | None = None, reference: str = "full",
) -> go.Figure:  # fmt: skip
    """Two arms, or one arm of two traces, by cut and layer on one colour scale, and their difference."""
    made = compare_chart(trace, other, point, metric_name, bucket, arm, other_arm, reference)
    return draw_panels(made, made.panels)


FIGURES: dict[str, Callable[..., go.Figure]] = {
    "cut-layer": cut_layer,
    "position-layer": position_layer,
    "reach": reach,
    "healing": healing,
    "replay-length": replay_length,
    "logits-kl": logits_by_cut,
    "logits-suffix": logits_by_token,
    "tensor": tensor,
    "compare": compare,
}
CHARTS: dict[str, Callable[..., Chart]] = {
    "cut-layer": cut_layer_chart,
    "position-layer": position_layer_chart,
    "reach": reach_chart,
    "healing": healing_chart,
    "replay-length": replay_chart,
    "logits-kl": logits_chart,
    "logits-suffix": suffix_chart,
    "tensor": tensor_chart,
    "compare": compare_chart,
}
_LOGITS = ("logits-kl", "logits-suffix")


def chart(trace: TraceReader, name: str, metric_name: str | None = None, **options: Any) -> Chart:
    """The numbers of a named figure. `rel_l2`, the metric of states, stands for a figure's own where it has no states.

    Raises UsageError on an unknown figure and on a metric the figure does not have, and NotRecorded, one of its kind,
    where the trace lacks what the figure needs.
    """
    choose("figure", name, FIGURES)
    if metric_name is not None and name not in _LOGITS and options.get("point") != "logits":
        kinds = METRICS[metric_name].kinds if metric_name in METRICS else ()
        if kinds and "state" not in kinds and "point" not in options:
            raise UsageError(f"{name} shows states; {metric_name} belongs to {kinds[0]}, see --figure logits-kl")
    if "metric_name" not in signature(CHARTS[name]).parameters:
        if metric_name not in (None, "rel_l2"):
            raise UsageError(f"{name} shows values and no metric; leave --metric {metric_name} out")
    elif metric_name is not None and (name not in _LOGITS or metric_name != "rel_l2"):
        options["metric_name"] = metric_name
    return CHARTS[name](trace, **options)


def figure(made: Chart) -> go.Figure:
    """Draws a chart of any kind."""
    if isinstance(made, TensorChart | CompareChart):
        return draw_panels(made, made.panels)
    if isinstance(made, CurveChart):
        return draw_curves(made)
    if isinstance(made, LineChart):
        return draw_lines(made)
    assert isinstance(made, MapChart)
    return draw(made)
