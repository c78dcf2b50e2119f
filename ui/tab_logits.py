"""Logits: KL by cut and along the suffix, the text with its flips, and the most likely tokens of both sides."""

from __future__ import annotations

import gradio as gr
from gradio.components import Component

from replayscope.ui import tokens
from replayscope.ui.curves import draw_curves
from replayscope.ui.flips import ROW_METRICS
from replayscope.ui.library import Library
from replayscope.ui.lines import draw_lines
from replayscope.ui.logits import LINE_METRICS, logits_chart
from replayscope.ui.page import figure_json
from replayscope.ui.parts import Content, Tab, attempt, card, empty, figure, html
from replayscope.ui.parts import tokens as token_strip
from replayscope.ui.suffix import suffix_chart
from replayscope.ui.theme import count, escape
from replayscope.ui.view import Choice, chosen_run


def place() -> dict[str, Component]:
    """From all cuts to one token."""
    suffix = figure("rs-logits-suffix", "position")
    with gr.Row(elem_classes="rs-halves"):
        parts = {"logits_tokens": token_strip("rs-strip"), "logits_top": html("rs-top")}
    return {"logits_suffix": suffix, **parts, "logits_cuts": figure("rs-logits", "cut")}


def content(library: Library, c: Choice) -> Content:
    """The logits of the chosen run, token by token, and below them those of every cut."""
    trace = library.open(c.trace)
    if c.reference not in trace.references() or "logits" not in trace.points(c.reference):
        hint = "no logits were compared in this trace; record it with an arm that runs to the end of the layers"
        return {"logits_suffix": "", "logits_tokens": empty(hint), "logits_top": "", "logits_cuts": ""}
    run, by_row = chosen_run(trace, c).index, c.metric if c.metric in ROW_METRICS else "kl"
    by_cut = c.metric if c.metric in LINE_METRICS else "kl"
    key = (run, c.reference, by_row)
    suffix, missing = attempt(library, c, lambda: library.cached(
        c.trace, ("suffix", *key),
        lambda t: figure_json(draw_curves(suffix_chart(t, run, by_row, reference=c.reference))),
    ))  # fmt: skip
    strip, _ = attempt(library, c, lambda: library.cached(
        c.trace, ("strip", *key),
        lambda t: card(
            escape(tokens.strip_words(t, run, reference=c.reference)), "choose a token to see what may follow it",
            tokens.token_strip(t, run, by_row, reference=c.reference),
        ),
    ))  # fmt: skip
    top, no_top = attempt(library, c, lambda: card(
        f"What follows position {count(c.position)}", "the most likely next tokens of both sides",
        tokens.top_k_table(trace, c.position, run, reference=c.reference),
    ))  # fmt: skip
    cuts, _ = attempt(library, c, lambda: library.cached(
        c.trace, ("logits", by_cut, c.reference),
        lambda t: figure_json(draw_lines(logits_chart(t, by_cut, reference=c.reference))),
    ))  # fmt: skip
    return {
        "logits_suffix": suffix, "logits_tokens": strip or missing, "logits_top": top or (no_top if strip else ""),
        "logits_cuts": cuts,
    }  # fmt: skip


TAB = Tab("logits", "Logits", ("trace", "arm", "reference", "cut", "position"), place, content)
