"""The one visual language: colours with a fixed meaning, number formatting, the plotly template.

Figures are always built in the colours of `LIGHT`. Dark is the same figure with every colour looked up in a
one-to-one table (`DARK_OF`), here for images and in figure.js for pages, so that one file serves both.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

import plotly.graph_objects as go

FONT = 'ui-sans-serif, system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'


@dataclass(frozen=True)
class Palette:
    """Colours of one mode. `bug` is the only red and `flip` the only orange; nothing else may use them."""

    ground: str
    card: str
    ink: str
    dim: str
    line: str
    accent: str
    identical: str
    absent: str
    hatch: str
    flip: str
    bug: str
    magnitude: tuple[str, ...]
    below: tuple[str, ...]
    arms: tuple[str, ...]

    def colours(self) -> list[str]:
        """Every colour once, in the order of the fields."""
        flat: list[str] = []
        for value in vars(self).values():
            flat.extend([value] if isinstance(value, str) else value)
        return flat


LIGHT = Palette(
    ground="#fafaf7",
    card="#ffffff",
    ink="#1b1f24",
    dim="#6b7280",
    line="#e4e3dd",
    accent="#0f6e84",
    identical="#d8d7d1",
    absent="#efeee9",
    hatch="#cfcdc4",
    flip="#d97d00",
    bug="#c62828",
    magnitude=("#f3f6f2", "#c4ded7", "#7fbdc4", "#3e8faa", "#265c85", "#1a2c54"),
    below=("#4a2a68", "#7d5a9e", "#b59fca", "#e6dfee"),
    arms=("#20567f", "#8353a3", "#4f7a3f", "#3b93a8", "#7a6a52", "#9aa0a8"),
)
DARK = Palette(
    ground="#0f1316",
    card="#161b1f",
    ink="#e7e9eb",
    dim="#8b949e",
    line="#273036",
    accent="#4fb3c8",
    identical="#3a4248",
    absent="#1e2429",
    hatch="#343d44",
    flip="#ffb74d",
    bug="#ef5350",
    magnitude=("#182430", "#1c425a", "#266a86", "#4a9cae", "#8ccece", "#e8f7f3"),
    below=("#e4d3f2", "#b493d0", "#76579a", "#3a2c4c"),
    arms=("#7fb6e0", "#c39ae0", "#94c383", "#62c4d6", "#c4b08e", "#7d858d"),
)
PALETTES = {"light": LIGHT, "dark": DARK}
DARK_OF = dict(zip(LIGHT.colours(), DARK.colours(), strict=True))

# Keys whose strings are words of the user or of the data, never colours.
WORDS = frozenset({"text", "hovertext", "customdata", "ticktext", "hovertemplate", "x", "y", "z", "name", "meta"})


def scale(colours: tuple[str, ...]) -> list[list]:
    """A plotly colour scale with `colours` at equal distances."""
    last = len(colours) - 1
    return [[i / last, colour] for i, colour in enumerate(colours)]


def number(value: float | None, digits: int = 2) -> str:
    """A number as every part of the tool writes it: `0.083`, `2.1e-6`, `1,024`, `0`, `inf`, and `–` for none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 1e4:
        if size >= 10**digits:
            return f"{value:,.0f}"
        places = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{value:.{places}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def count(value: int) -> str:
    """A whole number with thousands separated: `2,048`."""
    return f"{int(value):,}"


def plural(value: int, noun: str) -> str:
    """`1 cut`, `64 cuts`."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def escape(text: str) -> str:
    """Text that plotly's pseudo-HTML and a page show as it is; control characters become visible."""
    visible = "".join(c if c.isprintable() else {"\n": "↵", "\t": "⇥"}.get(c, "␦") for c in str(text))
    return html.escape(visible, quote=True)


def recolour(figure: go.Figure) -> go.Figure:
    """The same figure in the colours of dark mode."""

    def walk(node: object, key: str = "") -> object:
        if isinstance(node, dict):
            return {k: walk(v, k) for k, v in node.items() if k != "bdata"} | (
                {"bdata": node["bdata"]} if "bdata" in node else {}
            )
        if key in WORDS:
            return node
        if isinstance(node, list | tuple):
            return [walk(v, key) for v in node]
        return DARK_OF.get(node[:7], node[:7]) + node[7:] if isinstance(node, str) and node[:1] == "#" else node

    return go.Figure(walk(figure.to_plotly_json()))


def css_variables() -> str:
    """The palettes as CSS variables; dark under a class on the body, except on paper."""

    def block(selector: str, colours: Palette) -> str:
        named = "; ".join(f"--rs-{k}: {v}" for k, v in vars(colours).items() if isinstance(v, str))
        steps = "; ".join(f"--rs-m{i}: {colour}" for i, colour in enumerate(colours.magnitude))
        return f"{selector} {{ {named}; {steps} }}"

    fonts = f":root {{ --rs-font: {FONT}; --rs-mono: {MONO} }}"
    return "\n".join((fonts, block(":root", LIGHT), f"@media screen {{ {block('body.dark', DARK)} }}"))


def template() -> go.layout.Template:
    """Quiet axes without a grid, one font, room to breathe. Colours are those of `LIGHT`."""
    axis = {
        "showgrid": False,
        "zeroline": False,
        "showline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": LIGHT.line,
        "tickfont": {"size": 12, "color": LIGHT.dim},
        "title": {"font": {"size": 13, "color": LIGHT.dim}, "standoff": 8},
        "fixedrange": False,
        "automargin": True,
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": LIGHT.ink},
            "paper_bgcolor": LIGHT.card,
            "plot_bgcolor": LIGHT.card,
            "colorway": list(LIGHT.arms),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": LIGHT.card,
                "bordercolor": LIGHT.line,
                "font": {"family": FONT, "size": 13, "color": LIGHT.ink},
                "align": "left",
            },
            "title": {
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "yref": "container",
                "y": 1,
                "yanchor": "top",
                "pad": {"t": 18},
                "font": {"size": 17, "color": LIGHT.ink, "weight": 600},
                "subtitle": {"font": {"size": 12, "color": LIGHT.dim}},
            },
            "legend": {
                "orientation": "h",
                "traceorder": "normal",
                "x": 0,
                "xanchor": "left",
                "y": -0.16,
                "yanchor": "top",
                "font": {"size": 12, "color": LIGHT.dim},
                "bgcolor": "#0000",
            },
            "margin": {"l": 48, "r": 24, "t": 88, "b": 64},
            "dragmode": "zoom",
        }
    )
