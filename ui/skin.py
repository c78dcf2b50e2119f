"""How the Gradio page looks: the project's own theme instead of the stock one, and the style of the page."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from gradio.themes import Base
from gradio.themes.utils.fonts import Font

from replayscope.ui.controls import MENUS, SLIDERS
from replayscope.ui.page import script, stylesheet
from replayscope.ui.parts import Tab
from replayscope.ui.theme import FONT, MONO

HERE = Path(__file__).parent


def theme() -> Base:
    """Every colour is one of the page's CSS variables, so light and dark are the same theme."""
    made = Base(font=[_Stack(FONT)], font_mono=[_Stack(MONO)], radius_size="sm", text_size="sm", spacing_size="md")
    colours = {
        "body_background_fill": "ground",
        "body_text_color": "ink",
        "body_text_color_subdued": "dim",
        "background_fill_primary": "card",
        "background_fill_secondary": "ground",
        "block_background_fill": "card",
        "block_border_color": "line",
        "block_info_text_color": "dim",
        "block_label_background_fill": "card",
        "block_label_text_color": "dim",
        "block_title_text_color": "dim",
        "border_color_primary": "line",
        "border_color_accent": "accent",
        "color_accent": "accent",
        "color_accent_soft": "ground",
        "input_background_fill": "card",
        "input_background_fill_focus": "card",
        "input_border_color": "line",
        "input_border_color_focus": "accent",
        "input_border_color_hover": "dim",
        "input_placeholder_color": "dim",
        "loader_color": "accent",
        "link_text_color": "accent",
        "slider_color": "accent",
        "panel_background_fill": "card",
        "panel_border_color": "line",
        "button_secondary_background_fill": "card",
        "button_secondary_background_fill_hover": "ground",
        "button_secondary_border_color": "line",
        "button_secondary_text_color": "ink",
        "error_background_fill": "card",
        "error_border_color": "line",
        "error_text_color": "ink",
        "error_icon_color": "dim",
    }
    values = {name: f"var(--rs-{colour})" for name, colour in colours.items()}
    plain = {
        "block_shadow": "none", "input_shadow": "none", "input_shadow_focus": "none", "block_border_width": "0px",
        "block_label_border_width": "0px", "block_title_text_weight": "400", "layout_gap": "14px",
        "block_padding": "0px",
    }  # fmt: skip
    known = signature(Base.set).parameters
    dark = {f"{name}_dark": value for name, value in values.items() if f"{name}_dark" in known}
    return made.set(**values, **dark, **plain)


class _Stack(Font):
    """A whole font stack as it is; nothing is fetched from another host."""

    def __init__(self, stack: str):
        super().__init__(stack)

    def __str__(self) -> str:
        return self.name


def head(plotly_url: str, tabs: Sequence[Tab]) -> str:
    """What the page loads before anything is drawn, all of it from this server.

    The style stands here and not in Gradio's `css`, which rewrites selectors and so loses those of the body.
    """
    style = "\n".join((stylesheet(), (HERE / "app.css").read_text(), *map(_only, tabs)))
    code = script() + "\n" + (HERE / "shell.js").read_text()
    return f'<style>\n{style}\n</style>\n<script src="{plotly_url}"></script>\n<script>\n{code}\n</script>'


def _only(tab: Tab) -> str:
    """CSS that hides the other tabs, and the controls that this one does not follow, while it is open."""
    unused = [name for name in (*MENUS, *SLIDERS) if name not in tab.controls]
    hidden = [f".rs-tab:not(#rs-tab-{tab.name})", *(f".rs-for-{name}" for name in unused)]
    hidden += [f".rs-{row}" for row, names in (("controls", MENUS), ("sliders", SLIDERS)) if {*names} <= {*unused}]
    here = f'body[data-tab="{tab.name}"]'
    return ", ".join(f"{here} {one}" for one in hidden) + " { display: none !important; }"
