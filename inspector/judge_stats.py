"""Statistics of paired outcomes: what a number of prompts can show about an arm, and what it cannot. numpy only.

A pair is one prompt under the reference and under the arm. Of n pairs, ``worse`` fail under the arm alone and
``better`` under the reference alone; the drop is (worse - better) / n. Nothing here assumes that a count is large.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy import ndarray

# Points at which the unknown rate of discordant pairs is tried; the size of the test is smooth in it.
_RATES = 40
# Scores of outcomes that are equal on paper differ by rounding.
_TIE = 1e-9
# Above it the table of all outcomes is large and the score's own normal approximation is as good.
_EXACT = 600


def mcnemar(worse: int, better: int) -> float:
    """Exact two-sided p-value that discordant pairs fall on both sides alike (McNemar 1947); 1 where there are none."""
    n = worse + better
    tail = sum(math.comb(n, k) for k in range(min(worse, better) + 1)) / 2**n
    return min(1.0, 2 * tail)


def score(n: int, worse: ndarray, better: ndarray, drop: float) -> ndarray:
    """Score statistic of a drop in paired proportions (Tango 1998, Statistics in Medicine 17:891, formula 8).

    Negative where fewer pairs got worse than ``drop`` lets expect. 0 < drop < 1. Arrays of any one shape.
    """
    a = 2.0 * n
    b = -worse - better + (2.0 * n - worse + better) * drop
    c = -better * drop * (1 - drop)
    rate = (np.sqrt(np.maximum(b * b - 4 * a * c, 0)) - b) / (2 * a)
    return (worse - better - n * drop) / np.sqrt(n * (2 * rate + drop * (1 - drop)))


@lru_cache(maxsize=4096)
def noninferior_p(n: int, worse: int, better: int, drop: float) -> float:
    """p-value of 'the drop is at least ``drop``': the arm is accepted where it is at most 1 - confidence.

    Exact and unconditional: the probability of a score this low or lower, largest over the unknown rate of pairs that
    get better (Sidik 2003, Statistics in Medicine 22:265). With no discordant pair among few it is (1 - drop)^n, so
    that about 3 / drop pairs are needed at 95 %. Above 600 pairs the score is taken as normal.
    """
    if not 0 < drop < 1:
        return 1.0 if drop <= 0 else 0.0
    own = float(score(n, np.array([float(worse)]), np.array([float(better)]), drop)[0])
    if n > _EXACT:
        return 0.5 * math.erfc(-own / math.sqrt(2))
    w, b, _ = _outcomes(n)
    return _largest(n, score(n, w, b, drop) <= own + _TIE, drop)


@lru_cache(maxsize=4096)
def inferior_p(n: int, worse: int, better: int, drop: float) -> float:
    """p-value of 'the drop is at most ``drop``' (0 < drop < 1): where it is small, the arm does drop by more."""
    own = float(score(n, np.array([float(worse)]), np.array([float(better)]), drop)[0])
    if n > _EXACT:
        return 0.5 * math.erfc(own / math.sqrt(2))
    w, b, _ = _outcomes(n)
    return _largest(n, score(n, w, b, drop) >= own - _TIE, drop)


def _largest(n: int, kept: ndarray, drop: float) -> float:
    """Probability of the outcomes kept, largest over the unknown rate."""
    w, b, table = (values[kept] for values in _outcomes(n))
    rates = np.linspace(0, (1 - drop) / 2, _RATES + 1)
    return float(min(1.0, max(_probability(n, w, b, table, rate + drop, rate) for rate in rates)))


@lru_cache(maxsize=8)
def _outcomes(n: int) -> tuple[ndarray, ndarray, ndarray]:
    """worse, better, and log of n! / (worse! better! rest!) of every outcome of n pairs."""
    log = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    worse, better = np.triu_indices(n + 1)
    better = better - worse
    return worse.astype(float), better.astype(float), log[n] - log[worse] - log[better] - log[n - worse - better]


def _probability(n: int, worse: ndarray, better: ndarray, table: ndarray, p: float, q: float) -> float:
    """Probability of these outcomes where a pair gets worse with p, and better with q."""
    total = table.copy()
    for count, rate in ((worse, p), (better, q), (n - worse - better, 1 - p - q)):
        if rate > 0:
            total += count * math.log(rate)
        else:
            total[count > 0] = -np.inf
    return float(np.exp(total).sum())


@lru_cache(maxsize=4096)
def largest_drop(n: int, worse: int, better: int, confidence: float) -> float:
    """Upper one-sided confidence limit of the drop, at least 0: the smallest budget with which the arm is accepted."""
    if n == 0:
        return 1.0
    return _border(lambda drop: noninferior_p(n, worse, better, drop) > 1 - confidence)[1]


@lru_cache(maxsize=4096)
def smallest_drop(n: int, worse: int, better: int, confidence: float) -> float:
    """Lower one-sided confidence limit of the drop; below 0 where more pairs got better than worse, or as many."""
    if n == 0:
        return -1.0
    if inferior_p(n, worse, better, _STEP) > 1 - confidence:
        return -largest_drop(n, better, worse, confidence)
    return _border(lambda drop: inferior_p(n, worse, better, drop) <= 1 - confidence)[0]


_STEP = 1e-4


def _border(below: Callable[[float], bool]) -> tuple[float, float]:
    """Drops in (0, 1) on both sides of where ``below`` turns false."""
    low, high = 0.0, 1.0
    while high - low > _STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high


@dataclass(frozen=True)
class Drop:
    """A paired comparison. drop: (worse - better) / n; low, high: one-sided limits at the confidence each; p: exact
    McNemar, two-sided."""

    n: int
    worse: int
    better: int
    drop: float
    low: float
    high: float
    p: float


def compare(reference: ndarray, arm: ndarray, confidence: float) -> Drop:
    """reference, arm: bool [prompt], whether the prompt succeeded."""
    reference, arm = np.asarray(reference, bool), np.asarray(arm, bool)
    worse, better, n = int((reference & ~arm).sum()), int((arm & ~reference).sum()), len(arm)
    return Drop(
        n,
        worse,
        better,
        (worse - better) / n if n else math.nan,
        smallest_drop(n, worse, better, confidence),
        largest_drop(n, worse, better, confidence),
        mcnemar(worse, better),
    )


@lru_cache(maxsize=1024)
def pairs_needed(drop: float, confidence: float, discordant: float = 0.0, power: float = 0.9) -> int:
    """Smallest number of pairs with which an arm without any drop is accepted with probability ``power``.

    discordant: share of pairs that differ, half of them each way. Without any, ⌈ln(1 - confidence) / ln(1 - drop)⌉.
    """
    least = math.ceil(math.log(1 - confidence) / math.log(1 - drop))
    if discordant <= 0:
        return least

    def enough(n: int) -> bool:
        return _power(n, drop, confidence, discordant) >= power

    high = least
    while not enough(high):
        high *= 2
        if high > _EXACT:
            # Normal approximation: the drop must be (z of the confidence + z of the power) standard errors.
            z = _normal(confidence) + _normal(power)
            return max(high // 2, math.ceil(discordant * (z / drop) ** 2))
    low = max(least, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _power(n: int, drop: float, confidence: float, discordant: float) -> float:
    """Probability that an arm without a drop is accepted."""
    w, b, table = _outcomes(n)
    s = score(n, w, b, drop)
    # Every outcome with the score of an accepted one or less is accepted, so the border is found by halving.
    order = np.argsort(s, kind="stable")
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        at = order[middle]
        passed = noninferior_p(n, int(w[at]), int(b[at]), drop) <= 1 - confidence
        low, high = (middle + 1, high) if passed else (low, middle)
    kept = order[:low]
    return _probability(n, w[kept], b[kept], table[kept], discordant / 2, discordant / 2)


def _normal(p: float) -> float:
    """Quantile of the normal distribution, by halving."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * math.erfc(-middle / math.sqrt(2)) < p else (low, middle)
    return high


