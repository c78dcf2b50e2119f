"""What the sums of a trace mean: metrics from tables, and in numpy the per-row sums that the tables are folded from.

Definitions, units, the direction of KL and the rules for zero, NaN and inf stand in docs/numerics.md.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from replayscope.inspector.names import choose
from replayscope.traces.schema import RowTable, Table, relative_l2

TOL_ABS, TOL_REL = 1e-6, 1e-3
# What enters a layer is exact as far as the layers before it are; all else that a layer makes needs its attention.
ENTERING = ("embed", "attn_in", "window_kv", "global_kv", "index_k")

Arrays = Mapping[str, ndarray]


class Metric(NamedTuple):
    """unit: of the number ('' for a pure one). says: one line for legends. kinds: which kinds of point have it.
    same: its value where nothing differs (NaN if it has none). scale: 'log', 'linear' or 'signed', how to draw it."""

    unit: str
    says: str
    kinds: tuple[str, ...]
    same: float = 0.0
    scale: str = "log"


# Logits may be kept with the sums of a state beside their own.
_BOTH, _STATE, _DISCRETE, _LOGITS = ("state", "logits"), ("state",), ("discrete",), ("logits",)

METRICS: dict[str, Metric] = {
    "rel_l2": Metric("", "relative L2: |arm − reference| / |reference| over all rows of the region", _BOTH),
    "rel_max": Metric("", "largest relative L2 of a single row", _BOTH),
    "cosine": Metric("", "cosine distance, 1 − cos; blind to scale, read with norm_ratio", _STATE),
    "norm_ratio": Metric("", "|arm| / |reference|", _STATE, 1.0, "linear"),
    "max_abs": Metric("", "largest absolute difference of an element", _BOTH),
    "share_over": Metric("", "share of elements that differ by more than the tolerance", _STATE, 0.0, "linear"),
    "nonfinite": Metric("elements", "elements that are not finite, and not in the same way, on the two sides", _BOTH),
    "changed": Metric("", "share of rows whose set of choices differs", _DISCRETE, 0.0, "linear"),
    "jaccard": Metric("", "Jaccard distance of the sets of choices, mean over rows", _DISCRETE, 0.0, "linear"),
    "flips": Metric("rows", "rows whose set changed with a margin inside the floor", _DISCRETE, 0.0, "linear"),
    "min_margin": Metric("score", "smallest margin of the reference among changed rows", _DISCRETE, float("nan")),
    "margin_noise": Metric("score", "largest change of the margin itself", _DISCRETE),
    "kl": Metric("nats", "KL(reference‖arm), mean over rows", _LOGITS),
    "kl_max": Metric("nats", "KL(reference‖arm), largest row", _LOGITS),
    "kl_rev": Metric("nats", "KL(arm‖reference), mean over rows", _LOGITS),
    "kl_rev_max": Metric("nats", "KL(arm‖reference), largest row", _LOGITS),
    "js": Metric("nats", "Jensen–Shannon divergence, mean over rows; at most ln 2", _LOGITS),
    "js_max": Metric("nats", "Jensen–Shannon divergence, largest row", _LOGITS),
    "dlogp": Metric("nats", "change of the log-probability of the token that follows, mean; below 0 the arm is worse",
                    _LOGITS, 0.0, "signed"),
    "dlogp_max": Metric("nats", "largest absolute change of the log-probability of the token that follows", _LOGITS),
    "top1": Metric("", "share of rows whose most likely token differs", _LOGITS, 0.0, "linear"),
    "overlap": Metric("", "top-k tokens in common as a share of k, mean over rows", _LOGITS, 1.0, "linear"),
    "min_flip_margin": Metric("logits", "smallest top-2 gap of the reference among top-1 flips", _LOGITS, float("nan")),
}  # fmt: skip


def metric(table: Table | RowTable, name: str) -> ndarray:
    """A metric from a table's sums: [run, layer, bucket], or [layer, row] of a RowTable; float64.

    NaN where nothing was compared (n = 0) and where the metric has no value (cosine against a zero vector, a margin
    without a change); `n` tells the two apart. Raises UsageError if the table does not hold such a metric.
    """
    valid = metrics_of(table)
    choose("metric", name, valid)
    arrays = table.arrays
    value = np.asarray(_FORMULAS[name](arrays), np.float64)
    return np.where(_n(arrays) == 0, np.nan, value)


def metrics_of(table: Table | RowTable) -> list[str]:
    """Names of the metrics that a table can give."""
    kind = table.kind if isinstance(table, Table) else kind_of_rows(table)
    return [name for name, m in METRICS.items() if kind in m.kinds and _needs(name, table.arrays)]


def kind_of_rows(table: RowTable) -> str:
    """'state', 'discrete' or 'logits', by the sums that are there."""
    if "kl_sum" in table.arrays:
        return "logits"
    return "discrete" if "changed" in table.arrays else "state"


def _n(a: Arrays) -> ndarray:
    """Rows compared; a row table may leave it out, since each of its rows was."""
    return a["n"] if "n" in a else np.ones_like(next(iter(a.values())), np.int64)


def _per(a: Arrays, name: str) -> ndarray:
    """Mean over the rows compared. dlogp is known only for rows with a next token: `n_next`, where it is kept."""
    n = a["n_next"] if name.startswith("dlogp") and "n_next" in a else _n(a)
    with np.errstate(divide="ignore", invalid="ignore"):
        return a[name] / n


def _rel_l2(a: Arrays) -> ndarray:
    return relative_l2(a["diff2"], a["ref2"], _n(a), a.get("nonfinite", 0))


def _rel_max(a: Arrays) -> ndarray:
    if "rel_max" not in a:
        return _rel_l2(a)
    return np.where(a.get("nonfinite", np.int64(0)) > 0, np.inf, a["rel_max"])


def _cosine(a: Arrays) -> ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.clip(1.0 - a["dot"] / (np.sqrt(a["ref2"]) * np.sqrt(a["arm2"])), 0.0, 2.0)
    # Over a sum that overflowed every number is 0, which would tell of a right angle.
    distance = np.where(np.isinf(a["ref2"]) | np.isinf(a["arm2"]), np.nan, distance)
    distance = np.where(a["diff2"] == 0, 0.0, distance)
    return np.where(a.get("nonfinite", np.int64(0)) > 0, np.nan, distance)


def _norm_ratio(a: Arrays) -> ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(a["arm2"]) / np.sqrt(a["ref2"])
    ratio = np.where(np.isinf(a["ref2"]), np.nan, ratio)
    same = (a["arm2"] == 0) & (a["ref2"] == 0) | np.isinf(a["ref2"]) & (a.get("diff2", np.nan) == np.float64(0))
    return np.where(same, 1.0, ratio)


def _max_abs(a: Arrays) -> ndarray:
    return np.where(a.get("nonfinite", np.int64(0)) > 0, np.inf, a["max_abs"])


def _share_over(a: Arrays) -> ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a["over"] + a.get("nonfinite", np.int64(0))) / a["elements"]


_FORMULAS: dict[str, Callable[[Arrays], ndarray]] = {
    "rel_l2": _rel_l2,
    "rel_max": _rel_max,
    "cosine": _cosine,
    "norm_ratio": _norm_ratio,
    "max_abs": _max_abs,
    "share_over": _share_over,
    "nonfinite": lambda a: a["nonfinite"],
    "changed": lambda a: _per(a, "changed"),
    "jaccard": lambda a: np.clip(1.0 - _per(a, "jaccard"), 0.0, 1.0),
    "flips": lambda a: a["flips"],
    "min_margin": lambda a: a["min_margin"],
    "margin_noise": lambda a: a["margin_noise"],
    "kl": lambda a: _per(a, "kl_sum"),
    "kl_max": lambda a: a["kl_max"],
    "kl_rev": lambda a: _per(a, "kl_rev_sum"),
    "kl_rev_max": lambda a: a["kl_rev_max"],
    "js": lambda a: _per(a, "js_sum"),
    "js_max": lambda a: a["js_max"],
    "dlogp": lambda a: _per(a, "dlogp_sum"),
    "dlogp_max": lambda a: a["dlogp_max"],
    "top1": lambda a: _per(a, "flips"),
    "overlap": lambda a: _per(a, "overlap"),
    "min_flip_margin": lambda a: a["min_flip_margin"],
}


class _Asked(dict):
    """Stands in for a table's arrays to learn which of them a formula reads."""

    def __getitem__(self, name: str) -> ndarray:
        self.setdefault(name, np.ones(1))
        return super().__getitem__(name)


