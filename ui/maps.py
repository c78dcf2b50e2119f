"""The two maps of a choice, in numbers and as figures, each made once per trace and kept by the library."""

from __future__ import annotations

from replayscope.ui.charts import cut_layer_chart, position_layer_chart
from replayscope.ui.grid import MapChart
from replayscope.ui.heatmap import draw
from replayscope.ui.library import Library
from replayscope.ui.page import packed_json
from replayscope.ui.view import Choice, chosen_run


def cut_chart(library: Library, c: Choice) -> MapChart:
    """Cut × layer of the chosen arm."""
    what = ("cut", c.arm, c.reference, c.point, c.region, c.metric)
    return library.cached(c.trace, what, lambda t: cut_layer_chart(t, c.point, c.metric, c.region, c.arm, c.reference))


def cut_map(library: Library, c: Choice) -> str:
    """The same as a figure, JSON."""
    what = ("cut map", c.arm, c.reference, c.point, c.region, c.metric)
    return library.cached(c.trace, what, lambda _: packed_json(draw(cut_chart(library, c))))


def position_chart(library: Library, c: Choice) -> MapChart:
    """Position × layer of the chosen arm at the chosen cut."""
    run = chosen_run(library.open(c.trace), c).index
    what = ("position", run, c.reference, c.point, c.metric)
    return library.cached(c.trace, what, lambda t: position_layer_chart(t, run, c.point, c.metric, c.reference))


def position_map(library: Library, c: Choice) -> str:
    """The same as a figure, JSON."""
    run = chosen_run(library.open(c.trace), c).index
    what = ("position map", run, c.reference, c.point, c.metric)
    return library.cached(c.trace, what, lambda _: packed_json(draw(position_chart(library, c))))
