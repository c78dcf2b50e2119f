"""Noise, design or bug: each rule with a twin that plants a fault and sees it, and only it, light up."""

import numpy as np
import pytest

from replayscope.inspector.classes import bound, headline
from replayscope.inspector.metrics import metric
from replayscope.inspector.verdict import CLASSES, Rules, arm_table, classify, floor, verdict
from replayscope.traces import TraceReader
from tests.edited import CUT, LAYERS, START, TOKENS, WINDOW, Edited, bugs_of, clean_trace, record
from tests.synthetic import Plant, synthetic_trace


@pytest.fixture
def clean() -> Edited:
    return clean_trace()


# --- against the oracle -----------------------------------------------------------------------------------------


def test_right_arms_have_no_bug_and_the_broken_one_is_found_where_it_breaks(clean):
    found = verdict(clean)
    assert [(bug.arm, bug.kind, bug.where) for bug in found.bugs] == [
        ("broken:floor@2", "oracle", f"layers.2.attn_out at position {START}")
    ]
    assert found.ok and found.asserted and not found.missed and not found.notes


@pytest.mark.parametrize("point", ["attn_in", "window_kv", "attn_out", "hidden", "streams"])
@pytest.mark.parametrize("position", [START, CUT - 1, CUT, TOKENS - 1])
def test_a_fault_in_one_row_lights_that_cell_only(point, position):
    trace = record(Plant("encoder", CUT, point, 2, position, 1e-9))
    (bug,) = bugs_of(trace, "encoder")
    assert (bug.point, bug.layer, bug.position, bug.kind) == (point, 2, position, "oracle")
    assert bug.value == pytest.approx(1e-9) and bug.bound < 1e-9
    kinds, run = classify(trace, "oracle", point), trace.run("encoder")
    table = trace.table("oracle", point)
    lit = {(i, table.buckets[j]) for i, j in np.argwhere(kinds[run] == "bug").tolist()}
    regions = {"all", "window" if position < CUT else "suffix"} | ({"last"} if position == TOKENS - 1 else set())
    assert {name for _, name in lit} >= regions and {layer for layer, _ in lit} == {2}
    assert sum(name.startswith("d:") for _, name in lit) == 1
    assert not verdict(trace).ok


@pytest.mark.parametrize("point", ["embed", "final", "logits"])
def test_a_fault_outside_of_the_layers(point):
    trace = record(Plant("encoder", CUT, point, 0, 30, 1e-6))
    (bug,) = bugs_of(trace, "encoder")
    assert (bug.point, bug.layer, bug.position) == (point, None, 30) and bug.where == f"{point} at position 30"


def test_the_first_bug_is_the_lowest_layer_then_the_first_position_then_the_first_point():
    trace = record(
        Plant("encoder", CUT, "window_kv", 3, 17, 1.0),
        Plant("encoder", CUT, "hidden", 1, 30, 1e-6),
        Plant("encoder", CUT, "attn_out", 1, 31, 1e-3),
        Plant("encoder", CUT, "attn_in", 1, 31, 1e-3),
        Plant("encoder", CUT, "final", 0, 16, 1.0),
    )
    where = [bug.where for bug in bugs_of(trace, "encoder")]
    assert where == [
        "layers.1.hidden at position 30", "layers.1.attn_in at position 31", "layers.1.attn_out at position 31",
        "layers.3.window_kv at position 17", "final at position 16",
    ]  # fmt: skip
    assert [bug.where for bug in verdict(trace).bugs if bug.arm == "encoder"] == where[:1]


def test_the_first_wrong_row_is_named_not_the_worst():
    trace = record(Plant("encoder", CUT, "hidden", 2, 20, 1e-7), Plant("encoder", CUT, "hidden", 2, 40, 1e-2))
    (bug,) = bugs_of(trace, "encoder")
    assert bug.position == 20 and bug.value == pytest.approx(1e-2)


def test_one_wrong_row_among_many_is_not_diluted():
    trace = record(Plant("encoder", CUT, "hidden", 2, 40, 2e-12))
    table, run = trace.table("oracle", "hidden"), trace.run("encoder")
    region = metric(table, "rel_l2")[run, 2, 0]
    assert region < bound(trace, "hidden")[run, 2] < 2e-12
    assert bugs_of(trace, "encoder")


