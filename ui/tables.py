"""Tables of the report and the page as HTML: arms, faults, noise floor, provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from replayscope.inspector import verdict
from replayscope.inspector.layer_kinds import layer_kinds, named
from replayscope.traces import TraceReader
from replayscope.ui.flips import Flip
from replayscope.ui.series import series
from replayscope.ui.story import state_points
from replayscope.ui.theme import count, escape, number
from replayscope.ui.tokens import shown
from replayscope.ui.words import POINT_WORDS


def html_table(head: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    """HTML of a table; every cell is (HTML, class)."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f'<td class="{tone}">{text}</td>' for text, tone in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="rs-scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def arms(trace: TraceReader) -> str:
    """One row per arm: errors against oracle and in the exact region, floor, window by layer, KL, flips, rows."""
    head = (
        "arm", "runs", "vs oracle", "exact region", "floor", "window KV by layer", "KL max, nats", "top-1 flips",
        "choices changed", "replayed", "cached", "fresh",
    )  # fmt: skip
    rows = []
    order = [(one.arm, one.semantics, one.replay) for one in series(trace.runs)]
    kinds = layer_kinds(trace.config)
    table = sorted(verdict.arm_table(trace), key=lambda arm: order.index((arm.arm, arm.semantics, arm.replay)))
    for arm in table:
        name = arm.arm + ("" if arm.replay is None or arm.arm == "hit" else f" · R {count(arm.replay)}")
        bug = "bug" if arm.bugs else ""
        rows.append([
            (escape(name), ""), (count(len(arm.runs)), ""), _cell(arm.oracle, bug), _cell(arm.exact, ""),
            _cell(arm.floor, "dim"), (_strip(arm.window, arm.floor, kinds), ""), _cell(arm.kl_max, ""),
            _count(arm.top1, "flip"), _count(arm.changed, ""), (count(arm.replayed), ""),
            (count(arm.cached), ""), (count(arm.fresh), ""),
        ])  # fmt: skip
    return html_table(head, rows)


def _strip(window: Sequence[float | None], floor: float | None, kinds: Sequence[str]) -> str:
    """The window KV as one small cell per layer, in the colours of the maps over four decades up to 1."""
    cells = []
    for layer, value in enumerate(window):
        if value is None:
            tone, said = "absent", "not computed"
        elif value == 0:
            tone, said = "identical", "identical"
        else:
            step = int(np.clip((np.log10(value) + 4) * 1.5, 0, 5.999)) if np.isfinite(value) else 5
            tone, said = "noise" if floor is not None and value <= floor else f"m{step}", number(value)
        cells.append(f'<i class="{tone}" title="layer {named(layer, kinds)}: {said}"></i>')
    return f'<span class="rs-strip">{"".join(cells)}</span>' if cells else "–"


def _cell(value: float | None, tone: str) -> tuple[str, str]:
    return ("–", "none") if value is None else (number(value), tone)


def _count(value: int | None, tone: str) -> tuple[str, str]:
    return ("–", "none") if value is None else (count(value), tone if value else "dim")


def faults(said: verdict.Verdict) -> str:
    """Where runs go wrong first: a line for each arm and place, over its cuts; empty if none does."""
    groups: dict[tuple[str, str, int | None], list[verdict.Bug]] = {}
    for bug in said.bugs:
        groups.setdefault((bug.arm, bug.point if bug.kind != "cached" else "", bug.layer), []).append(bug)
    rows = []
    for (arm, _, _), bugs in groups.items():
        cuts = [bug.cut for bug in bugs if bug.cut is not None]
        over = "–" if not cuts else count(cuts[0]) if len(cuts) == 1 else f"{count(min(cuts))} … {count(max(cuts))}"
        first, worst = bugs[0], max(bugs, key=lambda bug: bug.value)
        rows.append([
            (escape(arm), ""), (count(len(bugs)), ""), (over, ""), (escape(first.where), "mono"),
            (number(worst.value), ""),
            ("–" if worst.kind == "cached" else number(worst.bound), "dim"),
            ("planted", "dim") if first.expected else ("bug", "bug"),
        ])  # fmt: skip
    head = ("arm", "runs", "cuts", "first wrong place, at the first of them", "largest error", "bound", "")
    return html_table(head, rows) if rows else ""


def floors(trace: TraceReader) -> str:
    """The noise floor and the bound of a bug at every point, the largest over layers and cuts."""
    rows = []
    for point in state_points(trace):
        floor, bound = verdict.floor(trace, point), verdict.bound(trace, point)
        known, limit = floor[np.isfinite(floor)], bound[np.isfinite(bound)]
        rows.append([
            (POINT_WORDS[point], ""), _cell(float(known.max()) if known.size else None, ""),
            _cell(float(np.median(known)) if known.size else None, "dim"),
            _cell(float(limit.max()) if limit.size else None, "dim"),
        ])  # fmt: skip
    return html_table(("hook point", "noise floor", "median", "a bug lies above"), rows) if rows else ""


def flips(trace: TraceReader, found: Sequence[Flip]) -> str:
    """Rows whose most likely token changed: margin, and whether it lies within the noise; empty if there are none."""
    rows = []
    for flip in found:
        inside = {None: ("unknown", "none"), True: ("within the noise", "dim"), False: ("beyond the noise", "flip")}
        rows.append([
            (count(flip.position), ""), (shown(trace, flip.position), "mono"), _cell(flip.margin, ""),
            _cell(flip.noise, "dim"), inside[flip.inside],
        ])  # fmt: skip
    head = ("position", "after token", "margin, logits", "noise moves it by", "")
    return html_table(head, rows) if rows else ""


def provenance(trace: TraceReader) -> str:
    """What is needed to run it again."""
    facts = {"complete": "yes" if trace.complete else "no, the writer did not finish", **trace.provenance}
    items = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>" for key, value in facts.items()
    )
    return f"<dl>{items}</dl>"


def _plain(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value)
