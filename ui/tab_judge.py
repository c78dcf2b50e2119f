"""Judge: results of `judge run` held against a contract: verdict, worst cells, and every cell's drop and KL."""

from __future__ import annotations

import json
from dataclasses import replace

from gradio.components import Component

from replayscope.inspector.errors import ReplayScopeError
from replayscope.inspector.judge_contract import DEFAULT
from replayscope.ui import judged, judging
from replayscope.ui.checked import told
from replayscope.ui.controls import Menu
from replayscope.ui.curves import draw_curves
from replayscope.ui.judge_charts import drop_chart, kl_chart
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.parts import Content, Tab, empty, figure, html
from replayscope.ui.theme import escape
from replayscope.ui.view import Choice, address

NO_RESULTS = (
    "No judged results here yet. <code>replayscope judge run default -o results.jsonl</code> makes some: it runs the "
    "matrix of a contract, and what it writes is judged here under that contract or another one."
)
_PARTS = ("judge_story", "judge_drop", "judge_kl", "judge_details")


def place() -> dict[str, Component]:
    """The verdict, two figures, then the worst cells and the tables."""
    parts = (html("rs-judge-story"), figure("rs-judge-drop"), figure("rs-judge-kl"), html("rs-judge-details"))
    return dict(zip(_PARTS, parts, strict=True))


def content(library: Library, c: Choice) -> Content:
    """The chosen results, or the newest, under the chosen contract, or the one that their runs began with.

    Whatever is wrong with either file becomes one line in the place of the verdict.
    """
    found, contracts = judging.results(library), judging.contracts(library)
    c = replace(c, results=c.results or next(iter(found), ""))
    options = [("the one that the runs began with", ""), ("the shipped one", DEFAULT), *((n, n) for n in contracts)]
    shown = {
        "results": Menu(tuple((name, name) for name in found), c.results if c.results in found else None),
        "contract": Menu(tuple(options), c.contract if c.contract in [value for _, value in options] else None),
    }
    try:
        with told(c.results, "judgement"):
            made = _made(library, c) if c.results else dict.fromkeys(_PARTS, "") | {"judge_story": empty(NO_RESULTS)}
    except ReplayScopeError as error:
        said = empty(escape(library.public(error, c.results)))
        made = dict.fromkeys(_PARTS, "") | {"judge_story": said}
    shorter = Choice(c.trace, results=c.results, contract=c.contract)
    header = {"subtitle": c.results, "trace": c.trace, "address": address("judge", shorter)}
    return {**shown, **made, "header": json.dumps(header)}


def _made(library: Library, c: Choice) -> Content:
    key = ("judged", *judging.version(library, c.results, c.contract))
    return json.loads(library.kept(key, lambda: json.dumps(_drawn(judging.judgement(library, c.results, c.contract)))))


def _drawn(judgement: str) -> Content:
    said = json.loads(judgement)
    parts = (
        judged.story(said), figure_json(draw_curves(drop_chart(said))), figure_json(draw_curves(kl_chart(said))),
        judged.details(said),
    )  # fmt: skip
    return dict(zip(_PARTS, parts, strict=True))


TAB = Tab("judge", "Judge", ("results", "contract"), place, content, alone=True)
