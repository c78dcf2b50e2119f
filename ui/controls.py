"""The menus and sliders above the tabs: how they look, and what changes of them for a new choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from replayscope.ui.theme import count
from replayscope.ui.view import Menus, Options

MENUS = {
    "trace": "trace", "arm": "arm", "reference": "compared with", "point": "hook point", "region": "region",
    "metric": "metric", "other": "second trace", "other_arm": "second arm",
    "results": "judged results", "contract": "contract",
}  # fmt: skip
# Menus whose options no trace says: the tab Judge fills them.
OF_JUDGE = ("results", "contract")
SLIDERS = ("cut", "layer", "position", "head")


@dataclass(frozen=True)
class Menu:
    """Options as (words, value) and the chosen value, None for none."""

    options: tuple[tuple[str, str], ...]
    value: str | None

    def update(self) -> Any:
        """The change for the page."""
        return gr.Dropdown(list(self.options), value=self.value)


@dataclass(frozen=True)
class Slider:
    """What a slider reaches, where it stands, what is written above it, and whether there is a choice at all."""

    first: int
    last: int
    value: int
    label: str
    shown: bool = True

    def update(self, asked: object) -> Any:
        """The change for the page. A slider that stands where it should is not set again under the hand."""
        value: dict[str, Any] = {} if asked == self.value else {"value": self.value}
        return gr.Slider(
            minimum=self.first, maximum=max(self.last, self.first + 1), step=1, label=self.label, visible=self.shown,
            **value,
        )  # fmt: skip


def place() -> dict[str, gr.Dropdown | gr.Slider]:
    """Two rows: menus, and sliders below them."""
    with gr.Row(elem_classes="rs-controls"):
        menus = {
            name: gr.Dropdown([], label=label, min_width=130, elem_id=f"rs-{name}", elem_classes=f"rs-for-{name}")
            for name, label in MENUS.items()
        }
    with gr.Row(elem_classes="rs-sliders"):
        sliders = {
            name: gr.Slider(
                0, 1, 0, step=1, label=name, min_width=180, buttons=[], visible=False, elem_id=f"rs-{name}",
                elem_classes=f"rs-for-{name}",
            )
            for name in SLIDERS
        }  # fmt: skip
    return {**menus, **sliders}


def of(shown: Menus, traces: list[str]) -> dict[str, Menu | Slider]:
    """What the controls hold for a choice."""
    c = shown.choice
    lists: dict[str, Options] = {
        "trace": [(name, name) for name in traces], "arm": shown.arms, "reference": shown.references,
        "point": shown.points, "region": shown.regions, "metric": shown.metrics,
        "other": [("the same trace", ""), *((name, name) for name in traces if name != c.trace)],
        "other_arm": shown.other_arms,
    }  # fmt: skip
    at = shown.cuts.index(c.cut)
    return {
        **{name: Menu(tuple(options), getattr(c, name)) for name, options in lists.items()},
        "cut": Slider(
            0, len(shown.cuts) - 1, at, f"cut H = {count(c.cut)}   ({count(at + 1)} of {count(len(shown.cuts))})",
            shown.has_cut and len(shown.cuts) > 1,
        ),
        "layer": Slider(0, shown.layers - 1, c.layer, f"layer {count(c.layer)}", shown.layers > 1),
        "position": Slider(
            shown.first, shown.stop - 1, c.position, f"position {count(c.position)}", shown.stop - shown.first > 1
        ),
        "head": Slider(0, 1, 0, "head", False),
    }  # fmt: skip


def nothing(traces: list[str], chosen: str | None) -> dict[str, Menu | Slider]:
    """The controls where there is nothing to choose but a trace."""
    menus = {name: Menu((), None) for name in MENUS if name not in OF_JUDGE}
    listed = Menu(tuple((name, name) for name in traces), chosen if chosen in traces else None)
    return {**menus, "trace": listed, **{name: Slider(0, 1, 0, name, False) for name in SLIDERS}}
