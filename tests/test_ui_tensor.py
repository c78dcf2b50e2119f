"""Single values: those of the file, of both sides, and no more of the file than is shown."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from replayscope.inspector.errors import UsageError
from replayscope.traces import RunInfo, Tokens, TraceReader, TraceWriter
from replayscope.ui.grid import ABSENT, IDENTICAL
from replayscope.ui.panels import draw_panels
from replayscope.ui.states import NotRecorded
from replayscope.ui.tensor import ROWS, SIDES, stored_points, tensor_chart
from tests.synthetic import synthetic_trace

TOKENS, CUT, WINDOW, HEADS, WIDTH = 4096, 2048, 8, 2, 256


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> TraceReader:
    path = tmp_path_factory.mktemp("tensor") / "t.h5"
    synthetic_trace(path, n_tokens=64, window=8, layers=5, cuts=(4, 24, 40, 63))
    return TraceReader(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Two runs with heads, 8 MB each; one value of the arm is another."""
    path = tmp_path_factory.mktemp("tensor") / "large.h5"
    spans = [[[CUT, TOKENS]]]
    runs = [
        RunInfo(0, "full", "paper", None, None, 0, TOKENS, TOKENS, WINDOW, exact_in=spans, exact_out=spans),
        RunInfo(1, "encoder", "paper", CUT, WINDOW, CUT - WINDOW, TOKENS, TOKENS, WINDOW, exact_in=spans,
                exact_out=spans),
    ]  # fmt: skip
    values = np.random.default_rng(0).normal(size=(TOKENS, HEADS, WIDTH)).astype(np.float32)
    with TraceWriter(path) as out:
        out.header(config={}, provenance={"dtype": "float32"}, tokens=Tokens(np.arange(TOKENS), ["x"] * TOKENS))
        out.runs(runs)
        out.state(0, "layers.0.attn_out", np.arange(TOKENS), values, "float32")
        changed = values[CUT - WINDOW :].copy()
        changed[WINDOW + 3, 1, 17] += 0.5
        out.state(1, "layers.0.attn_out", np.arange(CUT - WINDOW, TOKENS), changed, "float32")
    return path


