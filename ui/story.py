"""What a trace says in one sentence, a row of tiles and a few tables: the same words on the page and in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replayscope.inspector import verdict
from replayscope.inspector.classes import RULES, dtype_of
from replayscope.inspector.metrics import metric
from replayscope.inspector.verdict import Verdict
from replayscope.traces import TraceReader
from replayscope.traces.schema import kind_of
from replayscope.ui.cells import classes
from replayscope.ui.grid import BUG, DESIGN, FLIP
from replayscope.ui.series import Series, series
from replayscope.ui.theme import count, escape, number, plural
from replayscope.ui.words import arm_words

Tone = Literal["", "good", "bug"]


@dataclass(frozen=True)
class Tile:
    """One number of the overview: key above, note below it."""

    key: str
    value: str
    note: str = ""
    tone: Tone = ""


def headline(trace: TraceReader, said: Verdict) -> tuple[str, Tone]:
    """The verdict in one sentence, and how it is meant."""
    wrong = [bug for bug in said.bugs if not bug.expected]
    if wrong:
        bug = wrong[0]
        cut = "" if bug.cut is None else f" at cut {count(bug.cut)}"
        more = f", and {plural(len(wrong) - 1, 'more run')} go wrong" if len(wrong) > 1 else ""
        return f"Bug: {bug.arm}{cut} goes wrong first in {bug.where}: {number(bug.value)}{more}.", "bug"
    if said.missed:
        run = trace.runs[said.missed[0]]
        return f"The planted fault {run.arm} at cut {count(run.cut or 0)} was not found: no verdict stands.", ""
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
    """Relative L2 of the first arm's window KV, in cells above the noise; None if it was not compared."""
    one = _main(trace)
    if one is None or "full" not in trace.references() or "window_kv" not in trace.points("full"):
        return None
    table = trace.table("full", "window_kv")
    runs, b = [run.index for run in one.runs], table.bucket("window")
    value = metric(table, "rel_l2")[runs, :, b]
    shown = np.isin(classes(trace, "full", "window_kv")[runs, :, b], (DESIGN, FLIP, BUG)) & np.isfinite(value)
    return value[shown]


def tiles(trace: TraceReader, said: Verdict) -> list[Tile]:
    """Bugs, planted faults, window KV, noise floor, KL and flips, as far as the trace has them."""
    wrong = [bug for bug in said.bugs if not bug.expected]
    judged = _judged(trace)
    bugs = plural(len(wrong), "run") if wrong else "none" if judged else "no claim"
    found = [Tile("Bugs, arm − oracle", bugs, dtype_of(trace), "bug" if wrong else "good" if judged else "")]
    planted = [run for run in trace.runs if run.arm.startswith("broken:")]
    if planted and judged:
        caught = {bug.run for bug in said.bugs}
        seen = f"{count(sum(run.index in caught for run in planted))} of {count(len(planted))}"
        found.append(Tile("Planted faults found", seen, "broken arms", "" if said.missed or said.unjudged else "good"))
    one, window = _main(trace), _window(trace)
    if one is not None and window is not None:
        value = number(float(np.median(window))) if window.size else "0"
        found.append(Tile("Window KV, median", value, f"relative L2, {one.arm}"))
    if (floor := _floor(trace)) is not None:
        found.append(Tile("Noise floor", number(floor), "relative L2 of a row"))
    return found + (_logits_tiles(trace, one) if one else [])


def _floor(trace: TraceReader) -> float | None:
    floors = [verdict.floor(trace, point) for point in state_points(trace)]
    known = [f[np.isfinite(f)] for f in floors]
    return float(max(f.max() for f in known if f.size)) if any(f.size for f in known) else None


def state_points(trace: TraceReader) -> list[str]:
    """Hook points with numbers that were compared with `full`."""
    points = trace.points("full") if "full" in trace.references() else []
    return [point for point in points if kind_of(point) == "state"]


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


def subtitle(trace: TraceReader) -> str:
    """File, model, N, W and semantics in one line."""
    names = sorted({run.semantics for run in trace.runs})
    window = f" · W {count(trace.runs[0].window)}" if trace.runs else ""
    model = str(trace.provenance.get("model", "")) or "model not named"
    return f"{trace.path.name} · {model} · N {count(len(trace.tokens.ids))}{window} · {', '.join(names)}"


def overview(trace: TraceReader, said: Verdict) -> str:
    """Verdict, tiles and what limits the claims, as HTML."""
    text, tone = headline(trace, said)
    limits = "".join(f'<p class="rs-note">{escape(note[0].upper() + note[1:])}.</p>' for note in said.notes)
    return f'<p class="rs-verdict {tone}">{escape(text)}</p>{tile_row(tiles(trace, said))}{limits}'


def tile_row(row: Sequence[Tile]) -> str:
    """Tiles side by side, as HTML."""
    cells = "".join(
        f'<div><span class="k">{escape(t.key)}</span><span class="v {t.tone}">{escape(t.value)}</span>'
        f'<span class="s">{escape(t.note)}</span></div>'
        for t in row
    )
    return f'<div class="rs-tiles">{cells}</div>'
