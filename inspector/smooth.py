"""How much of an arm's divergence is smooth error, and how much comes from choices that changed."""

from dataclasses import dataclass

import numpy as np

from replayscope.inspector.classes import region_floor
from replayscope.inspector.metrics import metric
from replayscope.traces.reader import TraceReader

# What is asked first: the rebuilt window, and what the suffix then computes.
_WHERE = (("window_kv", "window"), ("hidden", "suffix"))


@dataclass(frozen=True)
class SmoothShare:
    """share: median over cuts and layers of relative L2 with full's choices (``frozen:ARM``) over relative L2 without.

    Cells inside the noise floor say nothing and are left out; cells counts the rest. A share of 1 means that top-k and
    experts add nothing; it may exceed 1, since errors can cancel.
    """

    arm: str
    semantics: str
    point: str
    region: str
    share: float
    cells: int


def smooth_shares(trace: TraceReader) -> list[SmoothShare]:
    """One share per arm that ran both free and frozen, point and region."""
    runs = {(r.arm, r.semantics, r.cut, r.replay): r.index for r in trace.runs}
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for (arm, semantics, cut, replay), free in runs.items():
        frozen = runs.get((f"frozen:{arm}", semantics, cut, replay))
        if frozen is not None:
            pairs.setdefault((arm, semantics), []).append((free, frozen))
    out = []
    for (arm, semantics), both in pairs.items():
        free, frozen = (list(side) for side in zip(*both, strict=True))
        for point, region in _WHERE:
            if point not in trace.points("full"):
                continue
            table = trace.table("full", point)
            at = table.bucket(region)
            value, floor = metric(table, "rel_l2")[:, :, at], region_floor(trace, point)[:, :, at]
            told = np.nan_to_num(value[free], nan=0.0) > np.nan_to_num(floor[free], nan=0.0)
            if told.any():
                share = float(np.median(value[frozen][told] / value[free][told]))
                out.append(SmoothShare(arm, semantics, point, region, share, int(told.sum())))
    return out