def read_bytes() -> int:
    """Bytes that this process has asked the system for."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_every_layer_at_one_position(trace):
    run = next(
        run for run in trace.runs if run.arm == "encoder" and (run.index, "layers.0.window_kv") in trace.states()
    )
    made = tensor_chart(trace, run.index)
    position = made.meta["position"]
    assert position == run.cut - 1 and made.meta["level"] == "layers"
    for layer in range(5):
        for side, index in ((SIDES[0], 0), (SIDES[1], run.index)):
            state = trace.state(index, f"layers.{layer}.window_kv")
            np.testing.assert_array_equal(
                made.panels[side].grid.value[layer], state.values[state.positions == position][0]
            )
    gap = made.panels[SIDES[2]].grid
    np.testing.assert_array_equal(gap.value, made.panels[SIDES[1]].grid.value - made.panels[SIDES[0]].grid.value)
    assert (gap.kind[0] == IDENTICAL).all() and not (gap.kind[1:] == IDENTICAL).any()
    assert made.panels[SIDES[0]].scale == made.panels[SIDES[1]].scale and made.panels[SIDES[2]].scale.kind == "signed"
    low, high = made.panels[SIDES[2]].scale.ends
    assert low == -high, "zero is the middle of the bar"


def test_rows_around_a_position_with_the_cut_between_them(trace):
    run = next(
        run for run in trace.runs if run.arm == "encoder" and (run.index, "layers.0.window_kv") in trace.states()
    )
    made = tensor_chart(trace, run.index, layer=3)
    gap = made.panels[SIDES[2]]
    assert gap.grid.shape[0] == min(ROWS, run.stop - run.start) and gap.row == "position"
    before, label = gap.divider
    assert gap.grid.rows[before] == str(run.cut) and label == f"cut H {run.cut}"


def test_the_changed_value_is_found_through_heads_and_rows(large):
    trace = TraceReader(large)
    heads = tensor_chart(trace, 1, "attn_out", 0, position=CUT + 3)
    assert heads.meta["level"] == "heads" and heads.panels[SIDES[2]].row == "head"
    assert np.argwhere(heads.panels[SIDES[2]].grid.kind != IDENTICAL).tolist() == [[1, 17]]
    assert "1 of 512 values differ, most in head 1, channel 17" in heads.title
    rows = tensor_chart(trace, 1, "attn_out", 0, head=1, position=CUT + 3)
    at = rows.panels[SIDES[2]].grid
    (found,) = np.argwhere(at.kind != IDENTICAL).tolist()
    assert at.rows[found[0]] == f"{CUT + 3:,}" and found[1] == 17
    assert at.exact.all(axis=1).tolist() == [int(p.replace(",", "")) >= CUT for p in at.rows]
    assert "identical in every channel" in tensor_chart(trace, 1, "attn_out", 0, head=0, position=CUT + 3).title


def test_no_more_of_the_file_is_read_than_is_shown(large):
    trace = TraceReader(large)
    tensor_chart(trace, 1, "attn_out", 0, head=1, position=3000)
    before = read_bytes()
    tensor_chart(trace, 1, "attn_out", 0, head=1, position=3000)
    # 32 rows of each side lie in a chunk of 1 MiB, at most two; the rest is positions, runs and the file's own tables.
    state = large.stat().st_size
    assert read_bytes() - before < 0.2 * state
    before = read_bytes()
    trace.state(0, "layers.0.attn_out")
    assert read_bytes() - before > 0.5 * state, "the measure sees a whole state that is read"


def test_what_is_missing_on_one_side_is_absent(large):
    trace = TraceReader(large)
    made = tensor_chart(trace, 1, "attn_out", 0, head=0, position=CUT - WINDOW)
    assert not (made.panels[SIDES[0]].grid.kind == ABSENT).any()
    other = tensor_chart(trace, 0, "attn_out", 0, head=0, position=100, reference="full")
    assert (other.panels[SIDES[2]].grid.kind == IDENTICAL).all()


def test_points_and_layers_that_both_sides_store(trace, large):
    run = next(
        run for run in trace.runs if run.arm == "encoder" and (run.index, "layers.0.window_kv") in trace.states()
    )
    found = stored_points(trace, run.index)
    assert list(found) == ["window_kv", "topk", "hidden", "logits"]
    assert found["hidden"] == [0, 1, 2, 3, 4] and found["logits"] == []
    assert stored_points(TraceReader(large), 1) == {"attn_out": [0]}


def test_what_is_not_there_is_one_line(trace, large):
    missing = next(run for run in trace.runs if run.arm == "encoder" and run.cut == 4)
    with pytest.raises(NotRecorded, match="--hooks 'layers"):
        tensor_chart(trace, missing.index)
    with pytest.raises(NotRecorded, match=r"--hooks 'layers\.\*\.hidden'"):
        tensor_chart(TraceReader(large), 1, "hidden")
    with pytest.raises(UsageError, match="no attn_out of layer 9; stored are 0"):
        tensor_chart(TraceReader(large), 1, "attn_out", 9)
    with pytest.raises(UsageError, match="no head 7; there are 2"):
        tensor_chart(TraceReader(large), 1, "attn_out", 0, head=7)
    with pytest.raises(UsageError, match="window_kv"):
        tensor_chart(trace, None, "window-kv")


def test_without_a_position_the_nearest_stored_one_is_shown(tmp_path):
    """A hit runs no row before its cut."""
    runs = [RunInfo(i, arm, "paper", cut, None, cut or 0, 6, 6, 2, exact_in=[[]], exact_out=[[]])
            for i, (arm, cut) in enumerate((("full", None), ("hit", 3)))]  # fmt: skip
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={"dtype": "float32"}, tokens=Tokens(np.arange(6), ["x"] * 6))
        out.runs(runs)
        for run in runs:
            rows = np.arange(run.start, 6)
            out.state(run.index, "layers.0.hidden", rows, np.ones((len(rows), 4), np.float32), "float32")
    trace = TraceReader(tmp_path / "t.h5")
    assert tensor_chart(trace).meta["position"] == 3
    with pytest.raises(UsageError, match="position 2 is outside the stored rows, 3 … 5"):
        tensor_chart(trace, position=2)


def test_panels_keep_their_axes_and_marks(trace):
    figure = draw_panels(made := tensor_chart(trace, layer=2), made.panels)
    maps = [t for t in figure.data if t.name == "magnitude"]
    assert [t.yaxis for t in maps] == ["y", "y2", "y3"]
    domains = [figure.layout[f"yaxis{n}"].domain for n in ("", "2", "3")]
    assert domains[0][1] == 1 and domains[2][0] == pytest.approx(0, abs=1e-6)
    assert domains[0][0] > domains[1][1] > domains[1][0] > domains[2][1]
    names = [note.text for note in figure.layout.annotations]
    assert [f"<b>{name}</b>" in names for name in SIDES] == [True] * 3
    cuts = [note for note in figure.layout.annotations if note.text.startswith("cut H")]
    assert sorted(note.yref for note in cuts) == ["y", "y2", "y3"]


def test_a_layer_that_wrote_nothing_is_said_to_have_and_the_others_are_shown(tmp_path):
    """A prompt of one token has an entry in layers of ratio 1 only."""
    runs = [RunInfo(i, arm, "paper", cut, 1 if cut else None, 0, 2, 2, 1, exact_in=[[]] * 2, exact_out=[[]] * 2)
            for i, (arm, cut) in enumerate((("full", None), ("encoder", 1)))]  # fmt: skip
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={"dtype": "float32"}, tokens=Tokens(np.arange(2), ["x"] * 2))
        out.runs(runs)
        for run, layer in ((0, 0), (1, 0), (0, 1), (1, 1)):
            out.state(run, f"layers.{layer}.index_k", np.arange(layer), np.ones((layer, 4), np.float32), "float32")
    trace = TraceReader(tmp_path / "t.h5")
    with pytest.raises(NotRecorded, match=r"encoder cut 1 replay 1 wrote no index_k there; choose another run, layer"):
        tensor_chart(trace, 1, "index_k", layer=0)
    grids = [panel.grid for panel in tensor_chart(trace, 1, "index_k").panels.values()]
    assert [(grid.kind[:, 0].tolist(), grid.rows) for grid in grids][2] == ([ABSENT, IDENTICAL], ["0", "1"])


def test_values_beyond_float32_are_drawn_without_a_warning(tmp_path):
    runs = [RunInfo(i, arm, "paper", cut, 1 if cut else None, 0, 2, 2, 1, exact_in=[[]], exact_out=[[]])
            for i, (arm, cut) in enumerate((("full", None), ("encoder", 1)))]  # fmt: skip
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={"dtype": "float64"}, tokens=Tokens(np.arange(2), ["x"] * 2))
        out.runs(runs)
        for run, value in ((0, -1e300), (1, 1e300)):
            values = np.array([[value, 1e200], [1.0, 0.0]])
            out.state(run, "layers.0.hidden", np.arange(2), values, "float64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = tensor_chart(TraceReader(tmp_path / "t.h5"), 1, "hidden", position=0)
        figure = draw_panels(made, made.panels)
    sides = [trace.z for trace in figure.data if trace.name == "magnitude"]
    assert [side[0][0] for side in sides[:2]] == [-1e300, 1e300]
