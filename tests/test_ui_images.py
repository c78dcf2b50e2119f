"""Figures as a browser draws them: small PDFs, nothing on stderr, and a key that lies on nothing."""

import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from replayscope.traces import TraceReader
from replayscope.ui.browser import plain
from replayscope.ui.export import WIDTH, image
from replayscope.ui.figures import chart, figure
from replayscope.ui.grid import ABSENT, DESIGN, NOISE, Grid, MapChart
from replayscope.ui.page import facts
from replayscope.ui.scale import fit
from replayscope.ui.theme import recolour
from tests import synthetic


def patched() -> MapChart:
    """A map in which some 400 single cells are within the noise or not computed."""
    draw = np.random.default_rng(0)
    value = draw.lognormal(size=(12, 200)) * 1e-3
    kind = np.where(draw.random(value.shape) < 0.1, NOISE, np.where(draw.random(value.shape) < 0.1, ABSENT, DESIGN))
    kind[:3, 50:120] = ABSENT
    value[kind == ABSENT] = np.nan
    cells = (np.ones(value.shape, int), np.full(value.shape, 1e-6), kind, np.zeros(value.shape, bool))
    grid = Grid(value, *cells, [str(i) for i in range(12)], np.arange(200), np.arange(200) + 1)
    return MapChart("t", "s", meta={"trace": "t.h5"}, grid=grid, scale=fit(value, "relative L2"), axis="cut H")


@pytest.fixture
def kinds(tmp_path, monkeypatch):
    """A trace whose layers are of two kinds, so that the ticks of `healing` have two lines."""
    usual = synthetic.config
    layers = {"replayscope": {"layers": ["window", "global"] * 3, "kv_sources": list(range(6)), "window": 8}}
    monkeypatch.setattr(synthetic, "config", lambda *sizes: usual(*sizes) | layers)
    synthetic.synthetic_trace(tmp_path / "t.h5")
    return TraceReader(tmp_path / "t.h5")


def boxes(trace) -> np.ndarray:
    x, width, base, y = (np.array(values, float) for values in (trace.x, trace.width, trace.base, trace.y))
    return np.stack([x - width / 2, x + width / 2, base, base + y], 1)


@pytest.mark.parametrize("dark", [False, True])
def test_of_every_pattern_one_box_is_left_and_every_box_is_marked(dark):
    before = figure(patched())
    before = recolour(before) if dark else before
    after = plain(before, WIDTH, facts(before)["height"])
    patterns = {trace.name: trace for trace in before.data if trace.type == "bar"}
    assert set(patterns) == {"not computed", "within the noise"}
    kept = [trace for trace in after.data if trace.type == "bar" and trace.marker.pattern.shape]
    assert {trace.name for trace in kept} == set(patterns) and all(trace.x == (None,) for trace in kept)
    for name, mode in (("not computed", "lines"), ("within the noise", "markers")):
        (drawn,) = [t for t in after.data if t.type == "scatter" and t.name == name]
        assert drawn.mode == mode and drawn.showlegend is False
        assert {drawn.line.color, drawn.marker.color} == {patterns[name].marker.pattern.fgcolor}
        x, y = np.array(drawn.x, float), np.array(drawn.y, float)
        if mode == "lines":
            assert np.isnan(x[2::3]).all()
            x, y = (x[0::3] + x[1::3]) / 2, (y[0::3] + y[1::3]) / 2
        left, right, bottom, top = boxes(patterns[name]).T
        inside = (x >= left[:, None]) & (x <= right[:, None]) & (y >= bottom[:, None]) & (y <= top[:, None])
        assert inside.any(axis=1).all(), "a box without a mark"
        assert inside.any(axis=0).all(), "a mark outside of all boxes"
    (ground,) = [t for t in after.data if t.type == "bar" and not t.marker.pattern.shape]
    assert ground.marker.color == patterns["not computed"].marker.pattern.bgcolor
    assert np.array_equal(boxes(ground), boxes(patterns["not computed"]))


@pytest.mark.browser
def test_a_pdf_is_small_and_holds_no_picture_of_a_box(chromium):
    if find_spec("kaleido") is None:
        return
    data = image(patched(), "pdf")
    assert data.startswith(b"%PDF-") and len(data) < 1_000_000
    assert data.count(b"/Subtype /Image") <= 16, "one for each heatmap and each entry of the key, with their masks"


@pytest.mark.parametrize("name", ["healing", "cut-layer", "compare"])
def test_the_key_has_room_below_the_title_of_x(kinds, name):
    made = figure(chart(kinds, name))
    layout = made.layout
    lines = 1 + max(text.count("<br>") for text in layout.xaxis.ticktext)
    assert lines == (2 if name == "healing" else 1)
    axes = layout.height - layout.margin.t - layout.margin.b
    assert -layout.legend.y * axes >= 41.9 + 16 * (lines - 1) and layout.margin.b == 64 + 16 * (lines - 1)
    assert facts(made)["height"] == layout.height


def test_the_key_has_room_in_a_map_of_one_row(kinds):
    layout = figure(chart(kinds, "cut-layer", "kl", point="logits", bucket="suffix")).layout
    assert -layout.legend.y * (layout.height - layout.margin.t - layout.margin.b) >= 41.9


@pytest.mark.browser
def test_no_title_lies_on_the_key(kinds, chromium):
    if find_spec("kaleido") is None:
        return
    svg = image(chart(kinds, "healing"), "svg").decode()
    title = re.search(r'<text class="xtitle"[^>]* y="([\d.]+)"', svg)
    key = re.search(r'<g class="legend"[^>]*transform="translate\([\d.]+,\s*([\d.]+)\)"', svg)
    # The letters of the key begin some 5 pixels below its top, those of the title end 4 below their line.
    assert title and key and float(title[1]) <= float(key[1]) + 1


SCRIPT = """
import logging, sys, warnings
import plotly.graph_objects as go
from replayscope.inspector import cli
from replayscope.ui import export

def to_image(*_, **__):
    try:
        raise ValueError("half a message")
    except ValueError:
        logging.getLogger("choreographer.channels.pipe").exception("JSONError decoding message. Ignoring")
    warnings.warn_explicit("left behind", UserWarning, "_tmpfile.py", 1, module="choreographer.utils._tmpfile")
    return b"drawn"

go.Figure.to_image = to_image
export.find_spec = lambda name: name
sys.exit(cli.main(sys.argv[1:]))
"""


def test_nothing_of_the_pipe_to_the_browser_is_on_stderr_but_with_debug(kinds, tmp_path):
    words = [sys.executable, "-c", SCRIPT, "plot", str(kinds.path), "--figure", "healing", "-o"]
    out = tmp_path / "a.png"
    done = subprocess.run([*words, str(out)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "") and out.read_bytes() == b"drawn"
    done = subprocess.run([*words, str(tmp_path / "b.png"), "--debug"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "half a message" in done.stderr
