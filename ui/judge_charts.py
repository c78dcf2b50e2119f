"""The figures of a judgement in numbers, from what `judge verdict --json` says: every cell's drop, and KL by cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replayscope.inspector.judge_contract import CUTS
from replayscope.ui.curves import Curve, CurveChart
from replayscope.ui.theme import LIGHT, count, escape, number, plural

Said = Mapping[str, Any]
_STATES = (
    ("pass", LIGHT.accent), ("blind: full fails too", LIGHT.arms[-1]), ("open", LIGHT.ink), ("fail", LIGHT.bug),
)  # fmt: skip


def value(said: Any) -> float:
    """A number as strict JSON has it: null is NaN, infinities are words."""
    return float("nan") if said is None else float(said)


def judged(said: Said) -> list[Said]:
    """The cells that are judged: all but the controls, arm by arm."""
    order = list(said["arms"])
    cells = [cell for cell in said["cells"] if not cell["control"]]
    return sorted(cells, key=lambda cell: order.index(arm_of(cell)))


def arm_of(cell: Said) -> str:
    """The arm in a cell's name."""
    return cell["cell"].split("/")[-3]


def shown_state(cell: Said) -> str:
    """The state of a cell as the key of the figure has it."""
    return _STATES[1][0] if cell["blind"] and cell["state"] == "pass" else cell["state"]


def drop_chart(said: Said) -> CurveChart:
    """x = the cells, arm by arm; y = the drop of the success rate with its interval, against the budget, in percent."""
    cells = judged(said)
    drops = 100 * np.array([[value(v) for v in cell["drop"]] for cell in cells]).reshape(-1, 3)
    place, begins = _places([arm_of(cell) for cell in cells])
    curves: list[Curve] = []
    for state, colour in _STATES:
        which = [i for i, cell in enumerate(cells) if shown_state(cell) == state]
        if not which:
            continue
        at, own, hover = place[which], drops[which], [_drop_hover(cells[i]) for i in which]
        gap = np.full(len(at), np.nan)
        bars = np.stack([at, at, gap], 1).ravel(), np.stack([own[:, 0], own[:, 2], gap], 1).ravel()
        curves.append(Curve(state, *bars, [h for h in hover for _ in range(3)], colour, 2.0, listed=False))
        points = np.stack([at, gap], 1).ravel(), np.stack([own[:, 1], gap], 1).ravel()
        curves.append(Curve(state, *points, [h for h in hover for _ in range(2)], colour, 2.0, marks=True))
    budgets = sorted({100 * cell["budget"] for cell in cells})
    states = [cell["state"] for cell in cells]
    over = [cell for cell in cells if value(cell["drop"][0]) > cell["budget"]]
    verb = "drops" if len(over) == 1 else "drop"
    low, high = min(said["samples"]), max(said["samples"])
    return CurveChart(
        title=f"{plural(len(over), 'cell')} of {count(len(cells))} {verb} by more than the budget" if over else
        "No cell is shown to drop by more than the budget",
        sentence="success rate of full minus that of the arm, with one-sided limits at the contract's confidence; "
        "an upper limit below the budget passes",
        notes=(f"{count(low) if low == high else f'{count(low)} to {count(high)}'} prompts a cell",
               f"{count(states.count('pass'))} pass, {count(states.count('open'))} open, "
               f"{count(states.count('fail'))} fail"),
        meta={}, curves=tuple(curves), axis="cells, arm by arm", label="drop of the success rate", unit="%",
        log=False, ticks=((-9.0, ""),), span=(-0.01, 1.01), marks=tuple((at, arm, False) for arm, at in begins.items()),
        limits=tuple((budget, f"budget {number(budget)} %") for budget in budgets),
        empty="no prompt was judged",
    )  # fmt: skip