def _needs(name: str, arrays: Arrays) -> bool:
    asked = _Asked(n=np.ones(1))
    _FORMULAS[name](asked)
    return set(asked) - {"n"} <= set(arrays)


@np.errstate(over="ignore", invalid="ignore")
def state_sums(a: ndarray, r: ndarray, tol_abs: float = TOL_ABS, tol_rel: float = TOL_REL) -> dict[str, ndarray]:
    """Per-row sums of an arm against the reference; a, r: [row, …] numbers -> each [row].

    elements: numbers compared. diff2 Σ(a-r)², ref2 Σr², arm2 Σa², dot Σa·r, float64, over pairs finite on both sides.
    max_abs, max_col: largest abs difference of those pairs and its flat channel, -1 if none differs.
    over: those pairs with |a-r| > tol_abs + tol_rel·|r|. nonfinite: pairs with a non-finite side, unless both are the
    same infinity or both NaN. bad: non-finite numbers of the arm. What float64 cannot hold is inf, and dot may be NaN.
    """
    a, r = (np.asarray(x, np.float64).reshape(len(x), math.prod(np.shape(x)[1:])) for x in (a, r))
    finite = np.isfinite(a) & np.isfinite(r)
    same = (a == r) | (np.isnan(a) & np.isnan(r))
    bad = ~np.isfinite(a)
    a, r = np.where(finite, a, 0.0), np.where(finite, r, 0.0)
    gap = np.abs(a - r)
    max_abs = gap.max(1, initial=0.0)
    column = gap.argmax(1) if gap.shape[1] else np.zeros(len(gap), np.int64)
    return {
        "elements": np.full(len(a), a.shape[1], np.int64),
        "diff2": (gap * gap).sum(1),
        "ref2": (r * r).sum(1),
        "arm2": (a * a).sum(1),
        "dot": (a * r).sum(1),
        "max_abs": max_abs,
        "max_col": np.where(max_abs == 0, -1, column),
        "over": (gap > tol_abs + tol_rel * np.abs(r)).sum(1),
        "nonfinite": (~finite & ~same).sum(1),
        "bad": bad.sum(1),
    }


