"""What a trace says in one sentence, a row of tiles and a few tables: the same words on the page and in the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replayscope.inspector import verdict
from replayscope.inspector.classes import RULES, dtype_of
from replayscope.inspector.metrics import metric
from replayscope.traces import TraceReader
from replayscope.traces.schema import kind_of
from replayscope.ui.cells import classes
from replayscope.ui.grid import BUG, DESIGN, FLIP
from replayscope.ui.series import Series, series
from replayscope.ui.theme import count, escape, number, plural
from replayscope.ui.words import POINT_WORDS, arm_words

Tone = Literal["", "good", "bug"]


@dataclass(frozen=True)
class Tile:
    """One number of the overview: key above, note below it."""

    key: str
    value: str
    note: str = ""
    tone: Tone = ""


def headline(trace: TraceReader) -> tuple[str, Tone]:
    """The verdict in one sentence, and how it is meant."""
    said = verdict.verdict(trace)
    wrong = [bug for bug in said.bugs if not bug.expected]
    if wrong:
        bug = wrong[0]
        cut = "" if bug.cut is None else f" at cut {count(bug.cut)}"
        more = f", and {plural(len(wrong) - 1, 'more run')} go wrong" if len(wrong) > 1 else ""
        return f"Bug: {bug.arm}{cut} goes wrong first in {bug.where}: {number(bug.value)}{more}.", "bug"
    if said.missed:
        run = trace.runs[said.missed[0]]
        return (
            f"The planted fault {run.arm} at cut {count(run.cut or 0)} was not found: do not trust this trace.",
            "bug",
        )
    design = _design(trace)
    if not _judged(trace):
        return f"No claim of a bug from this trace. {design}", ""
    planted = sum(bug.expected for bug in said.bugs)
    found = "the planted fault is" if planted == 1 else f"all {count(planted)} planted faults are"
    proof = f", and {found} found" if planted else ""
    return f"No bug: every arm follows its own semantics{proof}. {design}", "good"


def _judged(trace: TraceReader) -> bool:
    """Whether arms were compared with their oracles in a precision that allows a claim."""
    return "oracle" in trace.references() and dtype_of(trace) in RULES.bounds


def _main(trace: TraceReader) -> Series | None:
    found = series(trace.runs)
    return found[0] if found and ":" not in found[0].arm else None


def _design(trace: TraceReader) -> str:
    """What the first arm changes by design, in one sentence."""
    one, window = _main(trace), _window(trace)
    if one is None or window is None:
        return ""
    if not window.size:
        return f"{arm_words(one.arm)} leaves the window KV as it is."
    return f"{arm_words(one.arm)} changes the window KV by design, median {number(float(np.median(window)))}."


def _window(trace: TraceReader) -> np.ndarray | None:
    """Relative L2 of the window KV of the first arm, cells that differ by more than noise; None if it was not compared."""
    one = _main(trace)
    if one is None or "full" not in trace.references() or "window_kv" not in trace.points("full"):
        return None
    table = trace.table("full", "window_kv")
    runs, b = [run.index for run in one.runs], table.bucket("window")
    value = metric(table, "rel_l2")[runs, :, b]
    shown = np.isin(classes(trace, "full", "window_kv")[runs, :, b], (DESIGN, FLIP, BUG)) & np.isfinite(value)
    return value[shown]


def tiles(trace: TraceReader) -> list[Tile]:
    """Bugs, planted faults, window KV, noise floor, KL and flips, as far as the trace has them."""
    said = verdict.verdict(trace)
    wrong = [bug for bug in said.bugs if not bug.expected]
    judged = _judged(trace)
    bugs = plural(len(wrong), "run") if wrong else "none" if judged else "no claim"
    found = [Tile("Bugs, arm − oracle", bugs, dtype_of(trace), "bug" if wrong else "good" if judged else "")]
    planted = [run for run in trace.runs if run.arm.startswith("broken:")]
    if planted and judged:
        seen = f"{count(len(planted) - len(said.missed))} of {count(len(planted))}"
        found.append(Tile("Planted faults found", seen, "broken arms", "" if said.missed else "good"))
    one, window = _main(trace), _window(trace)
    if one is not None and window is not None:
        value = number(float(np.median(window))) if window.size else "0"
        found.append(Tile("Window KV, median", value, f"relative L2, {one.arm}"))
    if (floor := _floor(trace)) is not None:
        found.append(Tile("Noise floor", number(floor), "relative L2 of a row"))
    return found + (_logits_tiles(trace, one) if one else [])


def _floor(trace: TraceReader) -> float | None:
    floors = [verdict.floor(trace, point) for _, point in _states(trace)]
    known = [f[np.isfinite(f)] for f in floors]
    return float(max(f.max() for f in known if f.size)) if any(f.size for f in known) else None


def _states(trace: TraceReader) -> list[tuple[str, str]]:
    points = trace.points("full") if "full" in trace.references() else []
    return [("full", point) for point in points if kind_of(point) == "state"]


def _logits_tiles(trace: TraceReader, one: Series) -> list[Tile]:
    if "full" not in trace.references() or "logits" not in trace.points("full"):
        return []
    table = trace.table("full", "logits")
    runs, b = [run.index for run in one.runs], table.bucket("suffix")
    kl = metric(table, "kl")[runs, 0, b]
    flips, rows = table.arrays["flips"][runs, 0, b], table.arrays["n"][runs, 0, b]
    if not np.isfinite(kl).any():
        return []
    worst = int(np.nanargmax(kl))
    where = f"{one.arm}, cut {count(one.cuts[worst])}" if one.has_cut else one.arm
    return [
        Tile("Logits KL, worst cut", f"{number(float(kl[worst]))} nats", where),
        Tile("Top-1 flips", count(flips.sum()), f"of {count(rows.sum())} suffix rows"),
    ]


def notes(trace: TraceReader) -> list[str]:
    """What limits the claims."""
    return [note[0].upper() + note[1:] + "." for note in verdict.verdict(trace).notes]


def subtitle(trace: TraceReader) -> str:
    """File, model, N, W and semantics in one line."""
    names = sorted({run.semantics for run in trace.runs})
    window = f" · W {count(trace.runs[0].window)}" if trace.runs else ""
    model = str(trace.provenance.get("model", "")) or "model not named"
    return f"{trace.path.name} · {model} · N {count(len(trace.tokens.ids))}{window} · {', '.join(names)}"


def overview(trace: TraceReader) -> str:
    """Verdict, notes and tiles as HTML."""
    text, tone = headline(trace)
    cells = "".join(
        f'<div><span class="k">{escape(t.key)}</span><span class="v {t.tone}">{escape(t.value)}</span>'
        f'<span class="s">{escape(t.note)}</span></div>'
        for t in tiles(trace)
    )
    limits = "".join(f"<p>{escape(note)}</p>" for note in notes(trace))
    return f'<p class="rs-verdict {tone}">{escape(text)}</p><div class="rs-tiles">{cells}</div>{limits}'


def _table(head: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    """HTML of a table; every cell is (HTML, class)."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f'<td class="{tone}">{text}</td>' for text, tone in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="rs-scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def arms(trace: TraceReader) -> str:
    """One row per arm: errors against oracle and in the exact region, floor, window by layer, KL, flips, rows."""
    head = (
        "arm", "cuts", "vs oracle", "exact region", "floor", "window KV by layer", "KL max, nats", "top-1 flips",
        "choices changed", "replayed", "cached", "fresh",
    )  # fmt: skip
    rows = []
    order = [(one.arm, one.semantics, one.replay) for one in series(trace.runs)]
    table = sorted(verdict.arm_table(trace), key=lambda arm: order.index((arm.arm, arm.semantics, arm.replay)))
    for arm in table:
        name = arm.arm + ("" if arm.replay is None or arm.arm == "hit" else f" · R {count(arm.replay)}")
        bug = "bug" if arm.bugs else ""
        rows.append([
            (escape(name), ""), (count(len(arm.runs)), ""), _cell(arm.oracle, bug), _cell(arm.exact, ""), _cell(arm.floor, "dim"),
            (_strip(arm.window, arm.floor), ""), _cell(arm.kl_max, ""), _count(arm.top1, "flip"), _count(arm.changed, ""),
            (count(arm.replayed), ""), (count(arm.cached), ""), (count(arm.fresh), ""),
        ])  # fmt: skip
    return _table(head, rows)


