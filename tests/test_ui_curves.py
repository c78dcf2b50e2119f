"""Curves: replay length, healing, and the log axis they stand on."""

from dataclasses import replace

import numpy as np
import pytest

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import metric
from replayscope.traces.schema import THRESHOLDS
from replayscope.ui.axis import LogAxis
from replayscope.ui.curves import draw_curves
from replayscope.ui.healing import healing_chart
from replayscope.ui.replay import replay_chart
from replayscope.ui.states import NotRecorded
from tests.edited import WINDOW, Edited
from tests.memory import memory


def lengths(*factors: float, cuts=(24, 40)) -> Edited:
    """A trace in which `encoder` ran with replay lengths W, 2W, …, each time with its window errors times a factor."""
    trace = memory(cuts=cuts)
    own = [run for run in trace.runs if run.arm == "encoder"]
    for k, factor in enumerate(factors):
        for run in own:
            index = len(trace.runs)
            trace.runs.append(replace(run, index=index, replay=WINDOW * (k + 2)))
            for table in trace.tables.values():
                for name, array in table.arrays.items():
                    table.arrays[name] = np.concatenate([array, array[run.index : run.index + 1]])
            arrays = trace.table("full", "window_kv").arrays
            arrays["diff2"][index] *= factor**2
            arrays["rel_max"][index] *= factor
    return trace


def test_the_curve_of_a_layer_is_the_worst_cut_of_each_replay_length():
    trace = lengths(0.1, 0.01)
    made = replay_chart(trace)
    table = trace.table("full", "window_kv")
    value = metric(table, "rel_l2")[:, :, table.bucket("window")]
    for column, replay in enumerate((8, 16, 24)):
        runs = [run.index for run in trace.runs if run.arm == "encoder" and run.replay == replay]
        worst = value[runs].max(axis=0)
        np.testing.assert_allclose([curve.y[column] for curve in made.curves[:-1]], worst)
        assert made.curves[-1].y[column] == worst.max()
    assert [text for _, text in made.ticks] == ["8 = W", "16", "24"]
    first = made.curves[-1].hover[0]
    assert "R 8" in first and " rows, floor " in first and "above the noise" in first and "at cut " in first
    assert len(made.rows) == 3 * 2 * len(worst) and made.names[:4] == ("replay", "layer", "layer_kind", "cut")


@pytest.mark.parametrize(("factors", "below"), [((0.1, 0.01), None), ((1e-3, 1e-4), 16), ((1e-3, 1.0), None),
                                                ((1.0, 1e-4), 24)])  # fmt: skip
def test_it_is_said_from_which_length_on_all_is_below_the_threshold(factors, below):
    threshold = 1e-3
    made = replay_chart(lengths(*factors), threshold=threshold)
    assert made.meta["below_from"] == below
    assert made.limits == ((threshold, "threshold 0.001"),)
    if below is None:
        assert "never below" in made.title and not made.marks
    else:
        assert f"below 0.001 from R = {below} on" in made.title and made.marks[0][1].endswith(f"R = {below} on")


def test_only_cuts_that_every_length_has_are_compared():
    trace = lengths(0.1, cuts=(16, 24, 40))
    lost = next(run for run in trace.runs if run.replay == 16 and run.cut == 24)
    trace.change(lost.index, arm="lost")
    assert replay_chart(trace).meta["cuts"] == [16, 40]


def test_one_replay_length_is_no_figure_and_says_what_to_record():
    with pytest.raises(NotRecorded, match="--replay W,2W,4W,exact"):
        replay_chart(memory())
    with pytest.raises(NotRecorded, match="--replay"):
        replay_chart(lengths(0.1), arm="hit")


def test_lengths_of_another_design_are_left_out_by_name():
    trace = lengths(0.1, 0.01)
    for run in list(trace.runs):
        if run.replay == 24 and run.arm == "encoder":
            trace.change(run.index, stop=run.cut + 8)
    made = replay_chart(trace)
    assert made.meta["replays"] == [8, 16] and "left out: encoder, replay 24" in made.notes[-1]


def test_healing_is_the_last_row_above_each_threshold():
    trace = memory(cuts=(24, 40))
    table = trace.table("full", "hidden")
    runs = [run for run in trace.runs if run.arm == "encoder"]
    at = THRESHOLDS.index(1e-3)
    table.arrays["last_at"][runs[0].index, :, at] = [-1, 23, 24, 30]
    table.arrays["last_at"][runs[1].index, :, at] = [-1, -1, 39, 47]
    made = healing_chart(trace)
    thick = next(curve for curve in made.curves if curve.label == "below 0.001")
    assert thick.y.tolist() == [0, 0, 1, np.inf], "the 48th token is the last: it never healed"
    said = {(cut, layer): tokens for cut, layer, _, t, tokens, _ in made.rows if t == 1e-3}
    assert said[24, 3] == 7 and said[40, 3] == np.inf and said[40, 2] == 0
    assert "at 3 of 4 layers, and stays above it to the end at the others" in made.title
    assert "not in the suffix" in draw_curves(made).layout.yaxis.ticktext


def test_healing_of_the_logits_goes_by_cut():
    made = healing_chart(memory(cuts=(16, 24, 40)), "logits")
    assert made.axis.startswith("cut H") and [text for _, text in made.ticks] == ["16", "24", "40"]


def test_healing_names_what_it_cannot_show():
    with pytest.raises(UsageError, match="topk"):
        healing_chart(memory(), "topk")
    with pytest.raises(UsageError, match="--metric"):
        healing_chart(memory(), metric_name="cosine")
    with pytest.raises(NotRecorded, match="--cuts"):
        healing_chart(memory(cuts=(4,)))


def test_a_threshold_between_decades_moves_up():
    assert healing_chart(memory(), threshold=2e-3).meta["threshold"] == 1e-2
    assert healing_chart(memory(), threshold=1e-3).meta["threshold"] == 1e-3


@pytest.mark.parametrize("values", [[0.0], [np.nan], [np.inf], [0.0, np.inf], [1e-300, 1e300], []])
def test_the_axis_has_a_place_for_every_number(values):
    values = np.array(values)
    axis = LogAxis.over(values)
    placed = axis.place(values)
    low, high = axis.range
    assert low < high and ((placed >= low) & (placed <= high) | np.isnan(values)).all()
    places, texts = axis.ticks()
    assert len(places) == len(texts) == len(set(texts)) and places == sorted(places)


def test_curves_without_a_difference_say_so():
    trace = lengths(0.0, 0.0)
    arrays = trace.table("full", "window_kv").arrays
    arrays["diff2"][:] = 0
    figure = draw_curves(replay_chart(trace))
    assert "all zero: identical everywhere" in [note.text for note in figure.layout.annotations]


def test_a_trace_without_cut_or_replay_is_told_which_arms_have_them():
    trace = memory(cuts=(24,))
    for run in list(trace.runs):
        trace.change(run.index, cut=None, replay=None)
    for make in (healing_chart, replay_chart):
        with pytest.raises(NotRecorded, match="--arms full,encoder") as error:
            make(trace)
        assert "later --cuts" not in str(error.value) and "one replay length" not in str(error.value)
