"""Two arms or two traces on one scale, and only what compares."""

from dataclasses import replace

import numpy as np
import pytest

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import metric
from replayscope.traces import Tokens
from replayscope.ui import export
from replayscope.ui.compare import compare_chart
from replayscope.ui.grid import ABSENT, BUG, IDENTICAL, NOISE
from replayscope.ui.numbers import columns
from replayscope.ui.panels import draw_panels
from replayscope.ui.states import NotRecorded
from tests.memory import memory
from tests.synthetic import Plant, synthetic_trace

CUTS = (9, 16, 24, 40)


def panels(made):
    return list(made.panels.values())


def test_a_trace_against_itself_differs_nowhere():
    made = compare_chart(memory(cuts=CUTS), memory(cuts=CUTS))
    a, b, gap = panels(made)
    np.testing.assert_array_equal(a.grid.value, b.grid.value)
    assert (gap.grid.kind == IDENTICAL).all() and made.first is None and "differ nowhere" in made.title
    assert "all zero: identical everywhere" in [n.text for n in draw_panels(made, made.panels).layout.annotations]


def test_the_difference_is_b_minus_a_on_one_scale():
    one, two = memory(cuts=CUTS), memory(cuts=CUTS)
    two.scale("full", "window_kv", "encoder", 3.0)  # the first cut of the arm
    made = compare_chart(one, two)
    a, b, gap = panels(made)
    assert a.scale == b.scale and a.scale.high >= max(np.nanmax(a.grid.value), np.nanmax(b.grid.value))
    np.testing.assert_array_equal(
        gap.grid.value, np.where(a.grid.value == b.grid.value, 0, b.grid.value - a.grid.value)
    )
    assert gap.scale.kind == "signed" and gap.scale.low == -gap.scale.high
    low, high = gap.scale.ends
    assert gap.scale.place(np.zeros(1))[0] == (low + high) / 2 == 0
    changed = np.flatnonzero((gap.grid.kind != IDENTICAL).any(axis=0))
    assert changed.tolist() == [0]


def test_the_first_differing_cell_is_that_of_the_lowest_layer():
    one, two = memory(cuts=CUTS), memory(cuts=CUTS)
    encoders = [run.index for run in one.runs if run.arm == "encoder"]
    arrays = two.table("full", "window_kv").arrays
    arrays["diff2"][encoders[1], 3] *= 4
    arrays["diff2"][encoders[2], 2] *= 4
    made = compare_chart(one, two)
    assert made.first == ("2", 24) and "first at layer 2, cut 24" in made.title
    assert (made.meta["first_layer"], made.meta["first_cut"]) == ("2", 24)


def test_what_one_side_lacks_is_absent_and_a_difference_within_the_floor_is_noise():
    one, two = memory(cuts=CUTS), memory(cuts=CUTS)
    index = next(run.index for run in two.runs if run.arm == "encoder" and run.cut == 24)
    two.table("full", "window_kv").arrays["n"][index, 2] = 0
    for name in ("diff2", "ref2"):
        for trace, factor in ((one, 1.0), (two, 4.0)):
            trace.table("full", "window_kv").arrays[name][index, 1] = factor * 1e-34 if name == "diff2" else 1.0
    gap = panels(compare_chart(one, two))[2].grid
    assert gap.kind[2, 2] == ABSENT and np.isnan(gap.value[2, 2])
    assert gap.kind[1, 2] == NOISE


def test_a_bug_of_one_side_is_red_in_the_difference_too():
    fault = Plant("encoder", 24, "window_kv", 3, 36, 0.7, "oracle")
    made = compare_chart(memory(cuts=CUTS), memory(fault, cuts=CUTS), reference="oracle")
    assert np.argwhere(panels(made)[2].grid.kind == BUG).tolist() == []
    made = compare_chart(memory(cuts=CUTS), memory(fault, cuts=CUTS), bucket="suffix", reference="oracle")
    assert np.argwhere(panels(made)[2].grid.kind == BUG).tolist() == [[3, 2]]


def test_two_arms_of_one_trace():
    trace = memory(cuts=CUTS)
    made = compare_chart(trace, arm="encoder", other_arm="broken:floor@2", bucket="suffix")
    assert list(made.panels) == ["A: encoder", "B: broken:floor@2", "B − A"]
    table = trace.table("full", "window_kv")
    runs = [run.index for run in trace.runs if run.arm == "encoder" and run.cut > 8]
    expected = metric(table, "rel_l2")[runs, :, table.bucket("suffix")].T
    np.testing.assert_array_equal(panels(made)[0].grid.value, expected)
    names, rows = columns(made)
    assert names[:3] == ["panel", "cut", "layer"] and len(rows) == 3 * expected.size


def test_only_shared_cuts_are_shown_and_it_is_said():
    made = compare_chart(memory(cuts=(9, 24, 40)), memory(cuts=(16, 24, 40)))
    assert panels(made)[0].grid.start.tolist() == [24, 40] and "2 cuts of one side only left out" in made.notes


def test_what_does_not_compare_is_refused_by_name():
    with pytest.raises(UsageError, match="no cut in common"):
        compare_chart(memory(cuts=(9, 24)), memory(cuts=(16, 40)))
    other = memory(cuts=CUTS)
    other.tokens = Tokens(np.where(np.arange(48) == 7, 1, np.arange(48)), ["x"] * 48)
    with pytest.raises(UsageError, match="differ first at token 7"):
        compare_chart(memory(cuts=CUTS), other)
    other.tokens = Tokens(np.arange(40), ["x"] * 40)
    with pytest.raises(UsageError, match=r"48 tokens in t\.h5, 40"):
        compare_chart(memory(cuts=CUTS), other)
    with pytest.raises(UsageError, match="encodr"):
        compare_chart(memory(cuts=CUTS), other_arm="encodr")


def test_a_trace_without_the_arm_is_named_with_what_it_has_and_the_prompts_come_first():
    other = memory(cuts=CUTS)
    other.runs = [run for run in other.runs if run.arm in ("full", "hit")]
    with pytest.raises(UsageError, match=r"t\.h5 has no arm encoder to stand beside; .*--other-arm: hit$"):
        compare_chart(memory(cuts=CUTS), other)
    other.tokens = Tokens(np.arange(40), ["x"] * 40)
    with pytest.raises(UsageError, match="the prompts differ"):
        compare_chart(memory(cuts=CUTS), other)


def test_the_two_designs_never_share_a_figure():
    after = memory(cuts=CUTS)
    for run in list(after.runs):
        if run.arm == "encoder":
            after.change(run.index, stop=run.cut + 8)
    with pytest.raises(UsageError, match="--suffix"):
        compare_chart(memory(cuts=CUTS), after)
    with pytest.raises(UsageError, match="share no figure"):
        compare_chart(after, arm="encoder", other_arm="hit")


def test_a_trace_with_one_arm_has_nothing_beside_it():
    trace = memory(cuts=CUTS)
    trace.runs = [replace(run, arm="full") if run.arm != "encoder" else run for run in trace.runs]
    with pytest.raises(NotRecorded, match="second arm"):
        compare_chart(trace)


def test_two_traces_into_one_file(tmp_path):
    for name in ("a", "b"):
        synthetic_trace(tmp_path / f"{name}.h5", n_tokens=48, window=8, layers=3, cuts=(16, 24))
    (out,) = export.export([tmp_path / "a.h5", tmp_path / "b.h5"], "compare", None, tmp_path / "c.csv")
    lines = out.read_text().splitlines()
    assert lines[0].startswith("panel,cut,layer") and lines[1].startswith('"A: encoder, a.h5"') and len(lines) == 1 + 18
