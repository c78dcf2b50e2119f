"""A judgement as HTML, for the report and the page: the verdict, the worst cells, a table per dimension, the costs.

All of it is made from what `judge verdict --json` says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayscope.inspector import judge_results, judge_text
from replayscope.inspector.judge_verdict import ACCEPT, DECODER_ONLY, REFUSE, judge
from replayscope.ui.checked import told
from replayscope.ui.judge_charts import Said, judged, value
from replayscope.ui.story import Tile, Tone, tile_row
from replayscope.ui.tables import html_table
from replayscope.ui.theme import count, escape, number, plural

MOST_WORST, MOST_WHY = 10, 4


def is_results(path: str | os.PathLike[str]) -> bool:
    """Whether a path names results of a matrix rather than a trace."""
    return Path(path).suffix == ".jsonl"


def judgement(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `judge verdict --json` says of results under the contract that they hold. Raises UsageError."""
    name = Path(path).name
    with told(name, "judgement"):
        results = judge_results.read(Path(path))
        contract = judge_results.contract_of(results, name)
        return judge_text.data(judge(results, contract))


def headline(said: Said) -> tuple[str, Tone]:
    """The verdict in one sentence, and how it is meant."""
    cells = judged(said)
    states = [cell["state"] for cell in cells]
    fail, open_ = states.count("fail"), states.count("open")
    many, verb = plural(len(cells), "cell"), "fails" if fail == 1 else "fail"
    if said["verdict"] == ACCEPT:
        return f"Accept: {many} of the contract, and every one passes by itself.", "good"
    if said["verdict"] == DECODER_ONLY:
        return f"Accept decoder replay only: {count(fail)} of {many} {verb}, {count(open_)} open.", ""
    if said["verdict"] == REFUSE and not fail:
        return "Refuse: the service needs what replay does not serve, or costs more than the contract allows.", "bug"
    if said["verdict"] == REFUSE:
        return f"Refuse: {count(fail)} of {many} {verb}.", "bug"
    if not open_ and said["reasons"]:
        return f"Not enough evidence: {said['reasons'][0]}.", ""
    return f"Not enough evidence: {count(open_)} of {many} can neither pass nor fail.", ""


def story(said: Said) -> str:
    """Verdict, tiles, reasons and the order of the roll-back, as HTML."""
    text, tone = headline(said)
    notes = "".join(f'<p class="rs-note">{escape(note[:1].upper() + note[1:])}.</p>' for note in said["notes"])
    steps = "".join(f"<li>{escape(step)}</li>" for step in said["roll_back"])
    why = "".join(f"<li>{escape(reason)}</li>" for reason in said["reasons"])
    cards = _card("Why", "what keeps the contract from being accepted", f'<ul class="rs-why">{why}</ul>' if why else "")
    cards += _card(
        "Roll back in this order", "what to switch off first, then back on what passed by itself",
        f'<ol class="rs-order">{steps}</ol>',
    )  # fmt: skip
    return (
        f'<p class="rs-verdict {tone}">{escape(text)}</p>{tile_row(_tiles(said))}{notes}'
        f'<div class="rs-two">{cards}</div>'
    )


def details(said: Said) -> str:
    """The worst cells with the command that runs each alone, a table per dimension, conditions and costs; HTML."""
    parts = [_worst(said)]
    for dimension, rows in said["dimensions"].items():
        if len(rows) > 1 or dimension == "arm":
            parts.append(_card(f"By {dimension}", "means over the cells, and the worst of them", _table(rows)))
    rows = [
        {"arm": c["of"], "condition": c["limit"], "value": c["value"], "low": c["low"], "high": c["high"],
         "state": c["state"]}
        for c in said["conditions"]
    ]  # fmt: skip
    parts.append(_card("Conditions", "what replay must gain, as ratios to a cold prefill", _table(rows)))
    prices = judge_text.price_rows(said["costs"])
    parts.append(_card("Costs", "times of the machine that ran them; ratios are to full", _table(prices)))
    return f'<div class="rs-stack">{"".join(parts)}</div>'


def _tiles(said: Said) -> list[Tile]:
    cells = judged(said)
    found = []
    for arm, state in said["arms"].items():
        own = [cell for cell in cells if f"/{arm}/" in cell["cell"]]
        tone: Tone = "good" if state == "pass" else "bug" if state == "fail" else ""
        bad = sum(cell["state"] != "pass" for cell in own)
        found.append(Tile(arm, state, f"{count(bad)} of {plural(len(own), 'cell')} not passed", tone))
    seeing = [cell for cell in cells if not cell["blind"]]
    blind = f"{count(len(cells) - len(seeing))} of {plural(len(cells), 'cell')} blind"
    low, high = min(said["samples"]), max(said["samples"])
    found.append(Tile("Prompts a cell", count(low) if low == high else f"{count(low)} to {count(high)}", blind))
    if seeing:
        worst = max(seeing, key=lambda cell: value(cell["drop"][2]))
        budget = f"upper limit; the budget is {number(100 * worst['budget'])} %"
        found.append(Tile("Largest possible drop", f"{number(100 * value(worst['drop'][2]))} %", budget))
    known = [kl for cell in cells if (kl := value(cell["kl"]["value"])) == kl]
    if known:
        found.append(Tile("KL, worst cell", f"{number(max(known))} nats", "mean over its prompts"))
    return found


def _worst(said: Said) -> str:
    cells = {cell["cell"]: cell for cell in said["cells"]}
    items = []
    for name in said["worst"][:MOST_WORST]:
        cell = cells[name]
        why = "".join(f"<p>{escape(line)}</p>" for line in cell["why"][:MOST_WHY])
        tone = "bug" if cell["state"] == "fail" else ""
        items.append(
            f'<li><p><span class="rs-class {tone}">{escape(cell["state"])}</span> <b>{escape(name)}</b></p>{why}'
            f'<code class="rs-command">{escape(cell["command"])}</code></li>'
        )
    more = len(said["worst"]) - len(items)
    left = f"<p>{plural(more, 'more cell')} did not pass</p>" if more else ""
    body = f'<ol class="rs-worst">{"".join(items)}</ol>{left}' if items else ""
    return _card("Worst cells", "each is judged by itself, and all must pass; the command runs it alone", body)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    names = [key.replace("_", " ") for key in head]
    return html_table(names, [[_cell(row.get(key)) for key in head] for row in rows]) if rows else ""


def _cell(said: Any) -> tuple[str, str]:
    if said is None or said != said:
        return "–", "none"
    if said == "fail":
        return "fail", "bug"
    return (number(said) if isinstance(said, float) else escape(str(said))), ""


def _card(title: str, sentence: str, body: str) -> str:
    if not body:
        return ""
    return f'<div class="rs-card"><h2>{escape(title)}</h2><p>{escape(sentence)}</p>{body}</div>'
