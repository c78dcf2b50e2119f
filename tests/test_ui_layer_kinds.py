"""Window or global, ratio 1 or 2: the kind of a layer beside its number, on axes, in hover, in tables and in files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayscope.inspector import cli, summary
from replayscope.inspector.cache_sizes import load_config
from replayscope.inspector.layer_kinds import by_kind, kind_beside, layer_kinds, named, spans
from replayscope.traces import TraceReader
from replayscope.ui import tables
from replayscope.ui.figures import FIGURES, chart
from replayscope.ui.grid import DESIGN, Grid, MapChart
from replayscope.ui.healing import _ticks
from replayscope.ui.heatmap import draw
from replayscope.ui.numbers import columns
from replayscope.ui.scale import fit
from tests import synthetic

MIXED = ("window", "window", "global") * 2


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A trace of six layers whose config has what those of Hugging Face models have."""
    plain = synthetic.config
    ours = {"replayscope": {"layers": list(MIXED), "kv_sources": list(range(6)), "window": 8}}
    monkeypatch.setattr(synthetic, "config", lambda *sizes: plain(*sizes) | ours)
    synthetic.synthetic_trace(tmp_path / "t.h5")
    return tmp_path / "t.h5"


def drawn(kinds: tuple[str, ...]) -> MapChart:
    value = np.ones((len(kinds), 3))
    cells = (np.ones(value.shape, int), value * 1e-15, np.full(value.shape, DESIGN), np.zeros(value.shape, bool))
    rows = [str(r) for r in range(len(kinds))]
    return MapChart("t", "s", grid=Grid(value, *cells, rows, np.arange(3), np.arange(3) + 1),
                    scale=fit(value, "relative L2"), axis="cut H", kinds=kinds)  # fmt: skip


def test_the_kind_is_read_from_the_config_that_a_trace_has():
    assert layer_kinds({"replayscope": {"layers": ["window", "global"]}}) == ("window", "global")
    v41 = load_config("v41-flash").to_dict()
    assert by_kind(layer_kinds(v41)) == {"window": "0, 1", "ratio 2": "2-19", "ratio 1": "20-39"}
    assert layer_kinds(json.loads(json.dumps(v41))["text_config"] | {"compress_ratios": [0, 1]}) == (
        "window",
        "ratio 1",
    )


@pytest.mark.parametrize(
    "config",
    [{}, {"layers": 6}, {"replayscope": 3}, {"replayscope": {"layers": ["<b>"]}}, {"compress_ratios": [4]},
     {"compress_ratios": [True]}, {"text_config": []}, {"compress_ratios": "window"}],
)  # fmt: skip
def test_a_config_that_does_not_say_gives_none(config):
    assert layer_kinds(config) == () and named(3, layer_kinds(config)) == "3"
    assert kind_beside("layers.3.hidden", ()) == "layers.3.hidden"


@given(st.sets(st.integers(0, 60)))
def test_spans_hold_every_number_once(numbers):
    held = []
    for part in filter(None, spans(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        held += range(int(first), int(last or first) + 1)
    assert held == sorted(numbers)


@given(st.lists(st.sampled_from(["window", "global"]), min_size=1, max_size=80))
def test_a_tick_without_a_kind_is_of_the_same_kind_as_all_rows_down_to_the_next(kinds):
    axis = draw(drawn(tuple(kinds))).layout.yaxis
    ticks = dict(zip(axis.tickvals, axis.ticktext, strict=True))
    if len(set(kinds)) == 1:
        assert not any(" " in text for text in ticks.values()), "one kind says nothing"
        return
    said, below = "", 0
    for row in sorted(ticks):
        number, _, kind = ticks[row].partition(" ")
        said = kind or said
        assert int(number) == row and said == kinds[row]
        assert kind or set(kinds[below : row + 1]) == {said}
        below = row
    assert len(ticks) <= 24


def test_axis_and_hover_say_it_and_keep_quiet_where_it_goes_on():
    figure = draw(drawn(("window",) * 3 + ("global",) + ("window",) * 2))
    assert figure.layout.yaxis.ticktext == ("5", "4 window", "3 global", "2", "1", "0 window")
    assert figure.data[0].text[3][0].startswith("H 0, layer 3, global<br>")


@pytest.mark.parametrize("name", ["cut-layer", "position-layer", "reach", "healing", "tensor", "compare"])
def test_files_have_it_beside_the_layer(name, mixed):
    assert name in FIGURES
    heads, rows = columns(chart(TraceReader(mixed), name))
    at, kind = heads.index("layer"), heads.index("layer_kind")
    assert kind == at + 1 and {(row[at], row[kind]) for row in rows} >= {(1, "window"), (2, "global")}
    assert all(row[kind] == MIXED[row[at]] for row in rows)


def test_a_point_without_layers_and_a_trace_that_does_not_say_have_empty_cells(mixed, tmp_path, monkeypatch):
    heads, rows = columns(chart(TraceReader(mixed), "cut-layer", "kl_max", point="logits", bucket="suffix"))
    assert {row[heads.index("layer_kind")] for row in rows} == {""}
    monkeypatch.undo()
    synthetic.synthetic_trace(tmp_path / "old.h5")
    old = TraceReader(tmp_path / "old.h5")
    heads, rows = columns(chart(old, "cut-layer"))
    assert {row[heads.index("layer_kind")] for row in rows} == {""}
    assert "layers" not in "\n".join(summary.lines(summary.summarise(old))).split("\n")


def test_healing_puts_it_below_the_number_where_a_kind_begins(mixed):
    made = chart(TraceReader(mixed), "healing")
    assert [text for _, text in made.ticks] == ["0\nwindow", "1", "2\nglobal", "3\nwindow", "4", "5\nglobal"]
    assert made.curves[0].hover[2].startswith("<b>layer 2, global</b>")


@pytest.mark.parametrize(
    ("kinds", "fits"),
    [(("window", "global") * 7, True), (("window", "global") * 8, False), (("window",) * 40, False),
     ((*["window"] * 2, *["ratio 2"] * 18, *["ratio 1"] * 8), True), ((*["window"] * 5, "global") * 4, False)],
)  # fmt: skip
def test_below_the_axis_kinds_never_touch(kinds, fits):
    texts = [text for _, text in _ticks([str(i) for i in range(len(kinds))], kinds)]
    assert any("\n" in text for text in texts) == fits
    assert len(texts) <= 27 and texts[-1].startswith(str(len(kinds) - 1))


def test_tables_say_it(mixed, capsys):
    assert cli.main(["show", str(mixed)]) == 0
    out = capsys.readouterr().out
    assert "layers\n  window  0, 1, 3, 4\n  global  2, 5\n" in out
    assert cli.main(["show", str(mixed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer_kinds"] == list(MIXED)
    assert 'title="layer 2, global: ' in tables.arms(TraceReader(mixed))
    assert cli.main(["compare", str(mixed), str(mixed)]) == 0
    assert "layers.2.hidden (global)" in capsys.readouterr().out
