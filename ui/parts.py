"""The pieces that tabs are made of: a place for a figure, one for HTML, one for HTML that may come late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from replayscope.inspector.errors import UsageError
from replayscope.ui.library import Library
from replayscope.ui.theme import escape
from replayscope.ui.view import Choice

Content = dict[str, Any]


def when_ready(script: str) -> str:
    """JavaScript of a part, run when the scripts of the page's head are there: they may arrive after the parts."""
    ready = "window.Plotly && window.replayscope && window.replayscope.navigate"
    return f"(async () => {{ while (!({ready})) await new Promise((next) => setTimeout(next, 10));\n{script}}})();"


_FIGURE = """<figure class="rs-card rs-figure" hidden><figcaption><h2></h2><p></p></figcaption>
<div class="rs-plot"></div><div class="rs-key"></div></figure>"""
_DRAW = when_ready("""
const draw = () => window.replayscope.place(element.querySelector('.rs-figure'), props.value);
element.addEventListener('rs-select', (event) => {
  trigger('select', window.replayscope.clicked(event.target, event.detail));
});
watch('value', draw);
draw();
""")
_TOKENS = when_ready("""
window.replayscope.choosesTokens(element, (detail) => trigger('select', detail));
watch('value', () => window.replayscope.markToken());
""")
# What is worked out for a trace may arrive when another one is shown already: then it is dropped.
_LATE = when_ready("""
window.replayscope.late((shown) => {
  const late = props.value ? JSON.parse(props.value) : { trace: shown, html: '' };
  if (late.trace === shown) element.querySelector('.rs-late').innerHTML = late.html;
});
watch('value', window.replayscope.showLate);
window.replayscope.showLate();
""")


@dataclass(frozen=True)
class Tab:
    """One tab of the page.

    name: in the address. title: as the reader sees it. controls: the menus and sliders that it follows. place: makes
    its parts, by name, inside the tab. content: the values of some parts for a choice, a pure function of the trace.
    own: parts that the tab's own events fill. alone: what it shows is of no trace, so that it shows it without one.
    """

    name: str
    title: str
    controls: tuple[str, ...]
    place: Callable[[], dict[str, Component]]
    content: Callable[[Library, Choice], Content] = lambda library, choice: {}
    own: tuple[str, ...] = ()
    alone: bool = False


def figure(elem_id: str, axis: str = "") -> gr.HTML:
    """A place for one figure; its value is plotly JSON, empty for none. A click on it is its event `select`.

    axis: what a column means, `cut`, `position` or `replay`, or `layer` for the row; empty where a click chooses
    nothing.
    """
    return gr.HTML(
        "", html_template=_FIGURE, js_on_load=_DRAW, elem_id=elem_id, elem_classes=["rs", f"rs-by-{axis or 'none'}"],
        apply_default_css=False, min_width=0,
    )  # fmt: skip


def html(elem_id: str) -> gr.HTML:
    """A place for HTML."""
    return gr.HTML("", elem_id=elem_id, elem_classes="rs", apply_default_css=False, min_width=0)


def tokens(elem_id: str) -> gr.HTML:
    """A place for HTML with the tokens of a run; a click on one is the event `select`."""
    return gr.HTML("", js_on_load=_TOKENS, elem_id=elem_id, elem_classes="rs", apply_default_css=False, min_width=0)


def late(elem_id: str) -> gr.HTML:
    """A place for HTML about a whole trace: {"trace": name, "html": …} as JSON, shown if that trace still is."""
    return gr.HTML(
        "", html_template='<div class="rs-late"></div>', js_on_load=_LATE, elem_id=elem_id, elem_classes="rs",
        apply_default_css=False, min_width=0,
    )  # fmt: skip


def card(title: str, sentence: str, body: str, extra: str = "") -> str:
    """HTML of a card; title, sentence and body are HTML."""
    return f'<div class="rs-card {extra}"><h2>{title}</h2><p>{sentence}</p>{body}</div>'


def empty(text: str) -> str:
    """One line, as HTML, where there is nothing to show."""
    return f'<div class="rs-empty">{text}</div>'


def attempt(library: Library, c: Choice, make: Callable[[], str]) -> tuple[str, str]:
    """What `make` draws, and nothing; where the trace does not hold what it needs, nothing, and a line that says so."""
    try:
        return make(), ""
    except UsageError as error:
        return "", empty(escape(library.public(error, c.trace)))
