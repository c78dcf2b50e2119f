"""What two states at the same positions differ by, row by row, and the same folded into one cell.

A table here has one bucket per row ([1, 1, row]), or one for all rows: every metric applies to both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from replayscope.inspector.metrics import logits_sums, state_sums
from replayscope.traces.schema import DISCRETE_POINTS, Table, relative_l2

_TOP_K = 5


@dataclass(frozen=True)
class Worst:
    """The element that differs most: absolute position, channel (index in each further axis), and both values."""

    position: int
    channel: tuple[int, ...]
    first: float
    second: float


def row_table(name: str, arm: ndarray, ref: ndarray, position: ndarray, ids: ndarray) -> Table:
    """A table of one run and layer with a bucket per row. arm, ref: [row, …] numbers; position [row]: of each row;
    ids [token]: the prompt, of which logits take the token that follows."""
    if is_discrete(name, ref):
        # Of no rows at all the number of choices cannot be worked out from the size.
        arrays = _choices(*(side.reshape(len(side), math.prod(side.shape[1:])) for side in (arm, ref)))
        return _table("discrete", arrays, len(position))
    rows = state_sums(arm, ref)
    arrays = {key: rows[key] for key in ("elements", "diff2", "ref2", "arm2", "dot", "over", "nonfinite", "max_abs")}
    arrays["rel_max"] = relative_l2(rows["diff2"], rows["ref2"], 1, rows["nonfinite"])
    kind = "state"
    if name.rsplit(".", 1)[-1] == "logits" and arm.ndim == 2:
        kind = "logits"
        following = np.array([ids[p + 1] if p + 1 < len(ids) else -1 for p in position], np.int64)
        arrays |= _logits(logits_sums(arm, ref, following, _TOP_K))
    return _table(kind, arrays, len(position))


def is_discrete(name: str, values: ndarray) -> bool:
    """Whether rows are sets of ids rather than vectors."""
    return name.rsplit(".", 1)[-1] in DISCRETE_POINTS or values.dtype.kind in "iu"


def fold(rows: Table) -> Table:
    """The rows as one cell: sums, and largest values of what ends in `max` or begins with it."""
    arrays = {}
    for key, values in rows.arrays.items():
        largest = key.startswith("max") or key.endswith("max")
        with np.errstate(over="ignore", invalid="ignore"):
            whole = values.max(2, keepdims=True, initial=0) if largest else values.sum(2, keepdims=True)
        arrays[key] = whole
    return Table(rows.kind, ("all",), arrays)


def worst_of(rows: Table, arm: ndarray, ref: ndarray, position: ndarray) -> Worst | None:
    """The element that differs most, one that is finite on one side only before all others; of choices the first row
    that changed. None if nothing differs."""
    if rows.kind == "discrete":
        changed = np.flatnonzero(rows.arrays["changed"][0, 0])
        if not len(changed):
            return None
        row = int(changed[0])
        a, r = (np.sort(side[row], axis=None) for side in (arm, ref))
        at = int((a != r).argmax())
        return Worst(int(position[row]), (at,), float(r[at]), float(a[at]))
    odd, gap = np.flatnonzero(rows.arrays["nonfinite"][0, 0]), rows.arrays["max_abs"][0, 0]
    if not len(odd) and gap.max(initial=0.0) == 0:
        return None
    row = int(odd[0] if len(odd) else gap.argmax())
    return _worst(arm[row], ref[row], int(position[row]))


def element_errors(arm: ndarray, ref: ndarray) -> dict[str, float]:
    """max_rel: largest |arm − ref| / |ref| over elements whose reference is not zero; zero_reference: elements that
    are zero in the reference and not in the arm, and zero_max_abs the largest of them. Over finite pairs."""
    arm, ref = np.asarray(arm, np.float64), np.asarray(ref, np.float64)
    finite = np.isfinite(arm) & np.isfinite(ref)
    counted, zero = finite & (ref != 0), finite & (ref == 0) & (arm != 0)
    with np.errstate(over="ignore"):
        relative = np.abs(arm[counted] - ref[counted]) / np.abs(ref[counted])
    return {
        "max_rel": float(relative.max(initial=0.0)),
        "zero_reference": int(zero.sum()),
        "zero_max_abs": float(np.abs(arm[zero]).max(initial=0.0)),
    }


def _worst(arm: ndarray, ref: ndarray, position: int) -> Worst:
    """Of one row: an element that is finite on one side only, else the largest difference."""
    a, r = np.asarray(arm, np.float64), np.asarray(ref, np.float64)
    same = (a == r) | (np.isnan(a) & np.isnan(r))
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.where(same, 0.0, np.nan_to_num(np.abs(a - r), nan=np.inf))
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    return Worst(position, tuple(map(int, at)), float(r[at]), float(a[at]))


def _choices(arm: ndarray, ref: ndarray) -> dict[str, ndarray]:
    """Rows of ids compared as sets; -1 stands for none."""
    changed = (np.sort(arm, 1) != np.sort(ref, 1)).any(1)
    jaccard = np.ones(len(arm))
    for row in np.flatnonzero(changed):
        jaccard[row] = _jaccard(arm[row].tolist(), ref[row].tolist())
    return {"changed": changed.astype(np.int64), "jaccard": jaccard}


def _jaccard(arm: Sequence[int], ref: Sequence[int]) -> float:
    a, r = set(arm) - {-1}, set(ref) - {-1}
    return len(a & r) / len(a | r) if a | r else 1.0


def _logits(rows: dict[str, ndarray]) -> dict[str, ndarray]:
    known = ~np.isnan(rows["dlogp"])
    arrays = {"flips": rows["flip"], "overlap": rows["overlap"], "n_next": known.astype(np.int64)}
    for key in ("kl", "kl_rev", "js", "dlogp"):
        values = np.where(known, rows[key], 0.0) if key == "dlogp" else rows[key]
        arrays |= {f"{key}_sum": values, f"{key}_max": np.abs(values)}
    return arrays


def _table(kind: str, arrays: dict[str, ndarray], rows: int) -> Table:
    arrays = arrays | {"n": np.ones(rows, np.int64)}
    return Table(kind, tuple(map(str, range(rows))), {key: values[None, None] for key, values in arrays.items()})