def kl_chart(said: Said) -> CurveChart:
    """x = the cut by its name; y = KL(full‖arm) with full's tokens forced, the largest of the cells at that cut."""
    cells = judged(said)
    cuts = sorted({cell["cell"].rpartition("/")[2] for cell in cells}, key=_cut_order)
    curves, worst = [], (float("nan"), "", "")
    for i, arm in enumerate(said["arms"]):
        y, hover = np.full(len(cuts), np.nan), [""] * len(cuts)
        for at, cut in enumerate(cuts):
            own = [c for c in cells if arm_of(c) == arm and c["cell"].endswith(f"/{cut}")]
            known = [c for c in own if not np.isnan(value(c["kl"]["value"]))]
            if known:
                top = max(known, key=lambda c: value(c["kl"]["value"]))
                y[at], hover[at] = value(top["kl"]["value"]), _kl_hover(top, len(own))
                if not worst[0] >= y[at]:
                    worst = (y[at], arm, cut)
        colour = LIGHT.arms[i % (len(LIGHT.arms) - 1)]
        curves.append(Curve(arm, np.arange(len(cuts), dtype=float), y, hover, colour, 2.2, marks=True))
    limits = {check["at_most"]: check["limit"] for c in cells for check in c["limits"] if check["of"] == "kl"}
    title = f"KL is largest at the cut {worst[2]}: {number(worst[0])} nats a token with {worst[1]}"
    return CurveChart(
        title=title if worst[1] else "KL by cut",
        sentence="mean KL(full‖arm) over the output with full's own tokens forced; each point is the largest of the "
        "cells at that cut",
        notes=(), meta={}, curves=tuple(curves), axis="cut", label="KL(full‖arm)", unit="nats a token",
        ticks=tuple((float(i), cut) for i, cut in enumerate(cuts)), span=(-0.5, max(len(cuts), 1) - 0.5),
        limits=tuple(sorted(limits.items())) if len(limits) <= 3 else (), empty="no KL was measured",
    )  # fmt: skip


def _places(arms: Sequence[str]) -> tuple[np.ndarray, dict[str, float]]:
    """Where each cell stands from 0 to 1, and where each arm begins: by its number of cells, but its name must fit."""
    counts = {arm: arms.count(arm) for arm in dict.fromkeys(arms)}
    widths = {arm: max(n, len(arms) / 5) for arm, n in counts.items()}
    whole, begins, place = sum(widths.values()) or 1.0, dict[str, float](), list[float]()
    at = 0.0
    for arm, n in counts.items():
        begins[arm] = at / whole
        place += [(at + widths[arm] * (i + 0.5) / n) / whole for i in range(n)]
        at += widths[arm]
    return np.array(place), begins


def _cut_order(cut: str) -> tuple[int, int, str]:
    """Cuts as the matrix has them, each between its neighbours; `none` of the decoder last."""
    found = re.fullmatch(r"([a-z]+)([+-][0-9]{1,6})?", cut)
    names = list(CUTS)
    if not found or found[1] not in names:
        return len(names), 0, cut
    return names.index(found[1]), int(found[2] or 0), cut


def _name(cell: Said) -> str:
    """A cell's name on two lines, group and run."""
    words: Sequence[str] = cell["cell"].split("/")
    return f"<b>{escape('/'.join(words[-3:]))}</b><br>{escape('/'.join(words[:-3]))}<br>"


def _drop_hover(cell: Said) -> str:
    low, drop, high = (f"{number(100 * value(v))} %" for v in cell["drop"])
    why = "".join(f"<br>{escape(line[:120])}" for line in cell["why"][:3])
    return (
        f"{_name(cell)}drop {drop}, from {low} to {high}; budget {number(100 * cell['budget'])} %<br>"
        f"{count(cell['worse'])} worse, {count(cell['better'])} better of {count(cell['prompts'])}; "
        f"full succeeds in {number(100 * value(cell['full']))} %{why}"
    )


def _kl_hover(cell: Said, cells: int) -> str:
    low, mean, high = (number(value(cell["kl"][key]), 3) for key in ("low", "value", "high"))
    return f"{_name(cell)}KL {mean} nats, from {low} to {high}<br>the largest of {plural(cells, 'cell')} at this cut"
