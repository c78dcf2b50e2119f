"""A visitor of the page without a browser."""

import gradio as gr

from replayscope.ui import app, controls
from replayscope.ui.library import Library
from replayscope.ui.session import Seen, Session
from replayscope.ui.view import Choice

CUTS = (4, 8, 9, 24, 40, 50, 63)
PARTS = (
    "header", "nav", *controls.MENUS, *controls.SLIDERS, "note", "story", "overview_cut", "overview_position", "tables",
    "cut_map", "cut_cell",
)  # fmt: skip


class Visitor:
    """A page in numbers: what it shows, and how to act on it."""

    def __init__(self, root, query="?trace=a.h5", cuts=CUTS):
        self.cuts = cuts
        self.act = Session(Library(root), "", app.TABS, PARTS)
        self.took(self.act.start(query))

    def took(self, answer):
        self.seen, self.wanted, *values = answer
        assert isinstance(self.seen, Seen) and len(values) == len(PARTS)
        self.new = {part: value for part, value in zip(PARTS, values, strict=True) if value != gr.skip()}
        return self.new

    def do(self, event=None, nav=None, **changed):
        c = self.seen.choice
        cuts = self.cuts if c.trace == "a.h5" else (24, 30)
        given = {name: getattr(c, name) for name in (*controls.MENUS, *controls.SLIDERS)}
        given["cut"] = cuts.index(c.cut) if c.cut in cuts else 0
        nav = self.seen.tab if nav is None else nav
        return self.took(self.act.draw(self.seen, nav, **{**given, **changed}, event=gr.EventData(None, event)))

    @property
    def choice(self) -> Choice:
        return self.seen.choice
