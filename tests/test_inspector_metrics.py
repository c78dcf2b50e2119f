"""Metrics: the rules for zero, NaN and inf, the direction of KL, and sums against the plain definitions."""

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import METRICS, kind_of_rows, logits_sums, metric, metrics_of, state_sums
from replayscope.inspector.rowwise import element_errors, fold, row_table, worst_of
from replayscope.traces import RowTable, Table, TraceReader
from replayscope.traces.schema import relative_l2
from tests.synthetic import synthetic_trace

NAN, INF = math.nan, math.inf
FINITE = st.floats(-1e6, 1e6, width=32)
ROWS = hnp.arrays(np.float32, (3, 5), elements=FINITE)


def cell(a, r, n: int | None = None) -> Table:
    """A table of one cell from rows of an arm and of its reference."""
    rows = state_sums(np.atleast_2d(a), np.atleast_2d(r))
    sums = {name: rows[name].sum() for name in ("elements", "diff2", "ref2", "arm2", "dot", "over", "nonfinite")}
    sums |= {"max_abs": rows["max_abs"].max(), "n": len(rows["diff2"]) if n is None else n}
    return Table("state", ("all",), {name: np.array([[[value]]]) for name, value in sums.items()})


def value(a, r, name: str, n: int | None = None) -> float:
    return float(metric(cell(a, r, n), name)[0, 0, 0])


# --- zero -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", [np.arange(84, dtype=np.float32), np.full(7, 0.1), np.array([1e-30, 3e-30])])
def test_identical_states_have_distance_exactly_zero(vector):
    assert value(vector, vector, "cosine") == 0.0 and value(vector, vector, "rel_l2") == 0.0
    assert math.sqrt(value(vector, vector, "cosine")) == 0.0
    assert value(vector, vector, "norm_ratio") == 1.0 and value(vector, vector, "share_over") == 0.0


@given(ROWS, ROWS)
def test_cosine_distance_is_never_below_zero(a, r):
    assert not value(a, r, "cosine") < 0.0
    assert not value(a, a * 3, "cosine") < 0.0


def test_zero_against_zero_is_equal():
    zero = np.zeros(4)
    assert [value(zero, zero, name) for name in ("rel_l2", "cosine", "max_abs", "norm_ratio")] == [0, 0, 0, 1]


def test_zero_against_something_is_undefined_not_one():
    zero, some = np.zeros(4), np.ones(4)
    assert math.isnan(value(some, zero, "cosine")) and math.isnan(value(zero, some, "cosine"))
    assert value(some, zero, "rel_l2") == INF and value(some, zero, "norm_ratio") == INF
    assert value(zero, some, "rel_l2") == 1.0 and value(zero, some, "norm_ratio") == 0.0


def test_a_zero_reference_hides_no_error():
    assert element_errors(np.array([0.0, 1.0]), np.array([0.0, 2.0])) == {
        "max_rel": 0.5, "zero_reference": 0, "zero_max_abs": 0.0,
    }  # fmt: skip
    assert element_errors(np.array([1e-8]), np.array([0.0])) == {
        "max_rel": 0.0, "zero_reference": 1, "zero_max_abs": 1e-8,
    }  # fmt: skip


# --- NaN and inf ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [NAN, INF, -INF])
def test_the_same_non_finite_value_on_both_sides_is_equal_and_seen(same):
    a = np.array([[same, 1.0], [2.0, 3.0]])
    rows = state_sums(a, a)
    assert rows["nonfinite"].tolist() == [0, 0] and rows["bad"].tolist() == [1, 0]
    assert value(a, a, "rel_l2") == 0.0 and value(a, a, "nonfinite") == 0


@pytest.mark.parametrize(("left", "right"), [(NAN, 1.0), (1.0, NAN), (INF, -INF), (INF, NAN), (INF, 1.0), (0.0, -INF)])
def test_a_non_finite_mismatch_is_counted_and_never_small(left, right):
    a, r = np.array([left, 1.0]), np.array([right, 1.0])
    assert value(a, r, "nonfinite") == 1
    assert value(a, r, "rel_l2") == INF and value(a, r, "max_abs") == INF and math.isnan(value(a, r, "cosine"))
    assert value(a, r, "share_over") == 0.5


HUGE = np.full(4, 1e300)


