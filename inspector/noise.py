"""A noise floor from a third trace: what two runs that are equal on paper differ by, for each hook point.

The largest value of a metric in any row, so that neither a row nor a region within it can be more than noise.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from replayscope.inspector.classes import NOISE_ARMS, floor
from replayscope.inspector.metrics import METRICS, metrics_of
from replayscope.traces.reader import TraceReader

# Metrics that are means or ratios over rows, and the one that says the same of the worst row.
_OF_WORST_ROW = {"rel_l2": "rel_max", "kl": "kl_max", "kl_rev": "kl_rev_max", "js": "js_max", "dlogp": "dlogp_max"}
# Shares of rows: of a single row, which changed or did not, they say nothing but whether such changes are noise.
_SHARES = ("changed", "jaccard", "top1", "overlap")

# hook point with its layer -> metric -> largest distance from the value where nothing differs
Floors = Mapping[str, Mapping[str, float]]


class _Compared(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> dict[str, float]: ...


def measures_noise(trace: TraceReader) -> bool:
    """Whether the trace holds noise runs that were compared with full."""
    return "full" in trace.references() and any(run.arm in NOISE_ARMS for run in trace.runs)


def measured(trace: TraceReader, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Floors from the tables of the trace's own noise runs; a hook point without such a table is left out."""
    runs = [run.index for run in trace.runs if run.arm in NOISE_ARMS]
    have = trace.points("full")
    found: dict[str, dict[str, float]] = {}
    for name in names:
        point = name.rsplit(".", 1)[-1]
        if point not in have:
            continue
        layer = int(name.split(".")[1]) if "." in name else 0
        for key in metrics_of(trace.table("full", point)):
            limits = floor(trace, point, _OF_WORST_ROW.get(key, key))
            if layer < limits.shape[1] and not np.isnan(limits[runs, layer]).all():
                value = float(np.nanmax(np.abs(limits[runs, layer] - _same_after_floor(key))))
                found.setdefault(name, {})[key] = value
    return found


def between(rows: Iterable[_Compared]) -> dict[str, dict[str, float]]:
    """Floors from two recordings of the same thing that were set against each other."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for key in row.metrics:
            if key not in METRICS:
                continue
            value = distance(row.metrics, _OF_WORST_ROW.get(key, key))
            # A metric without a value is no measure of noise.
            if math.isfinite(value):
                at = found.setdefault(row.name, {})
                at[key] = max(at.get(key, 0.0), value)
    return found


def distance(metrics: Mapping[str, float], name: str) -> float:
    """How far a metric is from the value it has where nothing differs; inf where it has none."""
    gap = abs(metrics[name] - METRICS[name].same)
    return math.inf if math.isnan(gap) else gap


def of_a_row(name: str, value: float) -> float:
    """The floor of a metric as a single row is held against it."""
    return math.inf if name in _SHARES and value > 0 else value


def _same_after_floor(name: str) -> float:
    """`floor` has taken 1 from norm_ratio already."""
    same = METRICS[name].same
    return 0.0 if name == "norm_ratio" or math.isnan(same) else same