# --- the bound --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "wrong"),
    [("float64", 0.9e-12, False), ("float64", 1.1e-12, True), ("float32", 0.9e-5, False), ("float32", 1.1e-5, True)],
)
def test_the_fixed_part_of_the_bound(dtype, value, wrong):
    trace = record(Plant("encoder", CUT, "embed", 0, 20, value), dtype=dtype, audit=True)
    assert bool(bugs_of(trace, "encoder")) is wrong


def test_the_bound_is_ten_floors_where_the_floor_is_high(clean):
    run = clean.run("encoder")
    clean.scale("full", "hidden", "rechunk", 1e5)
    floors = floor(clean, "hidden", "rel_l2")[run]
    np.testing.assert_allclose(bound(clean, "hidden")[run], 10 * floors)
    assert (bound(clean, "attn_in")[run] == 1e-12).all()


def test_other_rules_give_another_verdict_from_the_same_trace():
    trace = record(Plant("encoder", CUT, "hidden", 2, 20, 1e-9))
    assert not verdict(trace).ok
    assert verdict(trace, Rules(bounds={"float64": 1e-8})).ok
    assert not verdict(trace, Rules(bounds={"float64": 1e-16}, floors=0.01)).ok


def test_bf16_claims_nothing_against_an_oracle_and_says_so():
    trace = record(Plant("encoder", CUT, "hidden", 2, 20, 0.9), dtype="bfloat16")
    found = verdict(trace)
    assert not found.bugs and not found.missed and not found.asserted
    assert "bfloat16 allows no claim of a bug" in found.notes[0]
    assert "bug" not in classify(trace, "oracle", "hidden")
    trace.change(trace.run("encoder"), cached_changed=1)
    assert [bug.kind for bug in verdict(trace).bugs] == ["cached"]


def test_fp32_without_audit_is_marked_as_unsure():
    trace = record(dtype="float32")
    assert not verdict(trace).asserted and "without --audit" in verdict(trace).notes[0]


@pytest.mark.parametrize("name", ["fp64", "torch.float64", "float64"])
def test_names_of_a_dtype(clean, name):
    clean.provenance["dtype"] = name
    assert verdict(clean).asserted


# --- the exact region -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["encoder", "hit"])
def test_a_difference_from_full_inside_the_exact_region_is_a_bug(arm):
    trace = record(Plant(arm, CUT, "hidden", 0, 40, 1e-6, "full"))
    (bug,) = bugs_of(trace, arm)
    assert (bug.kind, bug.point, bug.layer, bug.position) == ("exact", "hidden", 0, 40)
    assert "bug" in classify(trace, "full", "hidden")[trace.run(arm), 0]


def test_the_same_difference_outside_of_it_is_design():
    trace = record(Plant("encoder", CUT, "hidden", 3, 40, 1e-6, "full"))
    assert not bugs_of(trace, "encoder")
    kinds = classify(trace, "full", "hidden")[trace.run("encoder"), 3]
    assert kinds[trace.table("full", "hidden").bucket("window")] == "design"


def test_a_broken_hit_hides_no_other_bug():
    trace = record(
        Plant("hit", CUT, "hidden", 1, 40, 0.5, "full"),
        Plant("encoder", CUT, "hidden", 1, 41, 1e-3),
    )
    assert [bug.arm for bug in verdict(trace).bugs] == ["hit", "encoder", "broken:floor@2"]
    assert floor(trace, "hidden", "rel_l2")[trace.run("encoder"), 1] < 1e-14


def test_a_hit_is_held_against_ten_floors_of_the_other_noise_runs():
    trace = record(
        Plant("rechunk", None, "hidden", 1, 30, 1e-12, "full"), Plant("hit", CUT, "hidden", 1, 40, 9e-12, "full")
    )
    assert not bugs_of(trace, "hit")
    trace.scale("full", "hidden", "hit", 1.2)
    assert [bug.layer for bug in bugs_of(trace, "hit")] == [1]
    assert bugs_of(trace, "hit")[0].bound == pytest.approx(1e-11)


def test_in_serving_precision_a_hit_is_noise_as_agreed():
    trace = record(Plant("hit", CUT, "hidden", 1, 40, 1e-3, "full"), dtype="float32")
    assert not bugs_of(trace, "hit")
    assert floor(trace, "hidden", "rel_l2")[trace.run("encoder"), 1] == pytest.approx(1e-3)