@pytest.mark.parametrize(
    ("arm", "reference", "wanted"),
    [
        (HUGE, np.ones(4), {"rel_l2": INF, "max_abs": 1e300, "norm_ratio": INF, "cosine": NAN, "nonfinite": 0}),
        (np.ones(4), HUGE, {"rel_l2": NAN, "max_abs": 1e300, "norm_ratio": NAN, "cosine": NAN, "share_over": 1}),
        (HUGE, -HUGE, {"rel_l2": NAN, "max_abs": 2e300, "norm_ratio": NAN, "cosine": NAN}),
        (HUGE, HUGE, {"rel_l2": 0, "max_abs": 0, "norm_ratio": 1, "cosine": 0, "share_over": 0, "nonfinite": 0}),
        # The difference is small beside what overflows, and is not nothing.
        (np.array([1e300, 1.0]), np.array([1e300, 2.0]), {"rel_l2": NAN, "max_abs": 1, "norm_ratio": NAN}),
        (np.array([1.7e308]), np.array([-1.7e308]), {"rel_l2": NAN, "max_abs": INF, "nonfinite": 0}),
    ],
)
def test_a_sum_that_overflows_is_inf_and_never_a_small_distance(arm, reference, wanted):
    assert {name: value(arm, reference, name) for name in wanted} == pytest.approx(wanted, nan_ok=True)


ENDS = st.sampled_from([0.0, 1.0, 1e-300, 5e-324, 1e160, 1e300, -1e300, 1.7e308, -1.7e308, INF, -INF, NAN])
EXTREME = hnp.arrays(np.float64, (2, 3), elements=ENDS)


