"""Rows of many runs side by side, reduced to the regions and distance bins of each: segment sums, never a loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
        first, stop = _among(exact, self.whole).T
        n[:, _EXACT] = stop - first
        return n

    def reduce(self, how: np.ufunc, x: np.ndarray, exact: np.ndarray, empty: complex = 0.0) -> np.ndarray:
        """x reduced over each bucket; ``empty`` is the value of a bucket without rows.

        x may have one more column, whatever is in it: then it need not be copied.
        """
        rows, picked = len(self.position), np.flatnonzero(exact)
        out = self._cut.reduce(how, x, empty)
        if len(picked) == rows:
            out[..., _EXACT] = out[..., _ALL]
        else:
            out[..., _EXACT] = _Cut(_among(exact, self.whole)).reduce(how, x[..., picked], empty)
        return out

    def largest(self, x: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The largest of numbers x ≥ 0 in each bucket and its first packed row, -1 where it is 0; NaN is largest."""
        rows = x.shape[-1]
        # Complex numbers are ordered by their real parts, and equal ones by their imaginary parts, of which the first
        # row's is the largest: one pass finds the number and its row.
        both = np.zeros((*x.shape[:-1], rows + 1), np.complex128)
        both[..., :rows] = x
        both[..., :rows] += 1j * np.arange(rows, 0, -1)
        best = self.reduce(np.maximum, both, exact)
        top = np.real(best).copy()
        return top, np.where(top != 0, rows - np.imag(best), -1).astype(np.int64)

    @cached_property
    def _cut(self) -> "_Cut":
        bounds = self.bounds.copy()
        bounds[:, _EXACT, 1] = bounds[:, _EXACT, 0]  # found from the rows that a mask picks
        return _Cut(bounds)

    def crossings(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last position [..., n, thresholds] of each run whose x exceeds each of THRESHOLDS, -1 if none."""
        first, last = (np.full((*x.shape[:-1], len(self.runs), len(THRESHOLDS)), -1, np.int64) for _ in range(2))
        begin, end = self.whole.T
        for at in np.ndindex(x.shape[:-1]):
            # All that is over 0 is over each of the lowest thresholds.
            least = np.min(x[at], where=x[at] > 0, initial=np.inf)
            lowest, known = max(int(np.searchsorted(THRESHOLDS, least)) - 1, 0), -1
            for t in range(lowest, len(THRESHOLDS)):
                over = np.flatnonzero(x[at] > THRESHOLDS[t])
                if not len(over):
                    break
                if len(over) != known:  # the rows over a threshold are among those over a lower one
                    lo, hi = np.searchsorted(over, begin), np.searchsorted(over, end)
                    some, known = lo < hi, len(over)
                first[at][some, t] = self.position[over[lo[some]]]
                last[at][some, t] = self.position[over[hi[some] - 1]]
            for found in (first[at], last[at]):
                found[:, :lowest] = found[:, lowest : lowest + 1]
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


def _among(picked: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """bounds [..., 2] of rows, as bounds of those rows only that are picked [rows] bool."""
    return np.concatenate(([0], np.cumsum(picked)))[bounds]


class _Cut:
    """How reduceat is told to reduce over each [first, last+1) of bounds [*b, 2].

    It takes starts only: the end of a segment is the start of one that is dropped. Where the next segment begins there
    nothing has to be.
    """

    def __init__(self, bounds: np.ndarray) -> None:
        first, end = bounds.reshape(-1, 2).T
        self._shape, self._void = bounds.shape[:-1], (first == end).reshape(bounds.shape[:-1])
        needed = np.stack((np.ones(len(first), bool), np.append(end[:-1] != first[1:], True)), 1).reshape(-1)
        self._starts = bounds.reshape(-1)[needed]
        self._top = self._starts.max(initial=0)
        self._wanted = (np.cumsum(needed) - 1)[::2]

    def reduce(self, how: np.ufunc, x: np.ndarray, empty: complex) -> np.ndarray:
        """x [..., rows, or one more] → [..., *b]; ``empty`` is the value of a segment without rows."""
        if self._top >= x.shape[-1]:
            # The end of the last segment is this column.
            x = np.concatenate((x, np.zeros((*x.shape[:-1], 1), x.dtype)), -1)
        out = how.reduceat(x, self._starts, axis=-1)[..., self._wanted].reshape(*x.shape[:-1], *self._shape)
        return np.where(self._void, np.asarray(empty, x.dtype), out)
