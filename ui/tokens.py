"""Tokens as HTML: the strip of a run with its divergence, and the table of the most likely next tokens."""

from __future__ import annotations

import numpy as np

from replayscope.inspector.metrics import METRICS
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.ui.cells import colour_scale
from replayscope.ui.flips import ROW_METRICS, Flip, LogitRows, TopK, logit_rows, top_k
from replayscope.ui.grid import ABSENT, IDENTICAL, NOISE
from replayscope.ui.scale import Scale, fit
from replayscope.ui.series import run_of
from replayscope.ui.theme import count, escape, number
from replayscope.ui.words import against, arm_words, metric_words

BEFORE = 32  # tokens of the cached prefix shown before the replay start
STEPS = 6


def visible(text: str) -> str:
    """A token as escaped HTML with its white space in sight: `·` a space, `↵` a line's end, `⇥` a tab."""
    return escape(text).replace(" ", "·") or "∅"


def plain(text: str) -> str:
    """A token as a text file may hold it: lone surrogates and control characters as escapes."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def shown(trace: TraceReader, position: int) -> str:
    """The token at a position in quotes, as escaped HTML."""
    texts = trace.tokens.texts
    return f"“{visible(texts[position])}”" if position < len(texts) else "a generated token"


def flip_words(flip: Flip) -> str:
    """What is known of a flip, in words."""
    if flip.margin is None:
        return "top-1 flip, margin unknown: record it with --hooks logits"
    if flip.margin == 0:
        return "top-1 flip of a tie"
    said = f"top-1 flip, margin {number(flip.margin, 3)} logits"
    if flip.noise is None:
        return f"{said}; no noise run to hold it against"
    return f"{said}, {'within' if flip.inside else 'beyond'} the {number(flip.noise)} that noise moves a gap by"


def token_strip(
    trace: TraceReader,
    run: int | None = None,
    metric_name: str = "kl",
    arm: str | None = None,
    reference: str = "full",
) -> str:
    """The text of a run as HTML: each token in the colour of the divergence of the logits after it, flips underlined,
    the replay start and the cut marked, the end of the cached prefix before them.

    Raises NotRecorded where the logits were kept neither row by row nor raw.
    """
    choose("metric of this figure", metric_name, ROW_METRICS)
    info = run_of(trace, run, arm)
    rows = logit_rows(trace, info, reference)
    texts, first = trace.tokens.texts, max(0, info.start - BEFORE)
    parts = ["…" if first else ""]
    parts += [
        f'<i class="cached" title="position {p}: cached, not run">{_token(texts[p])}' for p in range(first, info.start)
    ]
    scale = _scale(trace, rows, metric_name)
    flips = {f.position: f for f in rows.flips}
    tones = _tones(rows, metric_name, scale)
    for i, position in enumerate(rows.position.tolist()):
        if position == info.start and info.start != info.cut:
            parts.append(f'<b class="start">s {count(info.start)}</b>')
        if info.cut is not None and position == info.cut:
            parts.append(f'<b class="cut">H {count(info.cut)}</b>')
        said = _said(rows, metric_name, i, flips.get(position))
        tone = f"{tones[i]} flip" if position in flips else tones[i]
        text = texts[position] if position < len(texts) else ""
        parts.append(f'<i class="{tone}" data-position="{position}" title="{escape(said)}">{_token(text)}')
    return f'<div class="rs-tokens">{"".join(parts)}</div>{_legend(scale)}'


def strip_words(trace: TraceReader, run: int | None = None, arm: str | None = None, reference: str = "full") -> str:
    """What the strip shows, in one sentence, as plain text."""
    info = run_of(trace, run, arm)
    cut = "" if info.cut is None else f" at cut {count(info.cut)}"
    return f"{arm_words(info.arm)}{cut}: each token in the colour of the logits after it, against {against(reference)}"


def _token(text: str) -> str:
    """The text and the end of its element, and a line break behind a token that ends a line (byte tokenizers write it
    as a backslash and an n)."""
    return visible(text) + ("</i><br>" if text.endswith("\n") or text == r"\n" else "</i>")


def _scale(trace: TraceReader, rows: LogitRows, metric_name: str) -> Scale:
    if "logits" in trace.points(rows.reference):
        return colour_scale(trace, rows.reference, "logits", metric_name)
    return fit(rows.value[metric_name], metric_words(metric_name), METRICS[metric_name].scale)  # type: ignore[arg-type]


def _tones(rows: LogitRows, metric_name: str, scale: Scale) -> list[str]:
    """The class of each token: a step of the scale, or that of a cell without a size of its own."""
    size = np.abs(rows.value[metric_name])
    low, high = (0.0, scale.high) if scale.kind == "signed" else scale.ends
    with np.errstate(invalid="ignore"):
        place = ((size if scale.kind == "signed" else scale.place(size)) - low) / (high - low)
    step = np.clip(np.nan_to_num(place) * STEPS, 0, STEPS - 1).astype(int)
    special = {IDENTICAL: "identical", NOISE: "noise", ABSENT: "absent"}
    return [special.get(str(kind), f"m{s}") for kind, s in zip(rows.kind, step, strict=True)]


def _said(rows: LogitRows, metric_name: str, i: int, flip: Flip | None) -> str:
    value = float(rows.value[metric_name][i])
    said = f"position {rows.position[i]}: {metric_words(metric_name)} {number(value, 3)} {METRICS[metric_name].unit}"
    floor = rows.floor.get(metric_name, np.nan)
    said += "" if np.isnan(floor) else f", floor {number(floor)}"
    return said if flip is None else f"{said}, {flip_words(flip)}"


def _legend(scale: Scale) -> str:
    """The key of the strip."""
    texts = scale.ticks()[1]
    steps = "".join(f'<i class="m{s}"></i>' for s in range(STEPS))
    marks = (
        ("identical", "identical"),
        ("noise", "within the noise"),
        ("cached", "cached, not run"),
        ("flip", "top-1 flip"),
    )
    items = "".join(f'<span><i class="{tone}"></i>{words}</span>' for tone, words in marks)
    unit = f", {scale.unit}" if scale.unit else ""
    return (
        f'<div class="rs-tokens-key"><span>{escape(scale.label + unit)}: {escape(texts[0])} <b>{steps}</b> '
        f"{escape(texts[-1])}</span>{items}</div>"
    )


def top_k_table(trace: TraceReader, position: int, run: int | None = None, arm: str | None = None,
                reference: str = "full", k: int = 8) -> str:  # fmt: skip
    """The most likely next tokens of both sides side by side, the margin, and whether a flip lies within the noise.

    Raises NotRecorded where raw logits are not stored, UsageError for a position that the run has not.
    """
    info = run_of(trace, run, arm)
    top = top_k(trace, info, position, reference, k)
    lines = []
    for c in top.candidates:
        follows = ' <span class="rs-follows">follows</span>' if c.token == top.follows else ""
        name = f"“{visible(c.text)}”" if c.text is not None else "–"
        ref = _side(c.ref_rank, c.ref_p, c.ref_logit, top.flipped)
        arm_side = _side(c.arm_rank, c.arm_p, c.arm_logit, top.flipped)
        lines.append(
            f"<tr><td>{name}{follows}</td><td class='dim'>{count(c.token)}</td>{ref}{arm_side}"
            f"<td class='dim'>{number(c.arm_p - c.ref_p) if c.arm_p != c.ref_p else '0'}</td></tr>"
        )
    left = "full prefill" if reference == "full" else "its oracle"
    head = ("next token", "id", left, "", "logit", f"arm {info.arm}", "", "logit", "change of p")
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<p class="rs-said">{escape(top_k_words(trace, top))}</p><div class="rs-scroll"><table class="rs-topk"><thead>'
        f"<tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _side(rank: int | None, p: float, logit: float, flipped: bool) -> str:
    tone = "flip" if flipped and rank == 1 else "" if rank else "dim"
    place = f"{rank}." if rank else "–"
    bar = f'<i class="rs-bar" style="width:{max(0.0, min(1.0, p)) * 72:.0f}px"></i>'
    return (
        f"<td class='{tone}'>{place} {number(p, 3)}</td><td class='rs-bars'>{bar}</td>"
        f"<td class='dim'>{number(logit, 4)}</td>"
    )


def top_k_words(trace: TraceReader, top: TopK) -> str:
    """Whether the most likely token changed after a position, by what margin, and what that means."""
    where = f"After position {count(top.position)}"
    gap = f"margin {number(top.ref_margin, 3)} logits in the reference, {number(top.arm_margin, 3)} in the arm"
    if not top.flipped:
        return f"{where} the most likely token is the same: {gap}."
    if top.ref_margin == 0:
        return f"{where} the most likely token changes, out of a tie: {gap}."
    if top.noise is None:
        return f"{where} the most likely token changes: {gap}. Record repeat, rechunk or hit as well to know the noise."
    place = "within" if top.inside else "beyond"
    return f"{where} the most likely token changes: {gap}, {place} the {number(top.noise)} that noise moves a gap by."
