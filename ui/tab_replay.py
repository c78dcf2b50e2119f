"""Replay length: how much of the difference each recorded length of the replay leaves."""

from __future__ import annotations

from gradio.components import Component

from replayscope.inspector.metrics import METRICS
from replayscope.ui.charts import reach_chart
from replayscope.ui.curves import draw_curves
from replayscope.ui.heatmap import draw
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.parts import Content, Tab, attempt, figure, html
from replayscope.ui.replay import replay_chart
from replayscope.ui.view import Choice


def place() -> dict[str, Component]:
    """Error by replay length, and by the distance from the replay start."""
    return {
        "replay": figure("rs-replay", "replay"), "replay_hint": html("rs-replay-hint"),
        "replay_reach": figure("rs-reach"),
    }  # fmt: skip


def content(library: Library, c: Choice) -> Content:
    """Both figures of the chosen arm; a click on a length chooses the arm of that length."""
    name = c.metric if METRICS[c.metric].scale == "log" else "rel_l2"
    curves, hint = attempt(library, c, lambda: library.cached(
        c.trace, ("replay", c.arm, c.reference, c.point, c.region, name),
        lambda t: figure_json(draw_curves(replay_chart(t, c.point, name, c.region, c.arm, c.reference))),
    ))  # fmt: skip
    reach, _ = attempt(library, c, lambda: library.cached(
        c.trace, ("reach", c.arm, c.reference, c.point, c.metric),
        lambda t: figure_json(draw(reach_chart(t, c.point, c.metric, c.arm, c.reference))),
    ))  # fmt: skip
    return {"replay": curves, "replay_hint": hint, "replay_reach": reach}


TAB = Tab("replay", "Replay length", ("trace", "arm", "reference", "point", "region", "metric"), place, content)
