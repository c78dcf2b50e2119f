"""Cells before they are drawn: pooling that hides nothing, colour ranges, the border of the exact region."""

import itertools

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayscope.ui.grid import ABSENT, BUG, DESIGN, FLIP, IDENTICAL, NOISE, Grid, MapChart
from replayscope.ui.heatmap import draw
from replayscope.ui.scale import fit


def grid(value, kind=None, exact=None) -> Grid:
    value = np.asarray(value, float)
    rows, columns = value.shape
    kind = np.full(value.shape, DESIGN) if kind is None else np.asarray(kind)
    exact = np.zeros(value.shape, bool) if exact is None else np.asarray(exact)
    start = np.arange(columns)
    return Grid(value, np.ones(value.shape, int), np.full(value.shape, 1e-15), kind, exact,
                [str(r) for r in range(rows)], start, start + 1)  # fmt: skip


def chart(g: Grid, **more) -> MapChart:
    return MapChart("What is seen", "context", grid=g, scale=fit(g.value, "relative L2"), axis="cut H", **more)


def names(figure: go.Figure) -> list[str]:
    return [trace.name for trace in figure.data]


def test_one_spike_among_4096_cuts_survives_pooling():
    value = np.full((40, 20_000), 1e-6)
    value[17, 12_345] = 1.0
    pooled = grid(value).pool(keep={5000})
    assert pooled.value.size <= 200_000
    assert pooled.value[17].max() == 1.0 and (pooled.value == 1.0).sum() == 1
    assert pooled.shape[0] == 40, "no layer is merged, so the last one stays"
    alone = np.flatnonzero(pooled.start == 5000)
    assert len(alone) == 1 and pooled.stop[alone[0]] == 5001, "a boundary column stays alone"
    assert pooled.pooled > 1
    figure = draw(chart(grid(value)))
    assert "largest of up to" in figure.layout.meta["notes"][0]


def test_the_far_end_of_a_long_axis_is_merged_and_said():
    value = np.full((2, 100), 1e-3)
    value[1, 77] = 0.5
    figure = draw(chart(grid(value), fine=20))
    shown = next(t for t in figure.data if t.name == "magnitude")
    assert 25 <= shown.z.shape[1] <= 35 and np.nanmax(shown.z) == pytest.approx(np.log10(0.5), abs=1e-6)
    assert figure.layout.meta["columns"][:21] == list(range(21)) and figure.layout.meta["columns"][21] == 28
    assert "from position 20 on the largest of 8 positions" in figure.layout.meta["notes"]
    assert "8 per column" in [note.text for note in figure.layout.annotations]
    short = draw(chart(grid(value[:, :29]), fine=20))
    assert len(short.layout.meta["columns"]) == 29


@given(st.data())
def test_pooling_keeps_every_maximum_and_every_bug(data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    values = st.sampled_from([0.0, 1e-9, 0.5, 2.0, np.inf, np.nan])
    value = np.array(data.draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))).reshape(
        rows, columns
    )
    kind = np.where(np.isnan(value), ABSENT, np.where(value == 0, IDENTICAL, np.where(value == 2, BUG, DESIGN)))
    keep = data.draw(st.sets(st.integers(-2, columns + 2), max_size=3))
    pooled = grid(value, kind).pool(keep, cells=data.draw(st.integers(1, 80)))
    assert pooled.start[0] == 0 and pooled.stop[-1] == columns
    assert (pooled.start[1:] == pooled.stop[:-1]).all(), "columns neither overlap nor leave a gap"
    for c, (a, b) in enumerate(zip(pooled.start, pooled.stop, strict=True)):
        for r in range(rows):
            group, bugs = value[r, a:b], (kind[r, a:b] == BUG).any()
            assert (pooled.kind[r, c] == BUG) == bugs
            if not bugs and not np.isnan(group).all():
                assert pooled.value[r, c] == np.nanmax(group)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.02, 0.3], 1e-2, 0.5), ([1e-9, 0.3], 1e-5, 0.5), ([], 1e-5, 1.0), ([0.0], 1e-5, 1.0), ([np.nan], 1e-5, 1.0),
        ([np.inf, 0.02, 0.3], 1e-2, 0.5), ([0.1], 0.01, 0.1), ([1e-30], 1e-31, 1e-30), ([1.2e7], 1e7, 2e7),
        ([0.003, 4.7], 1e-3, 5.0), ([1e-9, 4.7], 1e-4, 5.0),
    ],
)  # fmt: skip
def test_the_range_is_round(values, low, high):
    scale = fit(np.array(values), "relative L2")
    assert (scale.low, scale.high) == (pytest.approx(low), pytest.approx(high))
    places, texts = scale.ticks()
    assert len(places) == len(texts) >= 2 and texts[-1].strip("≤ ")