@pytest.mark.parametrize("arm", ["repeat", "rechunk"])
def test_the_measure_of_the_noise_is_noted_not_convicted(arm):
    trace = record(Plant(arm, None, "hidden", 1, 40, 1e-3, "full"))
    assert not bugs_of(trace, arm)
    assert any(
        "differ by up to 1.0e-03 (hidden): choices or roundings flipped; --audit" in note
        for note in verdict(trace).notes
    )


# --- floor and classes ------------------------------------------------------------------------------------------


def test_the_floor_is_the_worst_row_of_the_noise_runs_at_the_cut(clean):
    table = clean.table("full", "hidden")
    runs = [clean.run(arm) for arm in ("repeat", "rechunk", "hit")]
    expected = table.arrays["rel_max"][runs, :, 0].max(0)
    np.testing.assert_array_equal(floor(clean, "hidden", "rel_l2")[clean.run("encoder")], expected)
    without = table.arrays["rel_max"][runs[:2], :, 0].max(0)
    np.testing.assert_array_equal(floor(clean, "hidden", "rel_l2")[clean.run("rechunk")], without)


def test_a_hit_at_another_cut_is_no_floor_here():
    trace = record(cuts=(CUT, 32), dtype="float32")
    other = next(run.index for run in trace.runs if run.arm == "hit" and run.cut == 32)
    trace.table("full", "hidden").arrays["rel_max"][other] = 0.25
    values = {run.cut: floor(trace, "hidden", "rel_l2")[run.index, 0] for run in trace.runs if run.arm == "encoder"}
    assert values[32] == 0.25 and values[CUT] < 1e-5


def test_without_noise_runs_the_floor_is_unknown_and_said(clean):
    for arm in ("repeat", "rechunk", "hit"):
        clean.change(clean.run(arm), arm="other")
    assert np.isnan(floor(clean, "hidden", "rel_l2")).all()
    assert any("floor was not measured" in note for note in verdict(clean).notes)
    assert "noise" not in classify(clean, "full", "hidden")
    assert (bound(clean, "hidden") == 1e-12).all()


def test_classes_by_precedence(clean):
    kinds = classify(clean, "full", "hidden")
    table = clean.table("full", "hidden")
    assert set(np.unique(kinds)) <= set(CLASSES)
    assert (kinds[table.arrays["n"] == 0] == "absent").all() and (kinds[clean.run("full")] == "absent").all()
    assert (kinds[clean.run("repeat"), :, 0] == "identical").all()
    assert set(kinds[[clean.run("rechunk"), clean.run("hit")], :, 0].ravel()) == {"noise"}
    encoder = kinds[clean.run("encoder")]
    assert encoder[0, table.bucket("exact")] == "noise" and encoder[1, table.bucket("window")] == "design"


def test_a_noise_run_is_never_above_its_own_floor(clean):
    for point in clean.points("full"):
        kinds = classify(clean, "full", point)
        for arm in ("repeat", "rechunk", "hit"):
            assert set(np.unique(kinds[clean.run(arm)])) <= {"absent", "identical", "noise"}, (point, arm)


def test_a_non_finite_mismatch_is_neither_identical_nor_noise(clean):
    table, run = clean.table("oracle", "hidden"), clean.run("encoder")
    table.arrays["diff2"][run, 2, 0] = 0.0
    table.arrays["nonfinite"][run, 2, 0] = 1
    assert classify(clean, "oracle", "hidden")[run, 2, 0] == "bug"


def test_a_point_compared_with_the_oracle_only_is_judged(clean):
    del clean.tables["full", "hidden"]
    assert np.isnan(floor(clean, "hidden", "rel_l2")).all()
    clean.table("oracle", "hidden").arrays["rel_max"][clean.run("encoder"), 2, 0] = 1e-9
    (bug,) = bugs_of(clean, "encoder")
    assert bug.bound == 1e-12


def plain_logits(trace: Edited) -> None:
    """Logits tables without the sums of a state."""
    for reference in trace.references():
        arrays = trace.table(reference, "logits").arrays
        for name in ("diff2", "ref2", "arm2", "dot", "rel_max", "rel_max_row", "first_at", "last_at", "max_abs"):
            del arrays[name]


