"""Data that no real trace has, in every way of drawing: all zero, all NaN, one row, one column, infinities, nothing."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from replayscope.ui.curves import Curve, CurveChart, draw_curves
from replayscope.ui.grid import ABSENT, DESIGN, IDENTICAL, Chart, Grid, MapChart
from replayscope.ui.page import figure_json
from replayscope.ui.panels import draw_panels
from replayscope.ui.scale import fit
from replayscope.ui.theme import LIGHT, recolour

ODD = {
    "zero": np.zeros((3, 4)),
    "NaN": np.full((3, 4), np.nan),
    "one row": np.array([[0.0, 1e-3, np.inf, 0.1]]),
    "one column": np.array([[0.0], [1e-3], [np.nan]]),
    "one cell": np.array([[0.5]]),
    "infinite": np.full((2, 2), np.inf),
    "both signs": np.array([[-1.0, 0.0, 1e-300, 1.0]]),
    "nothing": np.zeros((0, 0)),
}


def panel(value: np.ndarray, kind: str = "log") -> MapChart:
    classes = np.where(np.isnan(value), ABSENT, np.where(value == 0, IDENTICAL, DESIGN)).astype(str)
    columns = np.arange(value.shape[1])
    grid = Grid(value, np.ones(value.shape, int), np.full(value.shape, np.nan), classes, np.zeros(value.shape, bool),
                [str(r) for r in range(value.shape[0])], columns, columns + 1)  # fmt: skip
    return MapChart("", "", grid=grid, scale=fit(value, "relative L2", kind), axis="channel", column="channel")  # type: ignore[arg-type]


def curve(value: np.ndarray) -> CurveChart:
    y = value.ravel()
    one = Curve("a curve", np.arange(len(y), dtype=float), y, [""] * len(y), LIGHT.ink)
    floor = (np.arange(2.0), np.full(2, np.nan))
    return CurveChart("t", "s", curves=(one,), axis="x", label="y", span=(-0.5, 9), floor=floor, limits=((0.1, "0.1"),))


@pytest.mark.parametrize("name", ODD)
def test_odd_data_gives_a_figure_in_both_modes(name):
    value = ODD[name]
    figures = [
        draw_panels(Chart("What is seen", "context"), {"A": panel(value), "B − A": panel(value, "signed")}),
        draw_curves(curve(value)),
    ]
    for figure in figures:
        for shown in (figure, recolour(figure)):
            json.loads(figure_json(shown), parse_constant=lambda literal: pytest.fail(f"{literal} is no JSON"))
            if find_spec("matplotlib") is not None:
                from replayscope.ui import printed

                assert printed.render(shown, "png", 700, figure.layout.meta["height"]).startswith(b"\x89PNG")
    notes = [str(note.text) for figure in figures for note in figure.layout.annotations]
    said = {"zero": "all zero", "NaN": "nothing", "infinite": "no finite values", "nothing": "nothing"}
    assert any(said.get(name, "") in note for note in notes)


def test_what_is_said_once_stands_in_the_key_once():
    value = np.array([[0.0, 1e-3]])
    figure = draw_panels(Chart("t", "s"), {"A": panel(value), "B": panel(value)})
    listed = [t.name for t in figure.data if t.showlegend is not False and t.type != "heatmap"]
    assert len(listed) == len(set(listed)) and figure.layout.meta["key"] == ["identical"]


def test_panels_share_the_cells_that_a_figure_may_have_and_keep_every_peak():
    value = np.full((4, 100_000), 1e-6)
    value[2, 77_777] = -3.0
    panels = {name: panel(value, "signed") for name in ("reference", "arm", "arm − reference")}
    figure = draw_panels(Chart("t", "s"), panels)
    maps = [t for t in figure.data if t.name == "magnitude"]
    assert len(maps) == 3 and sum(np.asarray(t.z).size for t in maps) <= 200_000
    for shown in maps:
        assert np.nanmin(shown.z) == -3.0, "a large negative number is as large as a positive one"
    notes = figure.layout.meta["notes"]
    assert len(notes) == 1 and "the largest of up to" in notes[0] and figure.layout.meta["pooled"]