@np.errstate(over="ignore", invalid="ignore")
def logits_sums(arm: ndarray, ref: ndarray, next_ids: ndarray, k: int = 5) -> dict[str, ndarray]:
    """Per-row divergence of logits; arm, ref: [row, vocabulary], next_ids: [row] the token that follows, -1 for none.

    kl KL(ref‖arm), kl_rev KL(arm‖ref), js: nats. flip: 1 where the most likely token differs; margin: top-2 gap of the
    reference's logits. overlap: share of the top k in common, tied tokens counting for each other. dlogp: log p of the
    next token, arm minus reference, NaN where there is none. A token of probability 0 on the left of a KL adds 0, one
    of probability 0 on the right only makes it inf; a row that is nowhere finite gives NaN.
    """
    arm, ref, next_ids = np.asarray(arm, np.float64), np.asarray(ref, np.float64), np.asarray(next_ids, np.int64)
    p, q = _log_softmax(ref), _log_softmax(arm)
    token = np.maximum(next_ids, 0)[:, None]
    # Where both agree the mean is that very number, so that equal rows have distance 0 to the last bit.
    half = np.where(p == q, p, np.logaddexp(p, q) - np.log(2.0))
    dlogp = (np.take_along_axis(q, token, 1) - np.take_along_axis(p, token, 1))[:, 0]
    order = np.sort(ref, 1)
    return {
        "kl": _kl(p, q),
        "kl_rev": _kl(q, p),
        "js": (_kl(p, half) + _kl(q, half)) / 2,
        "flip": (arm.argmax(1) != ref.argmax(1)).astype(np.int64),
        "margin": order[:, -1] - order[:, -min(2, ref.shape[1])],
        "overlap": _overlap(arm, ref, min(k, ref.shape[1])),
        "dlogp": np.where(next_ids < 0, np.nan, dlogp),
    }


def _log_softmax(x: ndarray) -> ndarray:
    shifted = x - x.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _kl(p: ndarray, q: ndarray) -> ndarray:
    """Σ exp(p)·(p − q) over log-probabilities [row, vocabulary]; rounding may not push it below 0."""
    share = np.exp(p)
    term = np.where(share == 0, 0.0, share * (p - q))
    return np.maximum(term.sum(1), 0.0)


def _overlap(arm: ndarray, ref: ndarray, k: int) -> ndarray:
    top_arm = arm >= np.sort(arm, 1)[:, -k, None]
    top_ref = ref >= np.sort(ref, 1)[:, -k, None]
    return np.minimum((top_arm & top_ref).sum(1), k) / k
