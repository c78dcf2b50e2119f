"""Words beside the cells have room: nothing runs off a picture, and no tick of a few columns is left out."""

import io
from typing import Any

import numpy as np
import pytest

from replayscope.ui.grid import DESIGN, Grid, MapChart
from replayscope.ui.heatmap import draw
from replayscope.ui.scale import fit


def chart(columns: int, kinds: tuple[str, ...] = ()) -> MapChart:
    value = np.ones((4, columns))
    cells = (np.ones(value.shape, int), value * 1e-15, np.full(value.shape, DESIGN), np.zeros(value.shape, bool))
    start = np.arange(columns)
    return MapChart("t", "s", grid=Grid(value, *cells, list("0123"), start, start + 1),
                    scale=fit(value, "relative L2"), axis="cut H", kinds=kinds)  # fmt: skip


def axis(columns: int) -> Any:
    layout: Any = draw(chart(columns)).layout
    return layout.xaxis


@pytest.mark.parametrize("columns", [1, 2, 9, 12])
def test_a_few_columns_all_have_a_tick(columns):
    assert [str(c) for c in range(columns)] == list(axis(columns).ticktext)


def test_of_many_columns_some_have_one_and_none_stands_on_another():
    at = axis(90).tickvals
    assert 5 < len(at) < 12 and min(np.diff(at)) >= 90 * 0.07


@pytest.mark.parametrize("letter", [None, 0], ids=["as it is", "twin: no room"])
def test_the_title_of_the_rows_is_not_cut_off(monkeypatch, letter):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from replayscope.ui import printed

    if letter is not None:
        monkeypatch.setattr(printed, "LETTER", letter)
    figure = draw(chart(5, ("window", "ratio 2", "ratio 2", "global")))
    pixels = imread(io.BytesIO(printed.render(figure, "png", 700, 320)))
    edge = pixels[:, :4]
    assert bool((edge == pixels[0, 0]).all()) is (letter is None)
