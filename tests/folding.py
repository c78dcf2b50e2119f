"""Per-row sums folded into the tables of a trace, in numpy and as slowly as it likes: docs/trace-format.md in code."""

from collections.abc import Mapping, Sequence

import numpy as np

from replayscope.inspector.metrics import ENTERING
from replayscope.traces import THRESHOLDS, RunInfo, Table
from replayscope.traces.schema import kind_of, relative_l2


def bucket_masks(run: RunInfo, point: str, layer: int, position: np.ndarray, buckets: Sequence[str]) -> np.ndarray:
    """Which rows of a run fall into which bucket; position: [row] absolute -> bool [bucket, row].

    The exact region of `final` and `logits` is that of what leaves the last layer.
    """
    cut = run.start if run.cut is None else run.cut
    regions = run.exact_in if point in ENTERING else run.exact_out
    exact = np.zeros(len(position), bool)
    if regions:
        for first, stop in regions[-1 if point in ("final", "logits") else layer]:
            exact |= (position >= first) & (position < stop)
    masks = []
    for name in buckets:
        if name.startswith("d:"):
            first, last = map(int, name[2:].split("-"))
            masks.append((position - run.start >= first) & (position - run.start <= last))
        else:
            masks.append(
                {
                    "all": np.ones(len(position), bool),
                    "window": (position >= cut - run.window) & (position < cut),
                    "suffix": (position >= cut) & (position < run.stop),
                    "last": position == run.stop - 1,
                    "exact": exact,
                }[name]
            )
    return np.array(masks).reshape(len(buckets), len(position))


def fold(
    packed: Sequence[Sequence[Mapping[str, np.ndarray]]], runs: Sequence[RunInfo], point: str, buckets: Sequence[str]
) -> Table:
    """Per-row sums [run][layer] -> a table, the way docs/trace-format.md says."""
    kind = kind_of(point)
    cells = [
        [
            _cells(kind, rows, bucket_masks(run, point, layer, rows["position"], buckets))
            for layer, rows in enumerate(by)
        ]
        for run, by in zip(runs, packed, strict=True)
    ]
    arrays = {name: np.array([[cell[name] for cell in by] for by in cells]) for name in cells[0][0]}
    return Table(kind, buckets, arrays, {} if kind == "discrete" else {"tol_abs": 1e-6, "tol_rel": 1e-3})


def _cells(kind: str, rows: Mapping[str, np.ndarray], masks: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays [bucket] of one run and layer; masks: [bucket, row]."""
    position = rows["position"]

    def total(name: str) -> np.ndarray:
        return np.where(masks, rows[name], 0).sum(1)

    def largest(values: np.ndarray) -> np.ndarray:
        return np.where(masks, np.abs(values), 0.0).max(1, initial=0.0)

    def place(values: np.ndarray, of: np.ndarray = position) -> np.ndarray:
        """`of` at each bucket's largest value, -1 where that is 0."""
        inside = np.where(masks, values, 0.0)
        where = inside.argmax(1) if len(values) else np.zeros(len(masks), np.int64)
        return np.where(inside.max(1, initial=0.0) > 0, np.append(of, -1)[where], -1)

    def margin_of(which: str) -> np.ndarray:
        inside = masks & (rows[which] > 0)
        return np.where(inside.any(1), np.where(inside, rows["margin"], np.inf).min(1, initial=np.inf), np.nan)

    cell = {"n": masks.sum(1)}
    if kind == "discrete":
        cell |= {name: total(name) for name in ("changed", "jaccard", "flips")}
        return cell | {"min_margin": margin_of("changed"), "margin_noise": largest(rows["noise"])}
    rel = relative_l2(rows["diff2"], rows["ref2"], 1, rows["nonfinite"])
    over = rel[:, None] > THRESHOLDS
    bad = masks & (rows["bad"] > 0)
    nowhere = np.iinfo(np.int64).max
    first = np.where(over, position[:, None], nowhere).min(0, initial=nowhere)
    cell |= {name: total(name) for name in ("elements", "diff2", "ref2", "arm2", "dot", "over", "nonfinite")}
    cell |= {
        "max_abs": largest(rows["max_abs"]), "max_row": place(rows["max_abs"]),
        "max_col": place(rows["max_abs"], rows["max_col"]),
        "first_nonfinite": np.where(bad.any(1), np.where(bad, position, nowhere).min(1, initial=nowhere), -1),
        "rel_max": largest(rel), "rel_max_row": place(rel),
        "first_at": np.where(over.any(0), first, -1),
        "last_at": np.where(over, position[:, None], -1).max(0, initial=-1),
    }  # fmt: skip
    if kind == "state":
        return cell
    cell |= {"flips": total("flip"), "overlap": total("overlap"), "max_row": place(rows["kl"]),
             "min_flip_margin": margin_of("flip")}  # fmt: skip
    for name in ("kl", "kl_rev", "js", "dlogp"):
        cell |= {f"{name}_sum": total(name), f"{name}_max": largest(rows[name])}
    del cell["max_col"]  # of another row than max_row, which is that of the largest KL
    return cell


_ROW_NAMES = {"kl": "kl_sum", "kl_rev": "kl_rev_sum", "js": "js_sum", "dlogp": "dlogp_sum", "flip": "flips",
              "noise": "margin_noise"}  # fmt: skip


def pack_rows(
    packed: Sequence[Sequence[Mapping[str, np.ndarray]]],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Per-row sums [run][layer] -> offsets, positions and arrays [layer, packed row]; n = 0 where a layer has no such
    row."""
    positions = [max((rows["position"] for rows in by), key=len) for by in packed]
    offsets = np.cumsum([0, *map(len, positions)])
    depth = len(packed[0])
    arrays = {"n": np.zeros((depth, offsets[-1]), np.int64)}
    for run, by in enumerate(packed):
        for layer, rows in enumerate(by):
            if not len(rows["position"]):
                continue
            cells = slice(offsets[run], offsets[run + 1])
            arrays["n"][layer, cells] = 1
            for name, values in rows.items():
                if name not in ("position", "bad"):
                    stored = _ROW_NAMES.get(name, name)
                    arrays.setdefault(stored, np.zeros((depth, offsets[-1]), values.dtype))[layer, cells] = values
    return offsets, np.concatenate(positions), arrays
