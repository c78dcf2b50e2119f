"""The statistics of judge against scipy and statsmodels, and against outcomes whose truth is known."""

import math
import warnings

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests

from replayscope.inspector import judge_stats as js

CONFIDENCE, BUDGET = 0.95, 0.05


@pytest.mark.parametrize("pair", [(0, 0), (1, 0), (5, 0), (3, 9), (12, 12), (40, 21)], ids=str)
def test_mcnemar_is_that_of_statsmodels(pair):
    worse, better = pair
    if worse + better:
        expected = reference_mcnemar([[50, worse], [better, 7]], exact=True).pvalue
        assert js.mcnemar(worse, better) == pytest.approx(min(expected, 1.0), rel=1e-12)
    else:
        assert js.mcnemar(0, 0) == 1.0


@pytest.mark.parametrize("counts", [(60, 3, 1), (60, 0, 0), (100, 9, 2), (44, 1, 6)], ids=str)
@pytest.mark.parametrize("drop", [0.02, 0.1])
def test_the_score_uses_the_likeliest_rates_under_the_drop(counts, drop):
    """The closed form against a maximum of the likelihood that scipy finds under the constraint p - q = drop."""
    n, worse, better = counts

    def loss(q):
        p = q + drop
        return -(worse * np.log(p) + better * np.log(max(q, 1e-300)) + (n - worse - better) * np.log(1 - p - q))

    q = optimize.minimize_scalar(loss, bounds=(1e-12, (1 - drop) / 2 - 1e-12), method="bounded").x
    expected = (worse - better - n * drop) / math.sqrt(n * (2 * q + drop - drop**2))
    got = js.score(n, np.array([float(worse)]), np.array([float(better)]), drop)[0]
    # The minimiser stops at about 1e-5 of q.
    assert got == pytest.approx(expected, rel=1e-3)


def test_probabilities_of_outcomes_are_those_of_scipy():
    worse, better, table = js._outcomes(30)
    for p, q in ((0.1, 0.05), (0.3, 0.0)):
        for at in (0, 17, 200):
            one = js._probability(30, worse[at : at + 1], better[at : at + 1], table[at : at + 1], p, q)
            counts = [worse[at], better[at], 30 - worse[at] - better[at]]
            assert one == pytest.approx(stats.multinomial.pmf(counts, 30, [p, q, 1 - p - q]), rel=1e-9, abs=1e-300)
        assert js._probability(30, worse, better, table, p, q) == pytest.approx(1, rel=1e-9)


def test_without_discordant_pairs_the_limits_are_those_of_a_binomial():
    for n in (20, 59):
        assert js.noninferior_p(n, 0, 0, BUDGET) == pytest.approx((1 - BUDGET) ** n, rel=1e-9)
        exact = stats.binomtest(0, n).proportion_ci(confidence_level=0.9, method="exact").high
        # The limit is searched in steps of 1e-4.
        assert js.largest_drop(n, 0, 0, CONFIDENCE) == pytest.approx(exact, abs=1e-4)
    assert js.pairs_needed(BUDGET, CONFIDENCE) == 59  # 2.95 / BUDGET
    assert js.noninferior_p(58, 0, 0, BUDGET) > 0.05 >= js.noninferior_p(59, 0, 0, BUDGET)


def test_limits_hold_the_estimate_and_are_ordered():
    for n, worse, better in ((60, 10, 0), (60, 0, 10), (60, 4, 4), (200, 30, 11), (700, 60, 20)):
        low, high = (f(n, worse, better, CONFIDENCE) for f in (js.smallest_drop, js.largest_drop))
        assert low <= max((worse - better) / n, 0) <= high + 1e-4, (n, worse, better)
        assert low == pytest.approx(-js.largest_drop(n, better, worse, CONFIDENCE)) or low > 0
    assert js.smallest_drop(60, 10, 0, CONFIDENCE) > 0.08
    # A one-sided limit for counts on one side only is close to the exact one of a binomial.
    exact = stats.binomtest(10, 60).proportion_ci(confidence_level=0.9, method="exact").low
    assert js.smallest_drop(60, 10, 0, CONFIDENCE) == pytest.approx(exact, abs=0.01)
    assert js.compare(np.zeros(0), np.zeros(0), CONFIDENCE).high == 1


def test_above_600_pairs_the_normal_score_continues_the_exact_one():
    exact, normal = js.noninferior_p(600, 12, 9, 0.02), js.noninferior_p(601, 12, 9, 0.02)
    assert normal == pytest.approx(exact, rel=0.35) and (exact <= 0.05) == (normal <= 0.05)


def accepted(rng, n: int, runs: int, worse: float, better: float) -> float:
    """Share of simulated runs of n pairs that are accepted."""
    drawn = rng.multinomial(n, [worse, better, 1 - worse - better], runs)
    pairs, counts = np.unique(drawn[:, :2], axis=0, return_counts=True)
    passed = [js.noninferior_p(n, int(w), int(b), BUDGET) <= 1 - CONFIDENCE for w, b in pairs]
    return float(counts[passed].sum() / runs)


@pytest.mark.parametrize("discordant", [0.0, 0.01, 0.04])
def test_a_drop_of_the_budget_is_rarely_accepted_and_none_is_mostly(discordant):
    """20,000 runs at the planned n: a share of 5 % has a standard error of 0.16 points; three of them are allowed."""
    rng, runs = np.random.default_rng(7), 20_000
    n = js.pairs_needed(BUDGET, CONFIDENCE, discordant)
    half = discordant / 2
    assert accepted(rng, n, runs, half + BUDGET, half) <= 0.05 + 3 * 0.0016
    assert accepted(rng, n, runs, half, half) >= 0.9 - 3 * 0.0021
    # The planned n is needed: a quarter fewer, and a good arm is accepted too seldom.
    assert accepted(rng, n * 3 // 4, runs, half, half) < 0.9


def test_the_simulation_sees_a_test_that_is_too_lax(monkeypatch):
    """The twin: a test that ignores the budget's own uncertainty accepts a drop of the budget far too often."""
    monkeypatch.setattr(js, "noninferior_p", lambda n, worse, better, drop: 0.0 if (worse - better) / n < drop else 1.0)
    assert accepted(np.random.default_rng(7), 100, 20_000, BUDGET, 0.0) > 0.3


def test_bootstrap_is_that_of_scipy_and_is_seeded():
    values = np.random.default_rng(1).gamma(1.0, size=80)
    own = js.bootstrap(values, "mean", CONFIDENCE, 4000, seed=0)
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=4000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    # Two draws of 4,000 resamples: their quantiles differ by a few hundredths of a standard error of 0.11.
    assert (own.low, own.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    assert own == js.bootstrap(values, "mean", CONFIDENCE, 4000, seed=0)
    assert own != js.bootstrap(values, "mean", CONFIDENCE, 4000, seed=1)


def test_a_tail_is_not_drawn_towards_the_middle_and_what_is_missing_is_infinite():
    assert js.bootstrap([0.0] * 99 + [1.0], "max", CONFIDENCE, 100, 0).value == 1
    assert js.bootstrap([0.0] * 9 + [1.0], "q95", CONFIDENCE, 100, 0).value == 1
    assert js.bootstrap([0.0, math.nan], "mean", CONFIDENCE, 100, 0).high == math.inf
    assert js.bootstrap([], "mean", CONFIDENCE, 100, 0).n == 0
    with pytest.raises(ValueError, match="unknown statistic 'median'"):
        js.statistic("median")


def test_holm_is_that_of_statsmodels():
    p = np.random.default_rng(2).random(12) ** 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = multipletests(p, method="holm")[1]
    assert js.holm(p.tolist()) == pytest.approx(expected.tolist(), rel=1e-12)
    assert js.holm([]) == []


def test_what_is_needed_grows_with_what_differs_anyway():
    needed = [js.pairs_needed(BUDGET, CONFIDENCE, d) for d in (0.0, 0.01, 0.02, 0.04)]
    assert needed == sorted(needed) and needed[0] < needed[-1]
    assert js.pairs_needed(0.01, CONFIDENCE, 0.2) == pytest.approx(0.2 * ((1.645 + 1.2816) / 0.01) ** 2, rel=0.01)