def statistic(name: str) -> Callable[[ndarray], ndarray]:
    """mean, max, or a quantile such as q95, over the last axis. Raises ValueError for another name."""
    if name == "mean":
        return lambda values: values.mean(-1)
    if name == "max":
        return lambda values: values.max(-1)
    if name[:1] == "q" and name[1:].isdecimal() and len(name) <= 4 and int(name[1:]) <= 100:
        # The next larger value, not one between two: a tail must not be drawn towards the middle.
        return lambda values: np.quantile(values, int(name[1:]) / 100, axis=-1, method="higher")
    raise ValueError(f"unknown statistic {name!r:.60}; valid: mean, max, or q0 … q100")


@dataclass(frozen=True)
class Interval:
    """A statistic of n numbers with one-sided limits at the confidence each (percentile bootstrap over prompts)."""

    n: int
    value: float
    low: float
    high: float


def bootstrap(values: Sequence[float] | ndarray, name: str, confidence: float, resamples: int, seed: int) -> Interval:
    """Interval of ``mean`` or a quantile of per-prompt numbers; ``max`` has none, since no resampling extends it.

    The same seed and n draw the same prompts, so that two arms are resampled together. NaN counts as infinite: an arm
    that produced no number did not pass.
    """
    numbers = np.nan_to_num(np.asarray(values, float), nan=np.inf, posinf=np.inf, neginf=-np.inf)
    n = len(numbers)
    if n == 0:
        return Interval(0, math.nan, math.nan, math.nan)
    of = statistic(name)
    value = float(of(numbers))
    if name == "max" or n == 1:
        return Interval(n, value, value, value)
    draws = of(numbers[_draws(n, resamples, seed)])
    low, high = np.quantile(draws, [1 - confidence, confidence], method="nearest")
    return Interval(n, value, float(low), float(high))


@lru_cache(maxsize=16)
def _draws(n: int, resamples: int, seed: int) -> ndarray:
    return np.random.default_rng(seed).integers(0, n, (resamples, n))


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979), in the order given; used to name regressions, never to accept."""
    order = np.argsort(p, kind="stable")
    out, worst = [0.0] * len(order), 0.0
    for rank, at in enumerate(order.tolist()):
        worst = max(worst, min(1.0, (len(order) - rank) * p[at]))
        out[at] = worst
    return out
