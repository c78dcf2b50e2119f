"""Segment reductions against a loop over runs and buckets that says what they mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from replayscope.inspector.fold import _rows, _sets
from replayscope.inspector.segments import Segments
from replayscope.traces.schema import REGIONS, THRESHOLDS, RunInfo, distance_bins

ALL, EXACT = REGIONS.index("all"), REGIONS.index("exact")
BINS = distance_bins(40)


def segments() -> Segments:
    """Runs of several lengths; a noise run seen from two cuts, a run without rows behind its cut, and a gap in one."""
    base = RunInfo(0, "encoder", "paper", 17, 6, 11, 40, 40, 6)
    noise = [replace(base, index=i, arm="rechunk", cut=cut, start=0) for i, cut in ((1, 17), (2, 30))]
    short = replace(base, index=3, cut=40, start=39)
    wide = replace(base, index=4, cut=4, start=0)
    positions = np.arange(11, 40), np.arange(40), np.arange(39, 40), np.array([0, 1, 2, 7, 8, 39])
    return Segments.of(list(zip(([base], noise, [short], [wide]), positions, strict=True)), BINS)


def rows_of(where: Segments, exact: np.ndarray):
    """(place, rows [k]) of each bucket of each run."""
    for run, bucket in np.ndindex(where.bounds.shape[:2]):
        first, stop = where.bounds[run, bucket]
        rows = np.arange(first, stop)
        yield (run, bucket), rows[exact[rows]] if bucket == EXACT else rows


EXACTS = {
    "none": lambda n, rng: np.zeros(n, bool),
    "all": lambda n, rng: np.ones(n, bool),
    "some": lambda n, rng: rng.random(n) < 0.4,
    "one": lambda n, rng: np.arange(n) == n - 1,
}


@pytest.mark.parametrize("exact", EXACTS)
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize(("how", "empty"), [(np.add, 0.0), (np.maximum, -1.0), (np.minimum, np.inf)])
def test_a_bucket_is_reduced_over_its_rows_only(exact, spare, how, empty):
    where, rng = segments(), np.random.default_rng(0)
    n = len(where.position)
    mask, x = EXACTS[exact](n, rng), rng.integers(0, 1000, (2, 3, n)).astype(np.float64)
    given = np.concatenate((x, np.full((2, 3, 1), np.nan)), -1) if spare else x
    got, count = where.reduce(how, given, mask, empty), where.count(mask)
    assert got.shape == (2, 3, *where.bounds.shape[:2]) and not np.isnan(got).any()
    for place, rows in rows_of(where, mask):
        want = how.reduce(x[..., rows], -1) if len(rows) else np.full((2, 3), empty)
        assert (got[(..., *place)] == want).all(), place  # whole numbers: a sum has no rounding
        assert count[place] == len(rows)


@pytest.mark.parametrize("exact", EXACTS)
def test_the_largest_is_found_with_its_first_row(exact):
    where, rng = segments(), np.random.default_rng(1)
    n = len(where.position)
    # Few values, so that many are equal; nothing but zeros; NaN, infinity and the smallest number there is.
    x = np.stack([rng.integers(0, 4, n), np.zeros(n), np.where(rng.random(n) < 0.1, np.nan, 1.0),
                  rng.choice([0.0, 5e-324, np.inf], n)]).astype(np.float64)  # fmt: skip
    mask = EXACTS[exact](n, rng)
    with np.errstate(all="raise"):
        top, row = where.largest(x, mask)
    for point in range(len(x)):
        for place, rows in rows_of(where, mask):
            values = x[point, rows]
            want = -1
            if np.isnan(values).any():
                want = rows[np.isnan(values).argmax()]
            elif len(values) and values.max() > 0:
                want = rows[values.argmax()]
            assert row[(point, *place)] == want
            np.testing.assert_equal(top[(point, *place)], x[point, want] if want >= 0 else 0.0)


def test_crossings_are_the_first_and_last_rows_over_each_threshold():
    where, rng = segments(), np.random.default_rng(2)
    n = len(where.position)
    levels = np.array([0.0, 1e-16, *THRESHOLDS, np.nan, np.inf, 1e300])
    x = np.stack([rng.choice(levels, n), np.zeros(n), np.full(n, np.nan), np.full(n, 3e-7), np.full(n, 20.0)])
    first, last = where.crossings(x)
    for point, run, t in np.ndindex(first.shape):
        begin, end = where.whole[run]
        over = where.position[begin:end][x[point, begin:end] > THRESHOLDS[t]]
        want = (over[0], over[-1]) if len(over) else (-1, -1)
        assert (first[point, run, t], last[point, run, t]) == want


def test_sets_that_differ_are_told_by_their_jaccard_index():
    none = [-1] * 4
    ids, others = (torch.tensor(x) for x in (
        [[0, 3, 5, 9], [0, 3, 5, 9], [0, 3, 5, 9], [2, 7, -1, -1], none, [1, 2, 3, 4], [4, -1, -1, -1]],
        [[0, 3, 5, 9], [0, 3, 5, 8], [1, 2, 4, 6], [2, 7, 8, -1], none, none, [0, 1, 2, 4]],
    ))  # fmt: skip
    margin = torch.ones(len(ids))
    for a, r in ((ids, others), (others, ids)):
        got = _sets(a, r, margin, margin)
        want = []
        for x, y in zip(a.tolist(), r.tolist(), strict=True):
            x, y = set(x) - {-1}, set(y) - {-1}
            want.append(len(x & y) / len(x | y) if x | y else 1.0)
        assert got["jaccard"].tolist() == want
        assert got["changed"].tolist() == [0, 1, 1, 1, 0, 1, 1]


def test_sets_may_lie_in_memory_in_any_way():
    ids, margin = torch.arange(60).view(12, 5), torch.ones(12)
    others = ids + (torch.arange(12) % 2)[:, None]
    want = _sets(ids, others, margin, margin)["jaccard"]
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # the same in every order of tests: otherwise torch says a thing once per process
    try:
        for lay in (lambda x: x.t().contiguous().t(), lambda x: torch.cat((x, x), 1)[:, :5]):
            for a, r in ((lay(ids), others), (ids, lay(others)), (lay(ids), lay(others))):
                assert torch.equal(_sets(a, r, margin, margin)["jaccard"], want)
    finally:
        torch.set_warn_always(before)


def test_rows_are_taken_as_they_are_named():
    x = torch.arange(40.0).view(20, 2)
    for at in ([3, 4, 5], [5, 4, 3], [7], [3, 4, 4, 6], [0, 2, 1, 3], [2, 3, 4, 0, 1], list(range(20)), [6, 6, 6]):
        rows = torch.tensor(at)
        assert torch.equal(_rows(x, rows), x[rows])
    assert _rows(x, torch.arange(4, 9)).data_ptr() == x[4:].data_ptr(), "rows that lie together need no copy"
