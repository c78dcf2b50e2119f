"""A judgement as HTML, for the report and the page: the verdict, a table per dimension, the worst cells, the costs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayscope.inspector import judge_contract, judge_results, judge_text
from replayscope.inspector.judge_verdict import Judgement, judge
from replayscope.ui.tables import html_table
from replayscope.ui.theme import escape, number


def is_results(path: str | os.PathLike[str]) -> bool:
    """Whether a path names results of a matrix rather than a trace."""
    return Path(path).suffix == ".jsonl"


def judged(path: str | os.PathLike[str]) -> Judgement:
    """The results' judgement under the contract that they hold. Raises UsageError."""
    results = judge_results.read(Path(path))
    text = results.header["contract"]["text"]
    return judge(results, judge_contract.parse(text, f"the contract in {Path(path).name}"))


def panel(path: str | os.PathLike[str]) -> str:
    """Everything that the command line shows of a judgement, as cards."""
    found = judged(path)
    reasons = [*found.reasons, *found.notes]
    parts = [_card("Verdict", found.verdict, _list(reasons))]
    for dimension in judge_text.DIMENSIONS:
        rows = judge_text.dimension_rows(found, dimension)
        if len(rows) > 1 or dimension == "arm":
            parts.append(_card(f"By {dimension}", "means over the cells, and the worst of them", _table(rows)))
    worst = [
        {
            "cell": cell.name,
            "state": cell.state,
            "why": "; ".join(cell.why),
            "run it alone": judge_text.command(cell, found),
        }
        for cell in found.worst()
    ]
    parts.append(_card("Worst cells", "each is judged by itself, and all must pass", _table(worst) if worst else ""))
    prices = judge_text.price_rows(found.prices)
    parts.append(_card("Costs", "times of the machine that ran them; ratios are to full", _table(prices)))
    return f"<section>{''.join(parts)}</section>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    return html_table(head, [[_cell(row.get(key)) for key in head] for row in rows]) if rows else ""


def _cell(value: Any) -> tuple[str, str]:
    if value is None or value != value:
        return "–", "none"
    if value == "fail":
        return "fail", "bug"
    return (number(value) if isinstance(value, float) else escape(str(value))), ""


def _list(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines) or "<p></p>"


def _card(title: str, sentence: str, body: str) -> str:
    if not body:
        return ""
    return f'<div class="rs-card"><h2>{escape(title)}</h2><p>{escape(sentence)}</p>{body}</div>'