def test_what_lies_below_the_bar_is_said():
    assert fit(np.array([1e-9, 0.3]), "relative L2").ticks()[1][0] == "≤ 1e-5"
    assert fit(np.array([0.02, 0.3]), "relative L2").ticks()[1][0] == "0.01"


def test_the_range_starts_at_the_noise_floor():
    assert fit(np.array([1e-9, 0.3]), "relative L2", floor=3e-4).low == pytest.approx(1e-4)


def test_a_ratio_diverges_around_one_and_a_signed_change_around_zero():
    ratio, signed = fit(np.array([0.5, 1.0]), "", "ratio"), fit(np.array([-2.0, 1.0]), "", "signed")
    assert ratio.place(np.array([1.0]))[0] == 0 and ratio.ends == (pytest.approx(-0.30103), pytest.approx(0.30103))
    assert signed.ends == (-2.0, 2.0)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (np.zeros((3, 4)), IDENTICAL, "all zero: identical everywhere"),
        (np.full((3, 4), np.nan), ABSENT, "nothing computed here"),
        (np.full((3, 4), np.nan), DESIGN, "no finite values"),
        (np.full((3, 4), np.inf), DESIGN, "no finite values"),
        (np.zeros((0, 0)), DESIGN, "no cells: nothing was recorded for this choice"),
        (np.zeros((3, 0)), DESIGN, "no cells: nothing was recorded for this choice"),
    ],
)
def test_a_map_with_nothing_to_show_says_so(value, kind, message):
    figure = draw(chart(grid(value, np.full(value.shape, kind))))
    assert message in [note.text for note in figure.layout.annotations]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (6, 1)])
def test_one_row_and_one_column(shape):
    figure = draw(chart(grid(np.full(shape, 0.5))))
    assert np.shape(figure.data[0].z) == shape and not figure.layout.annotations


def test_two_constant_maps_have_different_colours():
    scale = fit(np.array([1e-3, 0.5]), "relative L2")
    first, second = (
        draw(MapChart("", "", grid=grid(np.full((2, 2), v)), scale=scale)).data[0].z for v in (1e-3, 0.5)
    )  # fmt: skip
    assert not np.allclose(first, second)


def test_each_class_has_its_own_mark():
    kind = np.array([[IDENTICAL, ABSENT, NOISE, FLIP, BUG, DESIGN]])
    figure = draw(chart(grid([[0, np.nan, 1e-16, 0.1, 0.2, np.inf]], kind, [[1, 0, 0, 0, 0, 0]])))
    assert {"identical", "not computed", "within the noise", "flip, and all above it", "bug", "not finite",
            "must be exact"} <= set(names(figure))  # fmt: skip
    bug = next(trace for trace in figure.data if trace.name == "bug" and trace.type == "heatmap")
    assert np.isfinite(bug.z).sum() == 1 and np.isfinite(bug.z[0, 4])
    shown = next(trace for trace in figure.data if trace.name == "magnitude")
    assert np.isfinite(shown.z).tolist() == [[False, False, True, True, False, True]]
    assert "not computed" in str(next(t for t in figure.data if t.name == "not computed" and t.type == "heatmap").text)


def test_only_the_first_flip_of_a_column_is_marked():
    kind = np.full((5, 2), DESIGN)
    kind[2:, 0] = FLIP
    marks = next(t for t in draw(chart(grid(np.full((5, 2), 0.1), kind))).data if t.name == "flip, and all above it")
    assert (marks.x, marks.y) == ((0,), (2,))


def test_the_outline_is_the_border_of_the_exact_region():
    exact = np.array([[1, 1], [0, 1]], bool)
    line = next(t for t in draw(chart(grid(np.full((2, 2), 0.1), exact=exact))).data if t.name == "must be exact")
    pairs = list(zip(line.x, line.y, strict=True))
    segments = {frozenset(pairs[i : i + 2]) for i in range(0, len(pairs), 3)}
    stair = [(-0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.5, 1.5), (1.5, 1.5), (1.5, 0.5), (1.5, -0.5)]
    for a, b in itertools.pairwise(stair):
        assert frozenset((a, b)) in segments, f"{a} – {b} is missing"
    assert frozenset(((0.5, -0.5), (0.5, 0.5))) not in segments, "no line inside the region"


def test_a_label_cannot_inject_markup():
    evil = '<img src=x onerror=alert(1)></script><a href="javascript:1">'
    made = chart(grid(np.full((2, 2), 0.1)), marks=((1.0, evil),), divider=(1, evil))
    made = MapChart(**{**vars(made), "title": evil, "axis": evil})
    text = str(draw(made).to_dict()["layout"] | {"meta": None})
    assert "<img" not in text and "<a" not in text and "</script" not in text
