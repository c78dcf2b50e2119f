"""What the page is sent of a figure: the same figure, with the words of its cells in parts."""

import json

import plotly.graph_objects as go
import pytest

from replayscope.ui.figures import cut_layer, position_layer
from replayscope.ui.page import figure_json, packed_json
from tests.memory import memory


def unpacked(packed: str) -> dict:
    """As figure.js does it."""
    figure = json.loads(packed)
    for trace in figure["data"]:
        if words := trace.pop("words", None):
            parts = zip(words["at"], words["rows"], strict=True)
            trace["text"] = [
                ["" if i < 0 else words["columns"][c] + row + words["rests"][i] for c, i in enumerate(line)]
                for line, row in parts
            ]
    return figure


@pytest.mark.parametrize("draw", [cut_layer, position_layer])
def test_a_packed_figure_is_the_same_figure(draw):
    figure = draw(memory())
    assert unpacked(packed_json(figure)) == json.loads(figure_json(figure))
    maps = [trace for trace in json.loads(packed_json(figure))["data"] if trace["type"] == "heatmap"]
    assert maps and all("words" in trace and "text" not in trace for trace in maps)
    assert figure.data[0].text is not None, "the figure itself is left as it was"


@pytest.mark.parametrize(
    "odd", ["H 4<br>no row", "H 4, layer 0", "H 9, layer 0<br>another column's", "H 4, layer 7<br>another row's"]
)
def test_words_of_another_form_stay_as_they_are(odd):
    """The twin: of the same cells in the usual form all are packed."""
    text = [["H 4, layer 0<br>x", "H 5, layer 0<br>x"], ["H 4, layer 1<br>x", ""]]
    for first, packed in (("H 4, layer 0<br>x", True), (odd, False)):
        text[0][0] = first
        figure = go.Figure(go.Heatmap(z=[[1, 2], [3, 4]], text=text))
        assert ("words" in json.loads(packed_json(figure))["data"][0]) is packed
        assert unpacked(packed_json(figure)) == json.loads(figure_json(figure))


def test_many_cells_are_a_fraction_of_their_words():
    figure = position_layer(memory())
    rows, columns = 40, 256
    text = [[f"position {c}, layer {r}<br>0.{c:03}, n 1, floor unknown<br>by design" for c in range(columns)]
            for r in range(rows)]  # fmt: skip
    figure.data[0].text = text
    assert len(packed_json(figure)) < 0.2 * len(figure_json(figure))
    assert unpacked(packed_json(figure)) == json.loads(figure_json(figure))
