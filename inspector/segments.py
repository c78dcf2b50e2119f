"""Rows of many runs side by side, reduced to the regions and distance bins of each: segment sums, never a loop."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayscope.traces.schema import REGIONS, THRESHOLDS, RunInfo

_ALL, _EXACT = REGIONS.index("all"), REGIONS.index("exact")


@dataclass(frozen=True)
class Segments:
    """Where the rows of each run and bucket lie among the packed rows.

    runs [n]: indices in the trace; a noise run is looked at from every cut, so rows may belong to several. bounds
    [n, buckets, 2]: first packed row and last + 1 of each bucket, for ``exact`` those of all rows, of which a mask then
    picks. position [rows]: ascending within a run. Arguments x have shape [..., rows], results [..., n, buckets].
    """

    runs: np.ndarray
    bounds: np.ndarray
    position: np.ndarray

    @staticmethod
    def of(pieces: Sequence[tuple[Sequence[RunInfo], np.ndarray]], bins: Sequence[tuple[int, int]]) -> "Segments":
        """pieces: the runs that some consecutive rows belong to, and the rows' positions; bins: of the distance."""
        runs, bounds, at = [], [], 0
        for views, position in pieces:
            runs += [r.index for r in views]
            bounds += [_bounds(r, position, bins) + at for r in views]
            at += len(position)
        return Segments(np.array(runs), np.stack(bounds), np.concatenate([p for _, p in pieces]))

    @property
    def whole(self) -> np.ndarray:
        """[n, 2]: the rows of each run."""
        return self.bounds[:, _ALL]

    def count(self, exact: np.ndarray) -> np.ndarray:
        """Rows of each bucket [n, buckets]; exact [rows] bool."""
        n = self.bounds[..., 1] - self.bounds[..., 0]
        n[:, _EXACT] = _between(np.add, exact.astype(np.int64), self.whole, 0)
        return n

    def reduce(self, how: np.ufunc, x: np.ndarray, exact: np.ndarray, empty: float = 0.0) -> np.ndarray:
        """x reduced over each bucket; ``empty`` is the value of a bucket without rows."""
        out = _between(how, x, self.bounds, empty)
        out[..., _EXACT] = _between(how, np.where(exact, x, np.asarray(empty, x.dtype)), self.whole, empty)
        return out

    def largest(self, x: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The largest of the numbers x ≥ 0 in each bucket and its first packed row, -1 where it is 0; NaN is largest.

        Rows are ranked once, so that a bucket's largest rank tells its row: one sort instead of a search per bucket.
        """
        rows = x.shape[-1]
        order = np.argsort(x, -1)
        ascending = np.take_along_axis(x, order, -1)
        low, high = ascending[..., :-1], ascending[..., 1:]
        higher = (low != high) & ~(np.isnan(low) & np.isnan(high))
        rank = np.zeros(x.shape, np.int64)
        # Among equals the first row ranks highest.
        np.cumsum(higher, -1, out=rank[..., 1:])
        rank = rank * rows + (rows - 1 - order)
        ranked = np.empty_like(rank)
        np.put_along_axis(ranked, order, rank, -1)
        best = self.reduce(np.maximum, ranked, exact, -1)
        row = np.where(best < 0, 0, rows - 1 - best % rows)
        flat = row.reshape(*row.shape[:-2], -1)
        top = np.take_along_axis(x, flat, -1).reshape(row.shape)
        found = (best >= 0) & (top != 0)
        return np.where(found, top, 0), np.where(found, row, -1)

    def crossings(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last position [..., n, thresholds] of each run whose x exceeds each of THRESHOLDS, -1 if none."""
        first, last = (np.full((*x.shape[:-1], len(self.runs), len(THRESHOLDS)), -1, np.int64) for _ in range(2))
        begin, end = self.whole.T
        for at in np.ndindex(x.shape[:-1]):
            known = -1
            for t, threshold in enumerate(THRESHOLDS):
                over = np.flatnonzero(x[at] > threshold)
                if not len(over):
                    break
                if len(over) != known:  # the rows over a threshold are among those over a lower one
                    lo, hi = np.searchsorted(over, begin), np.searchsorted(over, end)
                    some, known = lo < hi, len(over)
                first[at][some, t] = self.position[over[lo[some]]]
                last[at][some, t] = self.position[over[hi[some] - 1]]
        return first, last


def pick(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """values [..., rows] at rows ``where`` [..., n, buckets], -1 where that is -1."""
    flat = np.maximum(where, 0).reshape(*where.shape[:-2], -1)
    values = np.broadcast_to(values, (*flat.shape[:-1], values.shape[-1]))
    return np.where(where >= 0, np.take_along_axis(values, flat, -1).reshape(where.shape), -1)


def _bounds(r: RunInfo, position: np.ndarray, bins: Sequence[tuple[int, int]]) -> np.ndarray:
    """[buckets, 2]: first row and last row + 1 of each bucket of a run."""
    cut = r.start if r.cut is None else r.cut
    ranges = {"all": (r.start, r.stop), "window": (max(cut - r.window, 0), cut), "suffix": (cut, r.stop),
              "last": (r.stop - 1, r.stop), "exact": (r.start, r.stop)}  # fmt: skip
    wanted = [ranges[name] for name in REGIONS] + [(r.start + a, r.start + b + 1) for a, b in bins]
    return np.searchsorted(position, np.array(wanted))


def _between(how: np.ufunc, x: np.ndarray, bounds: np.ndarray, empty: float) -> np.ndarray:
    """x [..., rows] reduced over each [first, last+1) of bounds [*b, 2] → [..., *b]."""
    # reduceat takes starts only: the end of a segment is the start of one that is dropped, the last end is this column.
    tail = np.concatenate((x, np.full((*x.shape[:-1], 1), empty, x.dtype)), -1)
    out = how.reduceat(tail, bounds.reshape(-1), axis=-1)[..., ::2].reshape(*x.shape[:-1], *bounds.shape[:-1])
    return np.where(bounds[..., 0] == bounds[..., 1], np.asarray(empty, x.dtype), out)