@pytest.mark.parametrize(("value", "wrong"), [(1e-14, False), (1e-10, True), (np.nan, True)])
def test_logits_without_sums_are_judged_by_kl(clean, value, wrong):
    plain_logits(clean)
    table, run = clean.table("oracle", "logits"), clean.run("encoder")
    assert headline(table) == "kl_max"
    table.arrays["kl_max"][run] = value
    table.arrays["max_row"][run] = 33
    assert [bug.position for bug in bugs_of(clean, "encoder")] == ([33] if wrong else [])


# --- the whole trace --------------------------------------------------------------------------------------------


def test_changed_cached_bytes_come_first():
    trace = record(Plant("encoder", CUT, "embed", 0, 20, 1e-3))
    trace.change(trace.run("encoder"), cached_changed=2)
    bug = next(bug for bug in verdict(trace).bugs if bug.arm == "encoder")
    assert (bug.kind, bug.value, bug.where) == ("cached", 2, "cached bytes changed")


def test_a_planted_fault_that_is_missed_fails_the_verdict(clean):
    run = clean.run("broken:floor@2")
    for point in clean.points("oracle"):
        arrays = clean.table("oracle", point).arrays
        for name in arrays:
            arrays[name][run] = arrays[name][clean.run("encoder")]
    found = verdict(clean)
    assert not found.bugs and found.missed == [run] and not found.ok


def test_a_trace_without_oracle_or_complete_flag_says_so(clean):
    clean.complete = False
    clean.tables = {key: table for key, table in clean.tables.items() if key[0] == "full"}
    found = verdict(clean)
    assert "partial" in found.notes[0] and "no arm was compared with its oracle" in found.notes[1]
    assert not found.missed


def test_one_row_per_arm(clean):
    rows = {row.arm: row for row in arm_table(clean)}
    assert list(rows) == ["repeat", "rechunk", "hit", "oracle:encoder", "encoder", "broken:floor@2"]
    encoder, broken, hit = rows["encoder"], rows["broken:floor@2"], rows["hit"]
    assert encoder.oracle < 1e-12 < broken.oracle and encoder.bugs == 0 and broken.bugs == 1
    assert (encoder.replayed, encoder.cached, encoder.fresh, encoder.replay) == (WINDOW, CUT, TOKENS - CUT, WINDOW)
    assert encoder.window[0] < 1e-12 and all(value > 1e-3 for value in encoder.window[1:])
    assert hit.window == [None] * LAYERS and hit.oracle is None and hit.exact < 1e-12
    assert encoder.kl_max > 0 and encoder.flips == 0
    assert rows["repeat"].exact == 0.0 and encoder.floor > 0


def test_the_verdict_of_a_file_is_that_of_its_tables(tmp_path):
    synthetic_trace(tmp_path / "t.h5", n_tokens=40, layers=3, cuts=(9, 24))
    trace = TraceReader(tmp_path / "t.h5")
    assert verdict(trace) == verdict(Edited.of(trace)) and verdict(trace).ok


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_planted_fault_that_nothing_could_convict_is_not_called_found(dtype):
    """Without an oracle, or in a precision that allows no claim, silence says nothing."""
    from replayscope.inspector.arms_text import arms_text

    trace = record(dtype=dtype)
    broken = trace.run("broken:floor@2")
    if dtype == "float64":
        for run in list(trace.runs):
            trace.change(run.index, oracle=None)
        trace.tables = {key: table for key, table in trace.tables.items() if key[0] != "oracle"}
    said, (text, data, _) = verdict(trace), arms_text(trace)
    assert said.unjudged == [broken] and not said.missed and not said.bugs
    assert "planted faults: 0 of 1 found, 1 not judged" in text and "right arms: no bug" not in text
    assert data["verdict"]["unjudged"] == [broken]


def test_a_trace_of_full_alone_claims_nothing_of_arms():
    from replayscope.inspector.arms_text import verdict_lines

    clean = verdict(clean_trace())
    for arms, says in ((("full",), "none ran but full"), (("full", "oracle:encoder"), "no bug")):
        trace = clean_trace()
        trace.runs = [run for run in trace.runs if run.arm in arms]
        assert verdict_lines(trace, clean, [])[0].startswith(f"right arms: {says}"), arms
