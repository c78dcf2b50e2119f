"""What the page does when a reader acts: from a choice to the parts of the page that change.

Nothing of a visitor is kept here: what a page shows travels with each of its events, as a `Seen`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import gradio as gr

from replayscope.inspector.errors import ReplayScopeError
from replayscope.traces import TraceReader
from replayscope.ui import controls, story, tab_overview, view
from replayscope.ui.checked import told
from replayscope.ui.controls import Menu, Slider
from replayscope.ui.library import Library
from replayscope.ui.parts import Tab, empty
from replayscope.ui.theme import escape
from replayscope.ui.view import Choice

T = TypeVar("T")
NO_TRACES = (
    "No traces here yet. Record one with <code>replayscope sweep -o sweep.h5</code>, or start one on the tab Run."
)


@dataclass(frozen=True)
class Seen:
    """What one visitor's page shows: tab, choice, and a print of the last value of every part that was sent."""

    tab: str = "overview"
    choice: Choice = field(default_factory=lambda: Choice(""))
    sent: dict[str, int] = field(default_factory=dict)


class Session:
    """Every method takes what the page shows and returns new values of `outputs`: a `Seen`, then one per part."""

    def __init__(self, library: Library, first: str, tabs: Sequence[Tab], parts: Sequence[str]):
        self.library, self.first = library, first
        self.tabs = {tab.name: tab for tab in tabs}
        self.parts = list(parts)

    def start(self, query: str) -> list:
        """The page as it opens: what its address asks for, else the first trace."""
        tab, asked = view.from_address(query)
        names = self.library.names()
        name = asked.trace or (self.first if self.first in names else names[0] if names else "")
        seen = Seen(tab if tab in self.tabs else "overview")
        return self._shown(seen, replace(asked, trace=name), {"nav": seen.tab})

    def draw(
        self, seen: Seen, nav: str, trace: str, arm: str, reference: str, point: str, region: str, metric: str,
        other: str, other_arm: str, results: str, contract: str, cut: float, layer: float, position: float,
        head: float, event: gr.EventData,
    ) -> list:  # fmt: skip
        """The page after a choice in a menu, a slider, a click on a figure, or another tab.

        cut: the column of the slider, which counts the cuts of the arm that the page shows.
        """
        given = {
            "trace": trace, "arm": arm, "reference": reference, "point": point, "region": region, "metric": metric,
            "other": other, "other_arm": other_arm, "results": results, "contract": contract, "cut": cut,
            "layer": layer, "position": position, "head": head,
        }  # fmt: skip
        was = seen.choice
        texts = {name: str(given[name] or "") for name in controls.MENUS}
        asked = Choice(
            **texts,
            cut=was.cut,
            layer=_whole(layer, was.layer),
            position=_whole(position, was.position),
            head=_whole(head, 0),
        )
        if (asked.trace, asked.arm) == (was.trace, was.arm):
            asked = replace(asked, cut=self._cut(asked, _whole(cut, -1)))
        elif asked.trace != was.trace:
            asked = replace(asked, cut=-1, layer=-1, position=-1)
        if asked.cut != was.cut and asked.position == was.position:
            asked = replace(asked, position=-1)
        seen = replace(seen, tab=nav if isinstance(nav, str) and nav in self.tabs else seen.tab)
        return self._shown(seen, self._clicked(asked, event), given)

    def describe(self, name: str) -> list:
        """Verdict and tables of a trace, for a page that showed it when it asked; of none they are left as they are."""
        try:
            with told(name, "verdict"):
                made = tab_overview.described(self.library, name) if name else {}
        except ReplayScopeError as error:
            said = f'<div class="rs-empty">{escape(self.library.public(error, name))}</div>'
            made = {"story": json.dumps({"trace": name, "html": said}), "tables": ""}
        return [made.get(part, gr.skip()) for part in ("story", "tables")]

    def _cut(self, asked: Choice, column: int) -> int:
        """H of a column of the slider; -1 where the file cannot say it, which is told when it is drawn."""
        cuts = self._asked(asked, lambda trace: view.menus(trace, replace(asked, other="")).cuts)
        return cuts[min(max(column, 0), len(cuts) - 1)] if cuts else -1

    def _clicked(self, asked: Choice, event: gr.EventData) -> Choice:
        """The choice after a click on a figure: its cut, position or replay length, and its layer."""
        said = event._data or {}  # nothing for a menu or a slider
        axis, at, row = said.get("axis"), _whole(said.get("at"), -1), _whole(said.get("row"), -1)
        if axis == "replay" and at >= 0:
            arm = self._asked(asked, lambda trace: view.arm_of_length(trace, asked.arm, at))
            return replace(asked, arm=arm or asked.arm)
        if axis in ("cut", "position") and at >= 0:
            asked = replace(asked, **{"position": -1, axis: at})
        elif axis != "layer":
            return asked
        return replace(asked, layer=row) if row >= 0 else asked

    def _asked(self, asked: Choice, answer: Callable[[TraceReader], T]) -> T | None:
        """What the chosen trace answers; None where it cannot, of which `_shown` tells."""
        try:
            with told(asked.trace, "view"):
                return answer(self.library.open(asked.trace))
        except ReplayScopeError:
            return None

    def _shown(self, seen: Seen, asked: Choice, given: dict[str, Any]) -> list:
        """New values of the parts that change.

        The one place where a file of a stranger becomes a view, and where its faults become one line without a path.
        """
        choice, wanted = asked, ""
        try:
            with told(asked.trace, "view"):
                choice, values = self._viewed(seen.tab, asked)
            wanted = choice.trace if seen.tab == "overview" and values["header"] else ""
        except ReplayScopeError as error:
            values = self._blank(escape(self.library.public(error, asked.trace)), asked.trace)
        stale = choice.trace != seen.choice.trace or bool(values["note"])
        if self.tabs[seen.tab].alone:
            values |= {"note": "", **self.tabs[seen.tab].content(self.library, choice)}
        if stale:
            # What stood on other tabs was said of another trace.
            kept = {"nav", *controls.OF_JUDGE, *values}
            values = {**{part: "" for part in self.parts if part not in kept}, **values}
        values |= {"nav": seen.tab} if given.get("nav") else {}
        updates, sent = self._changed(values, seen.sent, given)
        if wanted:
            # `describe` fills them; what they hold then is not known here.
            sent = {part: print_ for part, print_ in sent.items() if part not in ("story", "tables")}
        return [replace(seen, choice=choice, sent=sent), wanted, *updates]

    def _viewed(self, tab: str, asked: Choice) -> tuple[Choice, dict[str, Any]]:
        """The choice mended to one that the trace has, and the parts of the page that show it."""
        if not asked.trace:
            return asked, self._blank(NO_TRACES, "")
        trace = self.library.open(asked.trace)
        other = self.library.open(asked.other) if asked.other not in ("", asked.trace) else None
        shown = view.menus(trace, asked, other)
        held = controls.of(shown, self.library.names())
        header = _header(trace, tab, shown.choice)
        return shown.choice, {
            **held,
            "header": header,
            "note": "",
            **({} if self.tabs[tab].alone else self.tabs[tab].content(self.library, shown.choice)),
        }

    def _blank(self, why: str, name: str) -> dict[str, Any]:
        """A page without figures, tables and choices but for the menu of traces, and one line that says why; HTML."""
        return {**controls.nothing(self.library.names(), name), "header": "", "note": empty(why)}

    def _changed(self, values: dict, sent: dict[str, int], given: dict[str, Any]) -> tuple[list, dict[str, int]]:
        """For each part its new value, or none where the page has it already."""
        updates, sent = [], dict(sent)
        for part in self.parts:
            value = values.get(part)
            print_ = hash(value)
            stands = not isinstance(value, Menu | Slider) or value.value == given.get(part)
            if value is None or (sent.get(part) == print_ and stands):
                updates.append(gr.skip())
                continue
            sent[part] = print_
            if isinstance(value, Menu):
                updates.append(value.update())
            else:
                updates.append(value.update(given.get(part)) if isinstance(value, Slider) else value)
        return updates, sent


def _header(trace: TraceReader, tab: str, choice: Choice) -> str:
    return json.dumps({
        "subtitle": story.subtitle(trace), "trace": choice.trace, "address": view.address(tab, choice),
        "cut": choice.cut, "layer": choice.layer, "position": choice.position,
    })  # fmt: skip


def _whole(value: object, otherwise: int) -> int:
    """A number as a browser sends it, made whole; a thing that is none gives the other value."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return int(value) if number else otherwise  # type: ignore[arg-type]
