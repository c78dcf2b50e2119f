"""The whole report of a trace in one HTML file that can be mailed and printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import plotly.graph_objects as go

from replayscope.inspector.checks import apart
from replayscope.inspector.errors import UsageError
from replayscope.inspector.verdict import verdict
from replayscope.traces import TraceReader
from replayscope.traces.errors import TraceExistsError
from replayscope.ui import page, story, tables, tokens
from replayscope.ui.cells import checked_points, classes
from replayscope.ui.checked import CheckedReader, told
from replayscope.ui.curves import draw_curves
from replayscope.ui.export import write_bytes
from replayscope.ui.figures import (
    cut_layer,
    healing,
    logits_by_cut,
    logits_by_token,
    position_layer,
    reach,
    replay_length,
)
from replayscope.ui.flips import logit_rows
from replayscope.ui.grid import BUG
from replayscope.ui.judge_charts import drop_chart, kl_chart
from replayscope.ui.judged import details, is_results, judgement
from replayscope.ui.judged import story as verdict_of
from replayscope.ui.series import Series, run_of, series
from replayscope.ui.states import NotRecorded
from replayscope.ui.theme import count, escape

MOST_FLIPS, MOST_TABLES = 40, 3


def report(
    trace_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Path:
    """Write verdict, arms, noise floor, figures and provenance of one or more traces, and return the file.

    Raises TraceExistsError if `out` exists without `force`, UsageError if its name does not end in .html, it is one of
    the traces or it cannot be written, TraceError for a trace that is not sound or compares nothing; then nothing is
    written.
    """
    paths = [trace_paths] if isinstance(trace_paths, str | os.PathLike) else list(trace_paths)
    target = Path(out)
    if target.suffix.lower() != ".html":
        raise UsageError(f"{target.name}: a report's name ends in .html")
    if target.exists() and not force:
        raise TraceExistsError(f"{target} exists; add --force to replace it")
    if not target.parent.is_dir():
        raise UsageError(f"no folder {target.parent} to write {target.name} into; make it first")
    apart(target, paths)
    traces = [CheckedReader(path) for path in paths if not is_results(path)]
    write_bytes(target, render(traces, [path for path in paths if is_results(path)]).encode())
    return target


def render(traces: Sequence[TraceReader], results: Sequence[str | os.PathLike[str]] = ()) -> str:
    """The report as HTML text; the same traces, and the same results of `judge run`, give the same bytes."""
    if not traces and not results:
        raise UsageError("give at least one trace to report on")
    drawn: list[go.Figure] = []
    sections = [_judged(path, drawn) for path in results]
    if not traces:
        return page.document(Path(results[0]).stem, "acceptance matrix", "\n".join(sections), drawn)
    for trace in traces:
        with told(trace.path, "report"):
            sections.append(_section(trace, drawn, len(traces) > 1))
    title = traces[0].path.stem if len(traces) == 1 else f"{len(traces)} traces"
    subtitle = story.subtitle(traces[0]) if len(traces) == 1 else ", ".join(trace.path.name for trace in traces)
    return page.document(title, subtitle, "\n".join(sections), drawn)


def _judged(path: str | os.PathLike[str], drawn: list[go.Figure]) -> str:
    said = judgement(path)
    own = [draw_curves(drop_chart(said)), draw_curves(kl_chart(said))]
    cards = [page.card(len(drawn) + i, figure) for i, figure in enumerate(own)]
    drawn += own
    name = f'<p class="mono">{escape(Path(path).name)}</p>'
    return f"<section>{name}{verdict_of(said)}{''.join(cards)}{details(said)}</section>"


def _section(trace: TraceReader, drawn: list[go.Figure], named: bool) -> str:
    checked_points(trace)
    own, said = figures(trace), verdict(trace)
    cards = [page.card(len(drawn) + i, figure) for i, figure in enumerate(own)]
    drawn += own
    parts = [
        f'<p class="mono">{escape(story.subtitle(trace))}</p>' if named else "",
        story.overview(trace, said),
        *cards[:1],
        _card("Arms", "the worst over the cuts of each arm; errors are relative L2 of a row", tables.arms(trace)),
        *cards[1:],
        *_tokens(trace),
        _card("Where runs go wrong first", "planted faults are broken on purpose", tables.faults(said)),
        _card("Noise floor", "what runs that are equal on paper differ by, relative L2 of a row", tables.floors(trace)),
        _card("Provenance", "what is needed to run it again", tables.provenance(trace)),
    ]
    return f"<section>{''.join(parts)}</section>"


def _card(title: str, sentence: str, body: str) -> str:
    if not body:
        return ""
    return f'<div class="rs-card"><h2>{escape(title)}</h2><p>{escape(sentence)}</p>{body}</div>'


def _tokens(trace: TraceReader) -> list[str]:
    """The text in the colours of the logits, the flips, and the most likely tokens at the first of them."""
    if "full" not in trace.references() or "logits" not in trace.points("full"):
        return []
    try:
        info = run_of(trace)
        rows = logit_rows(trace, info)
    except NotRecorded:
        return []
    after = [flip for flip in rows.flips if info.cut is None or flip.position >= info.cut]
    cards = [
        _card("The text, token by token", tokens.strip_words(trace, info.index), tokens.token_strip(trace, info.index)),
        _card("Top-1 flips in the suffix", f"at most {MOST_FLIPS} of them; a flip within the noise is no finding",
              tables.flips(trace, after[:MOST_FLIPS])),
    ]  # fmt: skip
    for flip in after[:MOST_TABLES]:
        with suppress(NotRecorded):
            words = f"Most likely tokens after position {count(flip.position)}"
            body = tokens.top_k_table(trace, flip.position, info.index)
            cards.append(_card(words, f"{info.arm} beside the full prefill", body))
    return cards


def figures(trace: TraceReader) -> list[go.Figure]:
    """What a report shows: the window, one cut, the suffix, the reach, the healing, the replay lengths, the logits, and
    every arm with a bug; of these what the trace has the parts for."""
    found = series(trace.runs)
    main = next((one for one in found if ":" not in one.arm), None)
    points = trace.points("full") if "full" in trace.references() else []
    drawn = []
    if main and "window_kv" in points:
        drawn.append(cut_layer(trace, arm=main.label))
        drawn.append(position_layer(trace, arm=main.label))
    if main and "hidden" in points:
        drawn.append(cut_layer(trace, "hidden", bucket="suffix", arm=main.label))
        drawn.append(reach(trace, arm=main.label))
    for point, draw in (("hidden", healing), ("window_kv", replay_length), ("logits", logits_by_cut),
                        ("logits", logits_by_token)):  # fmt: skip
        if main and point in points:
            with suppress(NotRecorded):
                drawn.append(draw(trace))
    return drawn + [
        cut_layer(trace, point, bucket="all", arm=one.label, reference="oracle") for one, point in _wrong(trace)
    ]


def _wrong(trace: TraceReader) -> list[tuple[Series, str]]:
    """Arms that are meant to be right and are not, each with the first point that shows it."""
    if "oracle" not in trace.references():
        return []
    wrong = []
    for one in series(trace.runs):
        runs = [run.index for run in one.runs]
        states = [point for point in ("window_kv", "attn_out", "hidden") if point in trace.points("oracle")]
        bad = [point for point in states if (classes(trace, "oracle", point)[runs] == BUG).any()]
        if bad and not one.arm.startswith("broken:"):
            wrong.append((one, bad[0]))
    return wrong
