"""The first cell over its threshold, by layer and then by position; nothing behind it is read."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayscope.inspector.layer_kinds import kind_beside
from replayscope.inspector.metrics import METRICS, metric
from replayscope.inspector.rowwise import Worst, worst_of
from replayscope.traces.schema import RunInfo, State, Table, natural_key

Pair = tuple[RunInfo, RunInfo, str]


@dataclass(frozen=True)
class First:
    """A row at one hook point that exceeds a limit.

    position: absolute, in tokens; entry: number of the global entry that begins there, None for rows. value: of
    `metric`, as its distance from where nothing differs. worst: the element of the row that differs most.
    rows, points: what was compared, this row's layer included.
    """

    name: str
    first: str
    second: str
    position: int
    entry: int | None
    metric: str
    value: float
    limit: float
    worst: Worst | None
    rows: int
    points: int


def find(
    pairs: Sequence[Pair],
    load: Callable[[Pair], tuple[State, State, Table]],
    limits: Callable[[str, Table], Mapping[str, float]],
    ratios: Sequence[int],
) -> tuple[First | None, int, int, list[Pair]]:
    """The first cell over a limit, or None; the rows and hook points that were compared until then, and those with a
    limit of which the two sides hold no row in common.

    load: both states at their common positions, and their table with a bucket per row. limits: of a hook point, metric
    -> largest distance that a row may have; a hook point without any is not judged. ratios: per layer, rows that a
    global entry covers. Of rows at the same position, the one that a token meets first comes first.
    """
    rows = points = 0
    empty: list[Pair] = []
    in_order = sorted(pairs, key=lambda pair: natural_key(pair[2]))
    for _, layer in itertools.groupby(in_order, key=lambda pair: natural_key(pair[2])[0]):
        found: list[First] = []
        for pair in layer:
            ref, arm, table = load(pair)
            judged = limits(pair[2], table)
            if not len(ref.positions):
                # No row is over a limit, and none is within it either.
                empty += [pair] if judged else []
                continue
            rows, points = rows + len(ref.positions), points + 1
            if over := _first_row(pair, ref, arm, table, judged, ratios):
                found.append(over)
        if found:
            # sorted and min keep the order of hook points and runs at equal positions.
            earliest = min(found, key=lambda cell: cell.position)
            return First(**{**vars(earliest), "rows": rows, "points": points}), rows, points, empty
    return None, rows, points, empty


def _first_row(
    pair: Pair, ref: State, arm: State, table: Table, limits: Mapping[str, float], ratios: Sequence[int]
) -> First | None:
    a, b, name = pair
    best: tuple[int, str, float] | None = None
    for key, limit in limits.items():
        gap = np.abs(metric(table, key)[0, 0] - METRICS[key].same)
        over = np.flatnonzero(np.where(np.isnan(gap), np.inf, gap) > limit)
        if len(over) and (best is None or over[0] < best[0]):
            best = int(over[0]), key, float(gap[over[0]])
    if best is None:
        return None
    row, key, value = best
    number = int(ref.positions[row])
    entry = number if name.rsplit(".", 1)[-1] in ("global_kv", "index_k") else None
    layer = natural_key(name)[0]
    ratio = ratios[layer] if entry is not None and layer < len(ratios) else 1
    only = slice(row, row + 1)
    one = Table(table.kind, ("row",), {k: v[:, :, only] for k, v in table.arrays.items()})
    worst = worst_of(one, arm.values[only], ref.values[only], ref.positions[only])
    return First(
        name, a.label, b.label, number * max(1, ratio), entry, key, value, limits[key], worst, 0, 0
    )  # fmt: skip


def ratios_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows that a global entry of each layer covers, by a recorded config; empty if it does not say."""
    text = config.get("text_config", config)
    ratios = text.get("compress_ratios", ()) if isinstance(text, Mapping) else ()
    return tuple(ratios) if all(isinstance(r, int) for r in ratios) else ()


def told(cell: First, texts: Sequence[str], kinds: Sequence[str] = ()) -> Iterable[str]:
    """Lines that name the cell, its value and both numbers of its worst element. kinds: of the layers, if known."""
    run = cell.first if cell.first == cell.second else f"{cell.first} | {cell.second}"
    where = f"position {cell.position}" if cell.entry is None else f"entry {cell.entry} (position {cell.position})"
    if 0 <= cell.position < len(texts):
        where += f", token {texts[cell.position][:40]!a}"
    yield f"first cell over its threshold: {kind_beside(cell.name, kinds)}, {where}, in {run}"
    value = "has no value, and so is not within" if math.isnan(cell.value) else f"{cell.value:.3e} is over"
    yield f"  {cell.metric} {value} {cell.limit:.3e}"
    if cell.worst:
        channel = ",".join(map(str, cell.worst.channel))
        both = f"{cell.worst.first:.9g} in the first, {cell.worst.second:.9g} in the second"
        yield f"  largest difference at [{channel}]: {both}"
    yield f"  {cell.rows} rows at {cell.points} hook points compared up to this layer; what lies behind it was not read"
