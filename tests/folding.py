"""Per-row sums folded into the tables of a trace, in numpy and as slowly as it likes: docs/trace-format.md in code."""

from collections.abc import Callable, Mapping, Sequence

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
    shape = (len(runs), len(packed[0]), len(buckets))
    cells = [
        [[_cell(kind, _pick(rows, mask)) for mask in bucket_masks(run, point, layer, rows["position"], buckets)]
         for layer, rows in enumerate(by_layer)]
        for run, by_layer in zip(runs, packed, strict=True)
    ]  # fmt: skip
    arrays = {
        name: np.array([[[c[name] for c in b] for b in by] for by in cells]).reshape(shape) for name in cells[0][0][0]
    }
    if kind == "discrete":
        return Table(kind, buckets, arrays)
    for name, pick in (("first_at", np.min), ("last_at", np.max)):
        arrays[name] = np.array([[_crossings(rows, pick) for rows in by] for by in packed])
    return Table(kind, buckets, arrays, {"tol_abs": 1e-6, "tol_rel": 1e-3})


def _pick(rows: Mapping[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[mask] for name, values in rows.items()}


def _row_rel(r: Mapping[str, np.ndarray]) -> np.ndarray:
    return relative_l2(r["diff2"], r["ref2"], np.ones(len(r["position"])), r["nonfinite"])


def _crossings(rows: Mapping[str, np.ndarray], pick: Callable) -> np.ndarray:
    rel = _row_rel(rows)
    return np.array([pick(rows["position"][rel > t]) if (rel > t).any() else -1 for t in THRESHOLDS])


def _cell(kind: str, r: Mapping[str, np.ndarray]) -> dict[str, float]:
    n = len(r["position"])
    if kind == "discrete":
        margins = r["margin"][r["changed"] > 0]
        return {"n": n, "changed": r["changed"].sum(), "jaccard": r["jaccard"].sum(), "flips": r["flips"].sum(),
                "min_margin": margins.min() if len(margins) else np.nan,
                "margin_noise": r["noise"].max(initial=0.0)}  # fmt: skip
    rel = _row_rel(r)
    top = int(r["max_abs"].argmax()) if n and r["max_abs"].max() > 0 else -1
    bad = r["position"][r["bad"] > 0]
    cell = {
        "n": n, **{name: r[name].sum() for name in ("elements", "diff2", "ref2", "arm2", "dot", "over", "nonfinite")},
        "max_abs": r["max_abs"].max(initial=0.0),
        "max_row": r["position"][top] if top >= 0 else -1, "max_col": r["max_col"][top] if top >= 0 else -1,
        "first_nonfinite": bad.min() if len(bad) else -1,
        "rel_max": rel.max(initial=0.0), "rel_max_row": r["position"][rel.argmax()] if rel.any() else -1,
    }  # fmt: skip
    if kind == "state":
        return cell
    margins = r["margin"][r["flip"] > 0]
    cell |= {"flips": r["flip"].sum(), "overlap": r["overlap"].sum(),
             "max_row": r["position"][r["kl"].argmax()] if n else -1,
             "min_flip_margin": margins.min() if len(margins) else np.nan}  # fmt: skip
    for name in ("kl", "kl_rev", "js", "dlogp"):
        cell[f"{name}_sum"] = r[name].sum()
        cell[f"{name}_max"] = np.abs(r[name]).max(initial=0.0)
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
