"""Which class a divergence belongs to: the noise floor, the bound above which an error is a bug, what flips excuse.

Everything is computed from the trace alone. Definitions stand in docs/numerics.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy import ndarray

from replayscope.inspector.metrics import metric
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import POINTS, SINGLE_POINTS, Table

CLASSES = ("absent", "identical", "bug", "noise", "flip", "design")
NOISE_ARMS = ("repeat", "rechunk", "hit")


@dataclass(frozen=True)
class Rules:
    """What makes a verdict, so that another one can be made from the same trace.

    bounds: dtype -> relative error up to which two runs are equal whatever the floor: products of other shapes sum in
    other orders. kl_bounds: the same in nats, for logits that were kept without their sums; KL grows with the square of
    an error of the logits, which are of the order of ten, and in fp64 it is itself rounded at about 1e-15.
    floors: how many measured floors an error may reach.
    """

    bounds: Mapping[str, float] = field(default_factory=lambda: {"float64": 1e-12, "float32": 1e-5})
    kl_bounds: Mapping[str, float] = field(default_factory=lambda: {"float64": 1e-13, "float32": 1e-8})
    floors: float = 10.0


RULES = Rules()
_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}


def dtype_of(trace: TraceReader) -> str:
    """'float64', 'float32' or 'bfloat16'."""
    name = str(trace.provenance.get("dtype", "")).removeprefix("torch.")
    return _NAMES.get(name, name)


def asserted(trace: TraceReader) -> bool:
    """Whether an error above the bound can be nothing but a bug: fp64, or fp32 with rounding off and choices frozen."""
    dtype = dtype_of(trace)
    return dtype == "float64" or (dtype == "float32" and bool(trace.provenance.get("audit")))


def headline(table: Table) -> str:
    """The metric that decides the class of a cell."""
    if table.kind == "discrete":
        return "changed"
    return "rel_l2" if "diff2" in table.arrays else "kl_max"


def _of_rows(table: Table) -> str:
    """The headline of single rows, which a dilution over many rows cannot hide."""
    name = headline(table)
    return "rel_max" if name == "rel_l2" and "rel_max" in table.arrays else name


def floor(trace: TraceReader, point: str, name: str = "rel_l2", rules: Rules = RULES) -> ndarray:
    """Noise floor that each run is held against: [run, layer], NaN where no noise run measured it.

    The largest value among repeat, rechunk and the hits at the run's cut, over all their rows. For rel_l2 it is that of
    a single row, which no region can exceed; for norm_ratio it is |ratio − 1|. A hit that is a bug itself is left out.
    """
    value = _worst(*_against_full(trace, point), name)
    always, hits = _noise(trace, value)
    return np.fmax(always, np.where(_wrong_hits(trace, point, rules), np.nan, hits))


def region_floor(trace: TraceReader, point: str, name: str = "rel_l2", rules: Rules = RULES) -> ndarray:
    """Noise floor in the same region and metric: [run, layer, bucket]; what a cell must exceed to be more than noise.

    The largest value among repeat, rechunk and hit, each looked at from the run's own cut; where none of them has a row
    in the region, over all their rows. Where noise runs were not looked at from each cut, ``floor`` stands in.
    """
    table, measured = _against_full(trace, point)
    coarse = floor(trace, point, name, rules)[:, :, None]
    out = np.broadcast_to(coarse, table.arrays["n"].shape).copy()
    seen = {run.cut for run in trace.runs if run.arm in ("repeat", "rechunk") and run.cut is not None}
    if not measured or not seen:
        return out
    value = metric(table, name)
    value = np.abs(value - 1.0) if name == "norm_ratio" else np.abs(value)
    wrong = _wrong_hits(trace, point, rules)
    for cut in seen:
        noise = [run.index for run in trace.runs if run.cut == cut and run.arm in NOISE_ARMS]
        arms = [run.index for run in trace.runs if run.cut == cut]
        usable = np.array([trace.runs[i].arm != "hit" or not wrong[i].any() for i in noise])
        worst = np.fmax.reduce(value[np.array(noise)[usable]], axis=0)
        out[arms] = np.where(np.isnan(worst), worst[:, table.bucket("all"), None], worst)
    return out


def bound(trace: TraceReader, point: str, rules: Rules = RULES) -> ndarray:
    """Largest error, in the headline metric, that is no bug: [run, layer]; inf where this precision allows no claim."""
    table, _ = _against_full(trace, point)
    base = _base(trace, table, rules)
    if base is None:
        return np.full(table.arrays["n"].shape[:2], np.inf)
    limits = floor(trace, point, headline(table), rules)
    return np.fmax(base, rules.floors * np.nan_to_num(limits))


def downstream(trace: TraceReader, reference: str, point: str, bucket: str = "all") -> ndarray:
    """Whether a discrete choice flipped before this point, in the rows of a bucket: bool [run, layer].

    A flip of top-k reaches attn_out and what follows in its own layer, one of the router ffn_out and what follows;
    both reach everything in the layers after it. Against the oracle a run also stands behind the flips of the pass
    whose cache it goes on from, in rows of which it has none itself.
    """
    depth = trace.table(reference, point).arrays["n"].shape[1]
    here = np.zeros((len(trace.runs), depth), bool)
    if point == "embed":
        return here
    for choice in ("topk", "router"):
        if choice not in trace.points(reference):
            continue
        table = trace.table(reference, choice)
        flips = table.arrays["flips"][:, :, table.bucket(bucket)] > 0
        if reference == "oracle":
            flips |= _inherited(trace, table)
        before = np.logical_or.accumulate(flips, 1)
        if point in SINGLE_POINTS:
            here |= before[:, -1:]
            continue
        here[:, 1:] |= before[:, :-1]
        if POINTS.index(point) > POINTS.index(choice):
            here |= flips
    return here


def _inherited(trace: TraceReader, table: Table) -> ndarray:
    """Whether a choice flipped in the pass that a run goes on from: bool [run, layer]. That is ``full``, or the whole
    pass of which a noise run at a cut is a part."""
    flips = table.arrays["flips"][:, :, table.bucket("all")] > 0
    whole = {run.arm: flips[run.index] for run in trace.runs if run.cut is None}
    nothing = np.zeros(flips.shape[1], bool)
    sources = (run.arm if run.arm in ("repeat", "rechunk") else "full" for run in trace.runs)
    return np.array([whole.get(source, nothing) for source in sources]).reshape(flips.shape)


def bugs(trace: TraceReader, reference: str, point: str, rules: Rules = RULES) -> ndarray:
    """Cells above the bound and not behind a flip: bool [run, layer, bucket].

    Against full only the exact region can be one, and only flips of rows inside it excuse: it depends on no others.
    A choice that differs from the oracle's is one where more rows changed than flipped.
    """
    table = trace.table(reference, point)
    if table.kind == "discrete":
        claim = reference == "oracle" and dtype_of(trace) in rules.bounds
        wrong = (table.arrays["changed"] > table.arrays["flips"]) & claim
    else:
        value = metric(table, _of_rows(table))
        # A row of logits without a finite number has no divergence; it is not equal either.
        value = np.where(np.isnan(value) & (table.arrays["n"] > 0), np.inf, value)
        wrong = value > bound(trace, point, rules)[:, :, None]
    if reference == "full":
        wrong[:, :, [i for i, bucket in enumerate(table.buckets) if bucket != "exact"]] = False
        # These two are the measure of the noise; nothing here can convict them.
        wrong[[run.index for run in trace.runs if run.arm in ("repeat", "rechunk")]] = False
    excused = downstream(trace, reference, point, "exact" if reference == "full" else "all")
    return wrong & ~excused[:, :, None]


def classify(trace: TraceReader, reference: str, point: str, rules: Rules = RULES) -> ndarray:
    """Class of every cell, one of CLASSES: str [run, layer, bucket].

    Against an oracle nothing differs by design: what is neither identical, bug nor flip lies under the bound of a bug
    and is noise, and in a precision that allows no claim it counts as a flip of rounding.
    """
    table = trace.table(reference, point)
    absent, identical = table.arrays["n"] == 0, _identical(table)
    result = np.full(absent.shape, "design", dtype="U9")
    if table.kind == "discrete":
        flip = table.arrays["changed"] == table.arrays["flips"] if reference == "full" else np.ones_like(absent)
        noise = np.zeros_like(absent)
    else:
        name = headline(table)
        limit = region_floor(trace, point, name, rules)
        if name == "rel_l2":
            # Where no noise run happens to differ, products of other shapes may: a tenth of the bound's fixed part.
            limit = np.where(np.isnan(limit), limit, np.maximum(limit, rules.bounds.get(dtype_of(trace), 0.0) / 10))
        noise = np.nan_to_num(metric(table, name), nan=np.inf) <= np.nan_to_num(limit, nan=-1.0)
        flip = np.broadcast_to(downstream(trace, reference, point)[:, :, None], absent.shape)
        if reference == "oracle":
            result[:] = "noise" if dtype_of(trace) in rules.bounds else "flip"
    chosen = (flip, noise, bugs(trace, reference, point, rules), identical, absent)
    for cells, name in zip(chosen, ("flip", "noise", "bug", "identical", "absent"), strict=True):
        result[cells] = name
    return result


def _identical(table: Table) -> ndarray:
    arrays = table.arrays
    if table.kind == "discrete":
        return arrays["changed"] == 0
    if "diff2" in arrays:
        return (arrays["diff2"] == 0) & (arrays["nonfinite"] == 0)
    return (arrays["kl_max"] == 0) & (arrays["kl_rev_max"] == 0) & (arrays["flips"] == 0)


def _base(trace: TraceReader, table: Table, rules: Rules) -> float | None:
    if table.kind == "discrete":
        return None
    return (rules.kl_bounds if headline(table) == "kl_max" else rules.bounds).get(dtype_of(trace))


def _against_full(trace: TraceReader, point: str) -> tuple[Table, bool]:
    """The table against full, and True; or, for a point compared with the oracle only, that table and False."""
    measured = "full" in trace.references() and point in trace.points("full")
    return trace.table("full" if measured else "oracle", point), measured


def _worst(table: Table, measured: bool, name: str) -> ndarray:
    """Largest value over all rows: [run, layer]; NaN where it was not measured."""
    if not measured:
        return np.full(table.arrays["n"].shape[:2], np.nan)
    if name == "rel_l2":
        name = _of_rows(table)
    value = metric(table, name)[:, :, table.bucket("all")]
    return np.abs(value - 1.0) if name == "norm_ratio" else np.abs(value)


def _noise(trace: TraceReader, value: ndarray) -> tuple[ndarray, ndarray]:
    """Largest value among repeat and rechunk: [layer]; and among the hits at each run's cut: [run, layer]."""
    runs = trace.runs
    always = _largest(value, [run.index for run in runs if run.arm in ("repeat", "rechunk")])
    hits: dict[int | None, list[int]] = {}
    for run in runs:
        if run.arm == "hit":
            hits.setdefault(run.cut, []).append(run.index)
    return always, np.array([_largest(value, hits.get(run.cut, [])) for run in runs]).reshape(value.shape)


def _wrong_hits(trace: TraceReader, point: str, rules: Rules) -> ndarray:
    """Where the hits at a run's cut are too far from full to be noise: bool [run, layer]. Without this a broken hit
    would raise the floor of its cut until nothing there could be a bug."""
    table, measured = _against_full(trace, point)
    base = _base(trace, table, rules)
    if base is None or not asserted(trace):
        return np.zeros(table.arrays["n"].shape[:2], bool)
    always, hits = _noise(trace, _worst(table, measured, headline(table)))
    return hits > np.fmax(base, rules.floors * np.nan_to_num(always))


def _largest(value: ndarray, runs: list[int]) -> ndarray:
    if not runs:
        return np.full(value.shape[1], np.nan)
    return np.fmax.reduce(value[runs], axis=0)
