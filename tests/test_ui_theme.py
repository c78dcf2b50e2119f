"""The visual language: numbers, colours with one meaning, text that cannot break out."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go
import pytest

from replayscope.ui import theme
from replayscope.ui.page import stylesheet


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0834, "0.083"), (2.14e-6, "2.1e-6"), (1024, "1,024"), (0, "0"), (-0.0, "0"), (1, "1"), (12.34, "12"),
        (999.6, "1,000"), (1e-3, "0.001"), (9.9e-4, "9.9e-4"), (1e-12, "1e-12"), (123456, "1.2e5"), (-0.5, "-0.5"),
        (float("inf"), "inf"), (float("-inf"), "-inf"), (float("nan"), "–"), (None, "–"),
    ],
)  # fmt: skip
def test_number(value, shown):
    assert theme.number(value) == shown


def test_every_colour_has_one_partner_in_the_dark():
    light, dark = theme.LIGHT.colours(), theme.DARK.colours()
    assert len(set(light)) == len(light) == len(dark) == len(theme.DARK_OF)


def test_red_is_for_bugs_and_orange_for_flips():
    for palette in theme.PALETTES.values():
        for colour in set(palette.colours()) - {palette.bug, palette.flip}:
            r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
            assert not (r > 180 and g < 110 and b < 110), f"{colour} looks like a bug"
            assert not (r > 200 and 100 < g < 190 and b < 90), f"{colour} looks like a flip"


def test_recolour_changes_colours_and_no_words():
    figure = go.Figure(layout={"paper_bgcolor": theme.LIGHT.card, "template": theme.template()})
    figure.add_scatter(x=[0], y=[1], text=[theme.LIGHT.card], marker={"color": theme.LIGHT.flip})
    dark = theme.recolour(figure).to_plotly_json()
    assert dark["layout"]["paper_bgcolor"] == theme.DARK.card
    assert dark["data"][0]["marker"]["color"] == theme.DARK.flip
    assert dark["data"][0]["text"] == [theme.LIGHT.card], "a token that looks like a colour stays as it is"
    assert figure.layout.paper_bgcolor == theme.LIGHT.card, "the figure itself is not changed"


def test_escape_shows_what_is_there():
    assert theme.escape("<b>\n\x00\t&'\udce9") == "&lt;b&gt;↵␦⇥&amp;&#x27;␦"


def test_css_knows_every_variable_it_uses():
    css = stylesheet(document=True) + (Path(theme.__file__).parent / "app.css").read_text()
    used = set(re.findall(r"var\((--rs-[\w-]+)\)", css))
    assert used <= set(re.findall(r"(--rs-[\w-]+):", css))


def test_nothing_of_the_page_is_fetched_from_elsewhere():
    folder = Path(theme.__file__).parent
    for file in folder.iterdir():
        if file.suffix in (".css", ".js", ".py"):
            assert not re.search(r"(?:https?:)?//(?:cdn|fonts|unpkg|www)\.", file.read_text()), file.name


def test_the_viewer_needs_no_torch():
    modules = ("export", "report", "library", "view", "tokens", *(("printed",) if find_spec("matplotlib") else ()))
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module('replayscope.ui.' + m)\n"
    code += "print([m for m in ('torch', 'triton', 'gradio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