@pytest.mark.parametrize("name", ["layers.0.hidden", "logits"])
@given(EXTREME, EXTREME)
def test_no_number_makes_numpy_warn(name, arm, ref):
    at = np.arange(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = row_table(name, arm, ref, at, np.arange(3))
        for table in (rows, fold(rows)):
            found = {key: metric(table, key) for key in metrics_of(table)}
            # What differs is told by every metric that a comparison is judged by first.
            differs = table.arrays["max_abs"] > 1e-160
            assert not (differs & (found["rel_l2"] == 0)).any()
        element_errors(arm, ref)
        worst_of(rows, arm, ref, at)


def test_finite_pairs_are_summed_beside_a_nan():
    rows = state_sums(np.array([[NAN, 3.0, 4.0]]), np.array([[1.0, 3.0, 6.0]]))
    assert (rows["diff2"], rows["ref2"], rows["arm2"], rows["dot"]) == (4.0, 45.0, 25.0, 33.0)
    assert rows["max_abs"] == 2.0 and rows["max_col"] == 2 and rows["elements"] == 3


def test_what_was_not_compared_has_no_number():
    table = cell(np.ones(4), np.zeros(4), n=0)
    assert all(np.isnan(metric(table, name)).all() for name in metrics_of(table))


# --- sums -------------------------------------------------------------------------------------------------------


@given(ROWS, ROWS)
def test_sums_give_the_plain_definitions(a, r):
    a64, r64 = a.astype(np.float64), r.astype(np.float64)
    gap = np.linalg.norm(a64 - r64)
    if np.linalg.norm(r64) > 0:
        assert value(a, r, "rel_l2") == pytest.approx(gap / np.linalg.norm(r64), rel=1e-9)
    assert value(a, r, "max_abs") == np.abs(a64 - r64).max()
    assert value(a, r, "share_over") == (np.abs(a64 - r64) > 1e-6 + 1e-3 * np.abs(r64)).mean()
    rows = state_sums(a, r)
    row_errors = relative_l2(rows["diff2"], rows["ref2"], 1)
    assert value(a, r, "rel_l2") <= row_errors.max() * (1 + 1e-12)


def test_one_changed_element_is_found_where_it_is():
    r = np.random.default_rng(0).normal(size=(5, 2, 7))
    a = r.copy()
    a[3, 1, 2] += 0.25
    rows = state_sums(a, r)
    assert rows["diff2"].nonzero()[0].tolist() == [3] and rows["max_col"].tolist() == [-1, -1, -1, 9, -1]
    assert rows["max_abs"][3] == pytest.approx(0.25)


def test_sums_of_no_rows_and_of_no_columns():
    assert all(len(values) == 0 for values in state_sums(np.zeros((0, 4)), np.zeros((0, 4))).values())
    rows = state_sums(np.zeros((2, 0)), np.zeros((2, 0)))
    assert rows["elements"].tolist() == [0, 0] and rows["max_col"].tolist() == [-1, -1]


# --- logits -----------------------------------------------------------------------------------------------------


def logits(arm, ref, following=(-1,), k: int = 2) -> dict[str, float]:
    rows = logits_sums(np.array([arm], np.float64), np.array([ref], np.float64), np.array(following), k)
    return {name: values[0] for name, values in rows.items()}


def test_kl_with_a_token_that_both_forbid():
    rows = logits(arm=[1, 2.5, -INF], ref=[1, 2, -INF])
    assert rows["kl"] == pytest.approx(0.0226, abs=5e-5) and math.isfinite(rows["js"])


def test_kl_keeps_a_real_infinity_and_its_direction():
    rows = logits(arm=[1, 2, 0], ref=[1, 2, -INF])
    assert rows["kl"] == pytest.approx(0.0943, abs=5e-5) and rows["kl_rev"] == INF
    other = logits(arm=[1, 2, -INF], ref=[1, 2, 0])
    assert other["kl"] == INF and other["kl_rev"] == pytest.approx(0.0943, abs=5e-5)
    assert rows["js"] == other["js"] < math.log(2)


def test_a_row_without_a_finite_logit_has_no_divergence():
    assert math.isnan(logits(arm=[-INF] * 3, ref=[1, 2, 3])["kl"])


@given(hnp.arrays(np.float64, (2, 6), elements=st.floats(-50, 50)))
def test_divergences_are_not_negative_and_zero_for_equal_logits(x):
    rows = logits_sums(x[:1], x[1:], np.array([0]))
    assert rows["kl"] >= 0 and rows["kl_rev"] >= 0 and 0 <= rows["js"] <= math.log(2) + 1e-12
    same = logits_sums(x, x, np.array([0, -1]))
    assert not same["kl"].any() and not same["js"].any() and not same["flip"].any() and same["dlogp"][0] == 0


def test_log_probability_of_the_token_that_follows():
    rows = logits(arm=[0, math.log(3)], ref=[0, 0], following=[1])
    assert rows["dlogp"] == pytest.approx(math.log(0.75 / 0.5))
    assert math.isnan(logits(arm=[0, 1], ref=[0, 0], following=[-1])["dlogp"])


def test_a_flip_carries_the_margin_of_the_reference():
    rows = logits(arm=[3, 2, 0], ref=[2, 2.125, 0])
    assert rows["flip"] == 1 and rows["margin"] == 0.125
    assert logits(arm=[5], ref=[5])["margin"] == 0


def test_ties_count_for_each_other_in_the_top_k():
    assert logits(arm=[1, 2, 2, 2, 0], ref=[1, 2, 2, 2, 0])["overlap"] == 1
    assert logits(arm=[1, 3, 2, 2, 0], ref=[1, 2, 2, 3, 0])["overlap"] == 1
    assert logits(arm=[9, 3, 0, 0, 0], ref=[1, 2, 2, 2, 0])["overlap"] == 0.5


# --- tables -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> TraceReader:
    path = tmp_path_factory.mktemp("metrics") / "t.h5"
    synthetic_trace(path, n_tokens=40, layers=3, cuts=(9, 24))
    return TraceReader(path)


def test_every_metric_can_be_taken_from_a_trace(trace):
    found = set()
    for reference in trace.references():
        for point in trace.points(reference):
            table = trace.table(reference, point)
            for name in metrics_of(table):
                found.add(name)
                values = metric(table, name)
                assert values.shape == table.arrays["n"].shape and values.dtype == np.float64
                assert np.isnan(values[table.arrays["n"] == 0]).all()
                assert table.kind in METRICS[name].kinds
    assert found == set(METRICS)


def test_the_headline_in_the_file_is_the_metric(trace):
    import h5py

    table = trace.table("full", "hidden")
    with h5py.File(trace.path) as file:
        np.testing.assert_array_equal(file["divergence/full/hidden/rel_l2"][()], metric(table, "rel_l2"))


def test_a_row_table_gives_the_same_metrics(trace):
    run = next(run.index for run in trace.runs if run.arm == "encoder" and run.cut == 24)
    rows = trace.rows("full", "hidden", run)
    table = trace.table("full", "hidden")
    np.testing.assert_allclose(np.nanmax(metric(rows, "rel_l2"), 1), metric(table, "rel_max")[run, :, 0])
    kinds = [kind_of_rows(trace.rows("full", point, run)) for point in ("hidden", "topk", "logits")]
    assert kinds == ["state", "discrete", "logits"]
    logits = trace.rows("full", "logits", run)
    assert metric(logits, "kl").mean() == pytest.approx(metric(trace.table("full", "logits"), "kl")[run, 0, 0])


def test_dlogp_is_a_mean_over_rows_that_something_follows():
    arrays = {"n": [[[4]]], "n_next": [[[3]]], "dlogp_sum": [[[-1.5]]], "kl_sum": [[[2.0]]]}
    table = Table("logits", ("all",), {name: np.array(v) for name, v in arrays.items()})
    assert metric(table, "dlogp").item() == -0.5 and metric(table, "kl").item() == 0.5


def test_a_metric_that_the_table_lacks_is_answered_with_those_it_has(trace):
    with pytest.raises(UsageError, match="unknown metric 'kl'; valid: changed, jaccard, flips"):
        metric(trace.table("full", "topk"), "kl")
    with pytest.raises(UsageError, match="did you mean 'rel_l2'"):
        metric(RowTable(np.arange(1), state_sums(np.ones((1, 2)), np.ones((1, 2)))), "rel_l1")


def test_descriptions_are_one_line_each():
    for name, info in METRICS.items():
        assert info.says and "\n" not in info.says and info.scale in ("log", "linear", "signed"), name
    assert json.dumps([info.unit for info in METRICS.values()])