def _cell(value: float | None, tone: str) -> tuple[str, str]:
    return ("–", "none") if value is None else (number(value), tone)


def _count(value: int | None, tone: str) -> tuple[str, str]:
    return ("–", "none") if value is None else (count(value), tone if value else "dim")


def _strip(window: Sequence[float | None], floor: float | None) -> str:
    """The window KV as one small cell per layer, in the colours of the maps over six decades up to 1."""
    cells = []
    for layer, value in enumerate(window):
        if value is None:
            tone, said = "absent", "not computed"
        elif value == 0:
            tone, said = "identical", "identical"
        else:
            step = int(np.clip(np.log10(value) + 6, 0, 5.999)) if np.isfinite(value) else 5
            tone, said = "noise" if floor is not None and value <= floor else f"m{step}", number(value)
        cells.append(f'<i class="{tone}" title="layer {layer}: {said}"></i>')
    return f'<span class="rs-strip">{"".join(cells)}</span>' if cells else "–"


def faults(trace: TraceReader) -> str:
    """Where runs go wrong first: a line for each arm and place, over its cuts; empty if none does."""
    groups: dict[tuple[str, str, int | None], list[verdict.Bug]] = {}
    for bug in verdict.verdict(trace).bugs:
        groups.setdefault((bug.arm, bug.point if bug.kind != "cached" else "", bug.layer), []).append(bug)
    rows = []
    for (arm, _, _), bugs in groups.items():
        cuts = [bug.cut for bug in bugs if bug.cut is not None]
        over = "–" if not cuts else count(cuts[0]) if len(cuts) == 1 else f"{count(min(cuts))} … {count(max(cuts))}"
        first, worst = bugs[0], max(bugs, key=lambda bug: bug.value)
        rows.append([
            (escape(arm), ""), (count(len(bugs)), ""), (over, ""), (escape(first.where), "mono"), (number(worst.value), ""),
            ("–" if worst.kind == "cached" else number(worst.bound), "dim"),
            ("planted", "dim") if first.expected else ("bug", "bug"),
        ])  # fmt: skip
    head = ("arm", "runs", "cuts", "first wrong place, at the first of them", "largest error", "bound", "")
    return _table(head, rows) if rows else ""


def floors(trace: TraceReader) -> str:
    """The noise floor and the bound of a bug at every point, the largest over layers and cuts."""
    rows = []
    for _, point in _states(trace):
        floor, bound = verdict.floor(trace, point), verdict.bound(trace, point)
        known, limit = floor[np.isfinite(floor)], bound[np.isfinite(bound)]
        rows.append([
            (POINT_WORDS[point], ""), _cell(float(known.max()) if known.size else None, ""),
            _cell(float(np.median(known)) if known.size else None, "dim"),
            _cell(float(limit.max()) if limit.size else None, "dim"),
        ])  # fmt: skip
    return _table(("hook point", "noise floor", "median", "a bug lies above"), rows) if rows else ""


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
