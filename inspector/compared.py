"""What a comparison found: rows or the first cell, the tightest tolerances, its text and its plain JSON data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import Any

from replayscope.inspector.first import First, told
from replayscope.inspector.layer_kinds import kind_beside
from replayscope.inspector.rowwise import Worst


@dataclass(frozen=True)
class Row:
    """One hook point of one pair of runs.

    n: positions compared; left_out: positions that only one side holds. metrics: name -> value, see METRICS; for
    states also max_rel over elements whose reference is not zero, and zero_reference, the number of the others.
    worst: None if nothing differs. passed: None where neither a tolerance nor a floor judges the point, or neither side
    holds a row of it. tightest: the smallest tolerances that would pass, such as 'rel_l2<=3.2e-04'; None where no
    number would. floor: the noise floor of the headline, None if none was given for this point.
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
    floor: float | None = None


@dataclass(frozen=True)
class Comparison:
    """rows: by run and by the order in which a token meets the points. notes: what was not compared, and why.

    With stop_at_first there are no rows: first is the first cell over its threshold, or None; compared is the number of
    rows and of hook points that were looked at; empty the hook points that were to be judged and have no row in common.
    """

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    first: First | None = None
    compared: tuple[int, int] | None = None
    empty: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Something was compared, and nothing is over a tolerance or was to be judged without a row."""
        clear = self.first is None and not self.empty and all(row.passed is not False for row in self.rows)
        return clear and self.rows_compared > 0

    @property
    def rows_compared(self) -> int:
        """Rows that both traces hold and that were set against each other, at all hook points together."""
        return self.compared[0] if self.compared else sum(row.n for row in self.rows)

    @property
    def tightest(self) -> list[str]:
        """Tolerances that would have passed, each the tightest for its hook point in all layers and runs."""
        return _summary(self.rows)


def lines(found: Comparison, texts: Sequence[str], kinds: Sequence[str] = ()) -> list[str]:
    """The table, or the first cell; then what would have passed, and the notes. texts: of the prompt's tokens. kinds:
    of the layers, where they are known."""
    out = list(told(found.first, texts, kinds)) if found.first else []
    if found.compared and found.rows_compared and not found.first:
        out.append("no cell is over its threshold: {} rows at {} hook points compared".format(*found.compared))
    if found.rows:
        out += _table(found.rows, kinds)
    if not found.rows_compared or (found.empty and not found.first):
        what = "nothing was compared, so nothing passes" if not found.rows_compared else "not passed"
        at = f" at {listed(found.empty)}" if found.empty else ""
        out.append(f"{what}: no row in common{at}; give traces that hold the same positions")
    out += [f"tightest: --tol '{tolerance}'" for tolerance in found.tightest]
    return out + [f"note: {note}" for note in found.notes]


def _table(rows: Sequence[Row], kinds: Sequence[str]) -> list[str]:
    with_floor = any(row.floor is not None for row in rows)
    floor_head = ("floor",) if with_floor else ()
    head = ("point", "run", "rows", "rel_l2", "max_abs", *floor_head, "worst at", "first", "second", "", "passes at")
    table: list[tuple[str, ...]] = [head]
    for row in rows:
        run = row.first if row.first == row.second else f"{row.first} | {row.second}"
        count = f"{row.n} of {row.n + row.left_out}" if row.left_out else str(row.n)
        numbers = [f"{row.metrics[key]:.2e}" if key in row.metrics else "–" for key in ("rel_l2", "max_abs")]
        if with_floor:
            numbers.append("–" if row.floor is None else f"{row.floor:.2e}")
        none = "no row in common" if row.left_out else "no row on either side"
        worst = ("identical" if row.n else none, "", "")
        if row.worst:
            channel = ",".join(map(str, row.worst.channel))
            worst = (f"{row.worst.position}[{channel}]", f"{row.worst.first:.6g}", f"{row.worst.second:.6g}")
        state = {True: "ok", False: "OVER", None: ""}[row.passed]
        table.append((kind_beside(row.name, kinds), run, count, *numbers, *worst, state, row.tightest or "–"))
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def listed(names: Sequence[str]) -> str:
    """The first six names, and whether there are more."""
    return f"{', '.join(names[:6])}{' …' if len(names) > 6 else ''}"


def plain(value: Any) -> Any:
    """The same with every number as strict JSON has it: inf as text, NaN as null."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def tightest_limit(name: str, value: float) -> str | None:
    """The smallest limit of two digits that the value passes."""
    if not math.isfinite(value):
        return None
    if value == 0:
        return f"{name}<=0"
    # Rounded up on the decimal number itself: twice rounding a float can step over the next limit.
    exact = Decimal(value)
    limit = exact.quantize(Decimal((0, (1,), exact.adjusted() - 1)), ROUND_CEILING)
    return f"{name}<={limit:.1e}"


def _summary(rows: Sequence[Row]) -> list[str]:
    """POINTS=METRIC<=NUMBER for each hook point over all layers and runs; none where no number would pass."""
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
        point = row.name.rsplit(".", 1)[-1]
        glob = f"layers.*.{point}" if "." in row.name else point
        for part in (row.tightest or "").split(", "):
            key, _, limit = part.partition("<=")
            value = float(limit) if limit else math.inf
            for name in [key] if key else [k for g, k in worst if g == glob]:
                worst[glob, name] = max(value, worst.get((glob, name), 0.0))
    kept = {at: value for at, value in worst.items() if math.isfinite(value)}
    return [f"{glob}={key}<={value:.1e}" if value else f"{glob}={key}<=0" for (glob, key), value in kept.items()]
