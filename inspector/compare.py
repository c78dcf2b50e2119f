"""Raw states of two traces set against each other, row by row at the same position of the same prompt.

The first trace is the reference, the second the arm. Nothing here runs a model.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from replayscope.inspector.errors import CompareError, UsageError
from replayscope.inspector.metrics import METRICS, logits_sums, metric, metrics_of, state_sums
from replayscope.inspector.options import Result
from replayscope.inspector.pairing import pairs_of, same_model, states_by_run
from replayscope.inspector.points import expand_points
from replayscope.inspector.specs import Tolerance
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import DISCRETE_POINTS, RunInfo, State, Table, natural_key, relative_l2

_HEADLINES = {"state": "rel_l2", "discrete": "changed", "logits": "rel_l2"}
_TOP_K = 5


@dataclass(frozen=True)
class Worst:
    """The element that differs most: absolute position, channel (index in each further axis), and both values."""

    position: int
    channel: tuple[int, ...]
    first: float
    second: float


@dataclass(frozen=True)
class Row:
    """One hook point of one pair of runs.

    n: positions compared; left_out: positions that only one side holds. metrics: name -> value, see METRICS; for
    states also max_rel over elements whose reference is not zero, and zero_reference, the number of the others.
    worst: None if nothing differs. passed: None where no tolerance names the point. tightest: the smallest tolerances
    that would pass, such as 'rel_l2<=3.2e-04'; None where no number would.
    """

    name: str
    first: str
    second: str
    n: int
    left_out: int
    metrics: dict[str, float]
    worst: Worst | None
    passed: bool | None
    tightest: str | None


@dataclass(frozen=True)
class Comparison:
    """rows: by run and by the order in which a token meets the points. notes: what was not compared, and why."""

    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """No row is over a tolerance."""
        return all(row.passed is not False for row in self.rows)


def compare(first: Path, second: Path, *, tolerances: Sequence[Tolerance] = (), cross_arm: bool = False) -> Result:
    """The `compare` command: a table, its JSON, and exit code 1 if a tolerance is exceeded."""
    found = comparison(TraceReader(first), TraceReader(second), tolerances=tolerances, cross_arm=cross_arm)
    rows = [_plain(asdict(row)) for row in found.rows]
    json = {"passed": found.passed, "rows": rows, "notes": found.notes}
    return Result("\n".join(_lines(found)), json, 0 if found.passed else 1)


def comparison(
    first: TraceReader, second: TraceReader, *, tolerances: Sequence[Tolerance] = (), cross_arm: bool = False
) -> Comparison:
    """Compare every state that both traces hold for runs of the same arm, cut, replay length and semantics.

    cross_arm pairs what is left over as well, if each trace has one such run. Raises CompareError naming the field if
    prompts, configs or windows differ or no runs belong together, and UsageError if a tolerance names no compared
    point or a metric that none of its points has.
    """
    same_model(first, second)
    pairs, notes = pairs_of(first, second, cross_arm)
    notes += [
        f"{name} is {first.provenance.get(name)} in the first, {second.provenance.get(name)} in the second"
        for name in ("dtype", "weights_sha256")
        if first.provenance.get(name) != second.provenance.get(name)
    ]
    held = states_by_run(first), states_by_run(second)
    todo: list[tuple[RunInfo, RunInfo, str]] = []
    for a, b in pairs:
        here, there = held[0][a.index], held[1][b.index]
        todo += [(a, b, name) for name in sorted(here & there, key=natural_key)]
        if odd := sorted(here ^ there, key=natural_key):
            notes.append(f"{a.label}: held by one trace only: {', '.join(odd[:6])}{' …' if len(odd) > 6 else ''}")
    if not todo:
        raise CompareError(f"{first.path} and {second.path} hold no raw state in common; record both with --hooks")
    limits = _limits(tolerances, sorted({name for _, _, name in todo}, key=natural_key))
    rows = [_row(first.state(a.index, n), second.state(b.index, n), n, a, b, first, limits[n]) for a, b, n in todo]
    _every_metric_used(tolerances, limits, rows)
    return Comparison(rows, notes)


def element_errors(arm: ndarray, ref: ndarray) -> dict[str, float]:
    """max_rel: largest |arm − ref| / |ref| over elements whose reference is not zero; zero_reference: elements that
    are zero in the reference and not in the arm, and zero_max_abs the largest of them. Over finite pairs."""
    arm, ref = np.asarray(arm, np.float64), np.asarray(ref, np.float64)
    finite = np.isfinite(arm) & np.isfinite(ref)
    counted, zero = finite & (ref != 0), finite & (ref == 0) & (arm != 0)
    relative = np.abs(arm[counted] - ref[counted]) / np.abs(ref[counted])
    return {
        "max_rel": float(relative.max(initial=0.0)),
        "zero_reference": int(zero.sum()),
        "zero_max_abs": float(np.abs(arm[zero]).max(initial=0.0)),
    }


def _limits(tolerances: Sequence[Tolerance], names: Sequence[str]) -> dict[str, list[Tolerance]]:
    """Tolerances of every name. Raises UsageError with the valid names if one matches none."""
    limits: dict[str, list[Tolerance]] = {name: [] for name in names}
    for tolerance in tolerances:
        for name in expand_points([tolerance.glob], names):
            limits[name].append(tolerance)
    return limits


def _every_metric_used(
    tolerances: Sequence[Tolerance], limits: dict[str, list[Tolerance]], rows: Sequence[Row]
) -> None:
    for tolerance in tolerances:
        known = [row.metrics for row in rows if tolerance in limits[row.name]]
        if not any(tolerance.metric in metrics for metrics in known):
            have = ", ".join(name for name in known[0] if name in METRICS)
            raise UsageError(f"no point of {tolerance.glob!r} has {tolerance.metric}; they have {have}")


def _row(
    ref: State, arm: State, name: str, a: RunInfo, b: RunInfo, trace: TraceReader, limits: Sequence[Tolerance]
) -> Row:
    if ref.values.shape[1:] != arm.values.shape[1:]:
        shapes = f"{list(ref.values.shape[1:])} in the first, {list(arm.values.shape[1:])} in the second"
        raise CompareError(f"{a.label}: a row of {name} is {shapes}")
    position, left, right = np.intersect1d(ref.positions, arm.positions, return_indices=True)
    left_out = len(ref.positions) + len(arm.positions) - 2 * len(position)
    r, x = ref.values[left], arm.values[right]
    table, worst = _sums(name, x, r, position, trace)
    metrics = {key: float(metric(table, key)[0, 0, 0]) for key in metrics_of(table)}
    if table.kind != "discrete":
        metrics |= element_errors(x, r)
    # A metric that has no value for this point, or no rows to take it from, cannot pass.
    judged = [t for t in limits if t.metric in metrics]
    passed = all(_distance(metrics, t.metric) <= t.limit for t in judged) if judged else None
    shown = list(dict.fromkeys(t.metric for t in judged)) or [_HEADLINES[table.kind]]
    tightest = [_tightest(key, _distance(metrics, key)) for key in shown]
    return Row(
        name, a.label, b.label, len(position), left_out, metrics, worst, passed,
        None if None in tightest else ", ".join(map(str, tightest)),
    )  # fmt: skip


def _sums(name: str, arm: ndarray, ref: ndarray, position: ndarray, trace: TraceReader) -> tuple[Table, Worst | None]:
    """A table of one cell, and the worst element."""
    point = name.rsplit(".", 1)[-1]
    if point in DISCRETE_POINTS or ref.dtype.kind in "iu":
        return _choices(arm.reshape(len(arm), -1), ref.reshape(len(ref), -1), position)
    rows = state_sums(arm, ref)
    cell = {key: rows[key].sum() for key in ("elements", "diff2", "ref2", "arm2", "dot", "over", "nonfinite")}
    cell["max_abs"] = rows["max_abs"].max(initial=0.0)
    cell["rel_max"] = relative_l2(rows["diff2"], rows["ref2"], 1, rows["nonfinite"]).max(initial=0.0)
    kind = "state"
    if point == "logits" and arm.ndim == 2:
        kind = "logits"
        ids = trace.tokens.ids
        following = np.array([ids[p + 1] if p + 1 < len(ids) else -1 for p in position], np.int64)
        cell |= _logits_cell(logits_sums(arm, ref, following, _TOP_K))
    worst = None
    odd = np.flatnonzero(rows["nonfinite"])
    if len(odd) or cell["max_abs"] > 0:
        row = int(odd[0] if len(odd) else rows["max_abs"].argmax())
        worst = _worst(arm[row], ref[row], int(position[row]))
    return _cell(kind, len(position), cell), worst


def _worst(arm: ndarray, ref: ndarray, position: int) -> Worst:
    """Of one row: an element that is finite on one side only, else the largest difference."""
    a, r = np.asarray(arm, np.float64), np.asarray(ref, np.float64)
    same = (a == r) | (np.isnan(a) & np.isnan(r))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.nan_to_num(np.abs(a - r), nan=np.inf))
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    return Worst(position, tuple(map(int, at)), float(r[at]), float(a[at]))


def _choices(arm: ndarray, ref: ndarray, position: ndarray) -> tuple[Table, Worst | None]:
    """Rows of ids compared as sets; -1 stands for none."""
    changed = np.flatnonzero((np.sort(arm, 1) != np.sort(ref, 1)).any(1))
    jaccard = float(len(position) - len(changed))
    for row in changed:
        a, r = set(arm[row].tolist()) - {-1}, set(ref[row].tolist()) - {-1}
        jaccard += len(a & r) / len(a | r) if a | r else 1.0
    worst = None
    if len(changed):
        row = int(changed[0])
        a, r = np.sort(arm[row]), np.sort(ref[row])
        at = int((a != r).argmax())
        worst = Worst(int(position[row]), (at,), float(r[at]), float(a[at]))
    return _cell("discrete", len(position), {"changed": len(changed), "jaccard": jaccard}), worst


def _logits_cell(rows: dict[str, ndarray]) -> dict[str, float]:
    known = ~np.isnan(rows["dlogp"])
    cell = {"flips": rows["flip"].sum(), "overlap": rows["overlap"].sum(), "n_next": known.sum()}
    for key in ("kl", "kl_rev", "js", "dlogp"):
        values = rows[key][known] if key == "dlogp" else rows[key]
        cell |= {f"{key}_sum": values.sum(), f"{key}_max": np.abs(values).max(initial=0.0)}
    return cell


def _cell(kind: str, n: int, values: dict[str, Any]) -> Table:
    return Table(kind, ("all",), {key: np.array([[[v]]]) for key, v in (values | {"n": n}).items()})


def _distance(metrics: dict[str, float], name: str) -> float:
    """How far a metric is from the value it has where nothing differs; inf where it has none."""
    gap = abs(metrics[name] - METRICS[name].same)
    return math.inf if math.isnan(gap) else gap


def _tightest(name: str, value: float) -> str | None:
    """The smallest limit of two digits that the value passes."""
    if not math.isfinite(value):
        return None
    if value == 0:
        return f"{name}<=0"
    # Rounded up on the decimal number itself: twice rounding a float can step over the next limit.
    exact = Decimal(value)
    limit = exact.quantize(Decimal((0, (1,), exact.adjusted() - 1)), ROUND_CEILING)
    return f"{name}<={limit:.1e}"


def _plain(value: Any) -> Any:
    """The same with every number as strict JSON has it: inf as text, NaN as null."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _lines(found: Comparison) -> list[str]:
    head = ("point", "run", "rows", "rel_l2", "max_abs", "worst at", "first", "second", "", "passes at")
    table: list[tuple[str, ...]] = [head]
    for row in found.rows:
        run = row.first if row.first == row.second else f"{row.first} | {row.second}"
        numbers = [f"{row.metrics[key]:.2e}" if key in row.metrics else "–" for key in ("rel_l2", "max_abs")]
        worst = ("identical", "", "")
        if row.worst:
            channel = ",".join(map(str, row.worst.channel))
            worst = (f"{row.worst.position}[{channel}]", f"{row.worst.first:.6g}", f"{row.worst.second:.6g}")
        state = {True: "ok", False: "OVER", None: ""}[row.passed]
        table.append((row.name, run, str(row.n), *numbers, *worst, state, row.tightest or "–"))
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return lines + [f"note: {note}" for note in found.notes]
