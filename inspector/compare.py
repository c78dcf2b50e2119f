"""Raw states of two traces set against each other, row by row at the same position of the same prompt.

The first trace is the reference, the second the arm. Nothing here runs a model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from replayscope.inspector import noise
from replayscope.inspector.compared import Comparison, Row, lines, listed, plain, tightest_limit
from replayscope.inspector.errors import CompareError, UsageError
from replayscope.inspector.first import Pair, find, ratios_of
from replayscope.inspector.layer_kinds import layer_kinds
from replayscope.inspector.metrics import METRICS, metric, metrics_of
from replayscope.inspector.options import Result
from replayscope.inspector.pairing import pairs_of, provenance_notes, same_model, states_by_run
from replayscope.inspector.points import expand_points
from replayscope.inspector.rowwise import element_errors, fold, row_table, worst_of
from replayscope.inspector.specs import Tolerance
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import State, Table, natural_key

_HEADLINES = {"state": "rel_l2", "discrete": "changed", "logits": "rel_l2"}


def compare(
    first: Path,
    second: Path,
    *,
    tolerances: Sequence[Tolerance] = (),
    cross_arm: bool = False,
    floor: Path | None = None,
    stop_at_first: bool = False,
) -> Result:
    """The `compare` command: a table, or the first cell, its JSON, and exit code 1 if a threshold is exceeded."""
    reference = TraceReader(first)
    found = comparison(
        reference,
        TraceReader(second),
        tolerances=tolerances,
        cross_arm=cross_arm,
        floor=TraceReader(floor) if floor else None,
        stop_at_first=stop_at_first,
    )
    json = {"passed": found.passed, "notes": found.notes}
    if stop_at_first:
        json |= {"first": plain(asdict(found.first)) if found.first else None, "compared": found.compared}
    else:
        json |= {"rows": [plain(asdict(row)) for row in found.rows], "tightest": found.tightest}
    return Result(
        "\n".join(lines(found, reference.tokens.texts, layer_kinds(reference.config))), json, 0 if found.passed else 1
    )


def comparison(
    first: TraceReader,
    second: TraceReader,
    *,
    tolerances: Sequence[Tolerance] = (),
    cross_arm: bool = False,
    floor: TraceReader | None = None,
    stop_at_first: bool = False,
) -> Comparison:
    """Compare every state that both traces hold for runs of the same arm, cut, replay length and semantics.

    cross_arm pairs what is left over as well, if each trace has one such run. floor: a trace with noise runs, or
    another recording of the first; what lies within it passes, and it judges points that no tolerance names.
    stop_at_first: look for the first cell only; without tolerances and floor, the first that differs at all.

    Raises CompareError naming the field if prompts, tokenizers, configs or windows differ or no runs belong together,
    and UsageError if a tolerance names no compared point or a metric that none of its points has, or if the floor
    measures none of the points.
    """
    same_model(first, second)
    pairs, notes = pairs_of(first, second, cross_arm)
    notes += provenance_notes(first.provenance, second.provenance)
    held = states_by_run(first), states_by_run(second)
    todo: list[Pair] = []
    for a, b in pairs:
        here, there = held[0][a.index], held[1][b.index]
        todo += [(a, b, name) for name in sorted(here & there, key=natural_key)]
        if odd := sorted(here ^ there, key=natural_key):
            notes.append(f"{a.label}: held by one trace only: {listed(odd)}")
    if not todo:
        raise CompareError(f"{first.path} and {second.path} hold no raw state in common; record both with --hooks")
    names = sorted({name for _, _, name in todo}, key=natural_key)
    limits = _limits(tolerances, names)
    floors = _floors(first, floor, names)
    if floor and (bare := [name for name in names if name not in floors]):
        notes.append(f"no noise was measured at {listed(bare)}")
    both = _Both(first, second)
    if stop_at_first:
        return _first(both, todo, limits, floors, notes, bare_differs=not tolerances and floor is None)
    rows = [_row(both, pair, limits[pair[2]], floors.get(pair[2], {})) for pair in todo]
    _every_metric_used(tolerances, limits, rows)
    return Comparison(rows, notes)


@dataclass(frozen=True)
class _Both:
    """The two traces: the reference, and what is compared with it."""

    first: TraceReader
    second: TraceReader

    def load(self, pair: Pair) -> tuple[State, State, Table]:
        """Both states at the positions that both hold, and their table with a bucket per row."""
        ref, arm, _ = self.aligned(pair)
        table = row_table(pair[2], arm.values, ref.values, ref.positions, self.first.tokens.ids)
        return ref, arm, table

    def holds(self, pair: Pair) -> bool:
        """Whether a side holds a row. Where neither does nothing is missing: a prompt of one token has no entry."""
        a, b, name = pair
        return len(self.first.positions(a.index, name)) + len(self.second.positions(b.index, name)) > 0

    def aligned(self, pair: Pair) -> tuple[State, State, int]:
        """Both states at common positions, and the number of positions that only one side holds.

        Raises CompareError if rows differ in shape, or if a side holds a position twice.
        """
        a, b, name = pair
        ref, arm = self.first.state(a.index, name), self.second.state(b.index, name)
        if ref.values.shape[1:] != arm.values.shape[1:]:
            shapes = f"{list(ref.values.shape[1:])} in the first, {list(arm.values.shape[1:])} in the second"
            raise CompareError(f"{a.label}: a row of {name} is {shapes}")
        for where, state in (("first", ref), ("second", arm)):
            if len(np.unique(state.positions)) != len(state.positions):
                raise CompareError(f"{a.label}: {name} holds a position twice in the {where}")
        position, left, right = np.intersect1d(ref.positions, arm.positions, return_indices=True)
        left_out = len(ref.positions) + len(arm.positions) - 2 * len(position)
        r, x = (
            State(position, side.values[at], side.logical_dtype, side.bits[at])
            for side, at in ((ref, left), (arm, right))
        )
        return r, x, left_out


def _first(
    both: _Both,
    todo: Sequence[Pair],
    limits: Mapping[str, Sequence[Tolerance]],
    floors: noise.Floors,
    notes: list[str],
    bare_differs: bool,
) -> Comparison:
    used: set[Tolerance] = set()

    def of_rows(name: str, table: Table) -> dict[str, float]:
        """metric -> largest distance that a row at this hook point may have."""
        known = metrics_of(table)
        used.update(t for t in limits[name] if t.metric in known)
        at = _judged(limits[name], floors.get(name, {}), known, _HEADLINES[table.kind])
        measured = floors.get(name, {})
        found = {key: max(limit, noise.of_a_row(key, measured.get(key, 0.0))) for key, limit in at.items()}
        return {_HEADLINES[table.kind]: 0.0} if bare_differs else found

    cell, rows, points, without = find(todo, both.load, of_rows, ratios_of(both.first.config))
    empty = list(dict.fromkeys(pair[2] for pair in without if both.holds(pair)))
    if cell is None and (idle := [t for names in limits.values() for t in names if t not in used]):
        raise UsageError(f"no point of {idle[0].glob!r} has {idle[0].metric}")
    if empty and bare_differs and rows:
        # Nobody asked for these points by name: as with points that one trace lacks, it is said, and the rest judged.
        notes.append(f"no row in common at {listed(empty)}")
        empty = []
    return Comparison([], notes, cell, (rows, points), tuple(empty))


def _judged(
    tolerances: Sequence[Tolerance], floors: Mapping[str, float], known: Sequence[str], headline: str
) -> dict[str, float]:
    """metric -> largest distance that passes: the tolerance, or the floor where that is larger. The floor alone judges
    by the headline where no tolerance names the point."""
    at: dict[str, float] = {}
    for t in tolerances:
        if t.metric in known:
            at[t.metric] = min(t.limit, at.get(t.metric, math.inf))
    if not tolerances and headline in floors:
        at[headline] = floors[headline]
    return {key: max(limit, floors.get(key, 0.0)) for key, limit in at.items()}


def _floors(first: TraceReader, floor: TraceReader | None, names: Sequence[str]) -> noise.Floors:
    """Floors of the compared points. Raises CompareError if the third trace is of another model or prompt, UsageError
    if it measures none of them."""
    if floor is None:
        return {}
    try:
        same_model(first, floor)
    except CompareError as error:
        raise CompareError(f"{floor.path} is no floor: {error}") from None
    if noise.measures_noise(floor):
        found = noise.measured(floor, names)
    else:
        found = noise.between(comparison(first, floor, cross_arm=True).rows)
    if not any(name in found for name in names):
        raise UsageError(f"{floor.path} measured no noise at the points compared; record repeat and rechunk in it")
    return found


def _limits(tolerances: Sequence[Tolerance], names: Sequence[str]) -> dict[str, list[Tolerance]]:
    """Tolerances of every name. Raises UsageError with the valid names if one matches none."""
    limits: dict[str, list[Tolerance]] = {name: [] for name in names}
    for tolerance in tolerances:
        for name in expand_points([tolerance.glob], names):
            limits[name].append(tolerance)
    return limits


def _every_metric_used(
    tolerances: Sequence[Tolerance], limits: Mapping[str, Sequence[Tolerance]], rows: Sequence[Row]
) -> None:
    for tolerance in tolerances:
        known = [row.metrics for row in rows if tolerance in limits[row.name]]
        if not any(tolerance.metric in metrics for metrics in known):
            have = ", ".join(name for name in known[0] if name in METRICS)
            raise UsageError(f"no point of {tolerance.glob!r} has {tolerance.metric}; they have {have}")


def _row(both: _Both, pair: Pair, tolerances: Sequence[Tolerance], floors: Mapping[str, float]) -> Row:
    a, b, name = pair
    ref, arm, left_out = both.aligned(pair)
    rows = row_table(name, arm.values, ref.values, ref.positions, both.first.tokens.ids)
    table = fold(rows)
    metrics = {key: float(metric(table, key)[0, 0, 0]) for key in metrics_of(table)}
    headline = _HEADLINES[table.kind]
    # A metric that has no value for this point, or no rows to take it from, cannot pass, unless neither side has any.
    judged = _judged(tolerances, floors, list(metrics), headline) if len(ref.positions) or left_out else {}
    passed = all(noise.distance(metrics, key) <= limit for key, limit in judged.items()) if judged else None
    tightest = [tightest_limit(key, noise.distance(metrics, key)) for key in judged or [headline]]
    if table.kind != "discrete":
        metrics |= element_errors(arm.values, ref.values)
    worst = worst_of(rows, arm.values, ref.values, ref.positions)
    return Row(
        name, a.label, b.label, len(ref.positions), left_out, metrics, worst, passed,
        None if None in tightest else ", ".join(map(str, tightest)), floors.get(headline),
    )  # fmt: skip
