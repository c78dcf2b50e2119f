"""A judgement in words: tables for the terminal, and the same numbers as plain data. No torch."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replayscope.inspector.judge_stats import Interval
from replayscope.inspector.judge_verdict import FAIL, OPEN, PASS, ROLL_BACK, Cell, Checked, Judgement
from replayscope.inspector.names import counted
from replayscope.inspector.options import Result

DIMENSIONS = ("arm", "task", "cut", "length", "suffix", "output", "concurrency", "semantics")


def result(judged: Judgement, results: Path, worst: int = 10) -> Result:
    """A judgement as a command's result: exit code 0 is an accepted contract."""
    found = data(judged) | {"results": str(results)}
    return Result(f"{text(judged, worst)}\n{results}", found, 0 if judged.ok else 1)


def dimension_rows(judged: Judgement, dimension: str) -> list[dict[str, Any]]:
    """One row per value of a dimension, over the cells that are judged; the worst of its cells beside its means."""
    groups: dict[str, list[Cell]] = {}
    for cell in judged.judged:
        groups.setdefault(getattr(cell.parts, dimension), []).append(cell)
    rows = []
    for value, cells in groups.items():
        seeing = [cell for cell in cells if not cell.blind]
        rows.append(
            {
                dimension: value,
                "cells": len(cells),
                "prompts": sum(cell.drop.n for cell in cells),
                "full": _mean(cell.success for cell in cells),
                "worse": sum(cell.drop.worse for cell in cells),
                "better": sum(cell.drop.better for cell in cells),
                "drop": _mean(cell.drop.drop for cell in seeing),
                "worst drop": max((cell.drop.high for cell in seeing), default=math.nan),
                "kl": _mean(cell.kl.value for cell in cells),
                "worst kl": max(cell.kl.high for cell in cells),
                "blind": len(cells) - len(seeing),
                "open": sum(cell.state == OPEN for cell in cells),
                "fail": sum(cell.state == FAIL for cell in cells),
            }
        )
    return rows


def command(cell: Cell, judged: Judgement) -> str:
    """What runs this cell alone."""
    return shlex.join([*judged.rerun, "--cells", cell.name, "-o", "cell.jsonl"])


def text(judged: Judgement, worst: int = 10) -> str:
    """The judgement for a terminal."""
    low, high = judged.samples
    n = str(low) if low == high else f"{low} to {high}"
    lines = [
        f"verdict: {judged.verdict}",
        f"{counted(len(judged.judged), 'cell')} judged with {n} prompt{'' if n == '1' else 's'} each; "
        "all must pass, each by itself",
        *(f"because {reason}" for reason in judged.reasons),
    ]
    for dimension in DIMENSIONS:
        rows = dimension_rows(judged, dimension)
        if len(rows) > 1 or dimension == "arm":
            lines += ["", *table(rows)]
    bad = judged.worst(worst)
    if bad:
        more = sum(cell.state != PASS for cell in judged.judged) - len(bad)
        lines += ["", f"worst cells{f' ({more} more)' if more else ''}"]
    for cell in bad:
        p = f", p {cell.adjusted:.2g} among {len(judged.judged)}" if cell.drop.worse or cell.drop.better else ""
        lines += [f"  {cell.state}  {cell.name}{p}", *(f"        {why}" for why in cell.why[:4])]
        kl, first = cell.spread.get("kl"), cell.by_step["first"]
        if kl:
            told = f"first differing token at step {first[0]}" if first else "no token differs"
            lines += [
                f"        kl mean {kl[0]:.3g}, q95 {kl[2]:.3g}, max {kl[3]:.3g}; {told} "
                f"({counted(len(first), 'prompt')} differ{'s' if len(first) == 1 else ''})"
            ]
        lines += [f"        {command(cell, judged)}"]
    if judged.prices:
        lines += ["", *table(price_rows(judged.prices))]
    if judged.verdict != "accept":
        lines += ["", f"roll back in this order: {', then '.join(roll_back(judged))}"]
    return "\n".join([*lines, "", *(f"note: {note}" for note in judged.notes)])


def roll_back(judged: Judgement) -> list[str]:
    """What to switch off first: both replays, then back on what passed, the decoder's before the encoder's."""
    names = {"off": "both replays off", "decoder": "decoder replay alone", "encoder": "encoder replay"}
    return [names[step] for step in ROLL_BACK if step == "off" or judged.arms.get(step) == PASS]


def price_rows(prices: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Costs by arm. Times are of this machine; ttft, total and cost are medians of the ratio to full."""
    return [{"arm": arm, **row} for arm, row in prices.items()]


def data(judged: Judgement) -> dict[str, Any]:
    """The same as plain JSON data."""
    return {
        "verdict": judged.verdict,
        "arms": dict(judged.arms),
        "reasons": judged.reasons,
        "notes": judged.notes,
        "contract": judged.stamp,
        "samples": list(judged.samples),
        "roll_back": roll_back(judged),
        "dimensions": {name: dimension_rows(judged, name) for name in DIMENSIONS},
        "cells": [_cell(cell, judged) for cell in judged.cells],
        "worst": [cell.name for cell in judged.worst(len(judged.cells))],
        "costs": judged.prices,
        "conditions": [_checked(check) for check in judged.costs],
    }


def _cell(cell: Cell, judged: Judgement) -> dict[str, Any]:
    drop = cell.drop
    return {
        "cell": cell.name,
        "control": cell.control,
        "state": cell.state,
        "why": list(cell.why),
        "prompts": drop.n,
        "full": cell.success,
        "worse": drop.worse,
        "better": drop.better,
        "drop": [drop.low, drop.drop, drop.high],
        "budget": cell.budget,
        "p": drop.p,
        "p_holm": cell.adjusted,
        "blind": cell.blind,
        "needed": cell.needed,
        "faults": list(cell.faults),
        "kl": _interval(cell.kl),
        "spread": {key: dict(zip(("mean", "q50", "q95", "max"), v, strict=True)) for key, v in cell.spread.items()},
        "by_step": dict(cell.by_step),
        "limits": [_checked(check) for check in cell.checks],
        "command": command(cell, judged),
    }


def _checked(check: Checked) -> dict[str, Any]:
    limit = {"limit": check.limit.text, "at_most": check.limit.at_most, "of": check.where}
    return {**limit, "state": check.state, **_interval(check.interval)}


def _interval(found: Interval) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows under the names of their columns; a column is as wide as its widest cell. Missing is –."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = [names, *([_shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1e5
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan
