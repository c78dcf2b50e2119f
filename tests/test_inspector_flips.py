"""What a flip excuses, and what it does not."""

import pytest

from replayscope.inspector.classes import downstream
from replayscope.inspector.verdict import classify
from replayscope.traces.schema import POINTS
from tests.edited import CUT, Edited, bugs_of, clean_trace, record
from tests.synthetic import Plant


@pytest.fixture
def clean() -> Edited:
    return clean_trace()


ORDER = [point for point in POINTS if point not in ("embed", "final", "logits")]


@pytest.mark.parametrize("choice", ["topk", "router"])
@pytest.mark.parametrize("point", ORDER)
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_what_a_flip_in_layer_2_excuses(clean, choice, point, layer):
    clean.flip("oracle", choice, "encoder", 2)
    behind = layer > 2 or (layer == 2 and ORDER.index(point) > ORDER.index(choice))
    assert downstream(clean, "oracle", point)[clean.run("encoder"), layer] == behind
    assert not downstream(clean, "oracle", point)[clean.run("hit")].any()


def test_a_flip_reaches_the_end_and_never_the_beginning(clean):
    clean.flip("oracle", "router", "encoder", 3)
    reached = {
        point: downstream(clean, "oracle", point)[clean.run("encoder"), 0] for point in ("embed", "final", "logits")
    }
    assert reached == {"embed": False, "final": True, "logits": True}


def test_a_fault_behind_a_flip_is_a_flip_and_the_same_before_it_is_a_bug():
    trace = record(Plant("encoder", CUT, "hidden", 1, 30, 1e-3), Plant("encoder", CUT, "hidden", 3, 30, 1e-3))
    assert [bug.layer for bug in bugs_of(trace, "encoder")] == [1, 3]
    trace.flip("oracle", "topk", "encoder", 2)
    assert [bug.layer for bug in bugs_of(trace, "encoder")] == [1]
    assert classify(trace, "oracle", "hidden")[trace.run("encoder"), 3, 0] == "flip"


def test_a_flip_of_full_is_behind_every_run_that_goes_on_from_its_cache(clean):
    """Its rows in front of a run's own are read by it; a pass of its own reads none of them."""
    clean.flip("oracle", "topk", "full", 2)
    reached = downstream(clean, "oracle", "hidden")
    for arm in ("full", "hit", "encoder"):
        assert reached[clean.run(arm)].tolist() == [False, False, True, True], arm
    assert not reached[clean.run("repeat")].any()
    assert not downstream(clean, "full", "hidden").any()


@pytest.mark.parametrize("arm", ["repeat", "rechunk"])
def test_a_flip_of_a_whole_noise_run_is_behind_its_views_from_a_cut(clean, arm):
    clean.flip("oracle", "router", arm, 1)
    view = clean.run("hit")
    clean.change(view, arm=arm)
    reached = downstream(clean, "oracle", "attn_in")
    assert reached[view].tolist() == [False, False, True, True]
    assert not reached[clean.run("encoder")].any()


def test_a_fault_behind_a_flip_of_full_is_a_flip_and_in_front_of_it_a_bug():
    trace = record(Plant("encoder", CUT, "hidden", 1, 30, 1e-3), Plant("encoder", CUT, "hidden", 3, 30, 1e-3))
    trace.flip("oracle", "topk", "full", 2)
    assert [bug.layer for bug in bugs_of(trace, "encoder")] == [1]


def test_against_full_only_flips_of_exact_rows_excuse():
    trace = record(Plant("encoder", CUT, "hidden", 1, 40, 1e-6, "full"))
    topk, run = trace.table("full", "topk"), trace.run("encoder")
    topk.arrays["flips"][run, 0, topk.bucket("all")] = 1
    assert bugs_of(trace, "encoder")
    topk.arrays["flips"][run, 0, topk.bucket("exact")] = 1
    assert not bugs_of(trace, "encoder")


def test_a_choice_that_changed_beyond_the_floor_is_a_bug_against_the_oracle_and_design_against_full(clean):
    run = clean.run("encoder")
    for reference in ("oracle", "full"):
        clean.table(reference, "topk").arrays["changed"][run, 2] = 3
    assert classify(clean, "oracle", "topk")[run, 2, 0] == "bug"
    assert classify(clean, "full", "topk")[run, 2, 0] == "design"
    (bug,) = bugs_of(clean, "encoder")
    assert bug.value == 3 and bug.position is None and bug.where == "layers.2.topk"
    clean.flip("oracle", "topk", "encoder", 2)
    clean.flip("full", "topk", "encoder", 2)
    assert {classify(clean, r, "topk")[run, 2, 0] for r in ("oracle", "full")} == {"flip"}
