"""The named figures: built from a trace, and every number in them is the trace's own."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import METRICS, metric, metrics_of
from replayscope.traces import Tokens, TraceReader
from replayscope.ui import figures
from replayscope.ui.figures import FIGURES, chart, cut_layer, logits_by_cut, position_layer, reach
from replayscope.ui.grid import ABSENT, BUG, IDENTICAL, NOISE
from replayscope.ui.page import figure_json
from replayscope.ui.series import pick, series
from tests.edited import Edited
from tests.memory import memory
from tests.synthetic import Plant, synthetic_trace

CUTS = (4, 8, 9, 24, 40, 63)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> TraceReader:
    path = tmp_path_factory.mktemp("figures") / "t.h5"
    synthetic_trace(path, n_tokens=64, window=8, layers=5, cuts=CUTS)
    return TraceReader(path)


def layer(figure, name: str):
    return next(t for t in figure.data if t.name == name and t.type == "heatmap")


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "replay-length"])
def test_every_figure_is_built_and_speaks(trace, name):
    figure = FIGURES[name](trace)
    meta = figure.layout.meta
    assert len(meta["title"]) > 20 and not meta["title"].endswith(".")
    for word in ("design fixed", "suffix all", "N 64", "W 8"):
        assert word in meta["sentence"], f"{name} does not name {word}"
    assert figure.layout.xaxis.title.text
    json.loads(figure_json(figure), parse_constant=lambda literal: pytest.fail(f"{literal} is no JSON"))
    assert figure_json(FIGURES[name](trace)) == figure_json(figure), "the same trace gives the same bytes"


def test_every_metric_and_every_point(trace):
    for point in ("window_kv", "topk", "logits"):
        for name in metrics_of(trace.table("full", point)):
            cut_layer(trace, point, name, "suffix")
    for reference in trace.references():
        for point in trace.points(reference):
            cut_layer(trace, point, metrics_of(trace.table(reference, point))[0], "exact", reference=reference)


def test_every_arm_in_every_map(trace):
    for one in series(trace.runs):
        for draw in (cut_layer, reach, position_layer):
            draw(trace, arm=one.label)


def test_the_numbers_of_the_map_are_those_of_the_trace(trace):
    made = chart(trace, "cut-layer")
    table = trace.table("full", "window_kv")
    runs = [run.index for run in trace.runs if run.arm == "encoder"]
    expected = metric(table, "rel_l2")[runs, :, table.bucket("window")].T
    np.testing.assert_array_equal(made.grid.value, expected)
    shown = layer(cut_layer(trace), "magnitude")
    cells = np.isfinite(shown.z)
    low, high = made.scale.low, made.scale.high
    np.testing.assert_allclose(10 ** shown.z[cells], np.clip(expected[cells], low, high), rtol=1e-5)
    # Row r of the drawing is layer r: layer 0 at the bottom, layer 2 before layer 10.
    assert made.grid.rows == ["0", "1", "2", "3", "4"]


def test_a_planted_cell_and_no_other_lights_up(tmp_path):
    fault = Plant("encoder", 40, "window_kv", 3, 36, 0.7, "oracle")
    synthetic_trace(tmp_path / "t.h5", n_tokens=64, window=8, layers=5, cuts=CUTS, plant=fault)
    trace = Edited.of(TraceReader(tmp_path / "t.h5")).no_flips()
    trace.path, trace.config, trace.tokens = tmp_path / "t.h5", {}, Tokens(np.arange(64), ["x"] * 64)
    trace.row_points = lambda reference: []
    made = chart(trace, "cut-layer", arm="encoder", reference="oracle")
    assert np.argwhere(made.grid.kind == BUG).tolist() == [[3, CUTS.index(40)]]
    assert made.title.startswith("Bug: encoder replay") and "cut 40, layer 3" in made.title
    drawn = layer(figures.figure(made), "bug")
    assert np.argwhere(np.isfinite(drawn.z)).tolist() == [[3, CUTS.index(40)]]
    # Against `full` the same cell is red too, though the difference there could pass as design.
    assert (chart(trace, "cut-layer", arm="encoder").grid.kind == BUG).sum() == 1
    assert not (chart(trace, "cut-layer", arm="oracle:encoder").grid.kind == BUG).any()


def test_a_planted_row_is_red_at_its_position(tmp_path):
    fault = Plant("encoder", 40, "window_kv", 0, 45, 0.7, "oracle")
    synthetic_trace(tmp_path / "t.h5", n_tokens=64, window=8, layers=5, cuts=CUTS, plant=fault)
    trace = TraceReader(tmp_path / "t.h5")
    run = pick(trace, "encoder").at(40).index
    for reference in ("oracle", "full"):
        made = chart(trace, "position-layer", run=run, reference=reference)
        rows, columns = np.where(made.grid.kind == BUG)
        assert (rows.tolist(), made.grid.start[columns].tolist()) == ([0], [45])
        assert "goes wrong first at position 45, layer 0" in made.title
    assert chart(trace, "position-layer", run=run, reference="oracle").grid.value[0, 45 - 32] == pytest.approx(0.7)


def test_the_exact_region_is_drawn_where_the_run_says(trace):
    run = pick(trace, "encoder").at(24)
    made = chart(trace, "position-layer", run=run.index)
    assert made.outline == tuple(tuple((float(a), float(b)) for a, b in region) for region in run.exact_in)
    inside = made.grid.kind[made.grid.exact]
    assert set(inside) <= {NOISE, IDENTICAL} and made.grid.start[0] == run.start == 16
    assert [label for _, label in made.marks] == ["cut H 24"]
    assert "s = 16" in made.axis
    assert chart(trace, "position-layer", run=run.index, point="hidden").outline[0][0][0] == 16 + 7


def test_bins_cover_the_run_when_no_rows_were_kept(trace):
    run = pick(trace, "encoder").at(24)
    made = chart(trace, "position-layer", run=run.index, point="attn_in")
    assert made.grid.start[0] == 16 and made.grid.stop[-1] == 64
    assert (made.grid.start[1:] == made.grid.stop[:-1]).all()
    assert "bin" in made.notes[0]


def test_cells_in_the_exact_region_are_marked_in_the_cut_map(trace):
    made = chart(trace, "cut-layer")
    cuts = np.array(CUTS)
    assert made.grid.exact[0].all(), "what enters layer 0 is exact at every cut"
    assert made.grid.exact[:, cuts <= 8].all() and not made.grid.exact[1:, cuts > 8].any()
    assert [label for _, label in made.marks] == ["H > W = 8"]


def test_one_colour_range_for_all_cuts_and_arms(trace):
    scales = {chart(trace, "cut-layer", arm=one.label).scale for one in series(trace.runs)}
    runs = [run.index for run in trace.runs if run.arm == "encoder"]
    scales |= {chart(trace, "position-layer", run=run).scale for run in runs}
    assert len(scales) == 1


def test_titles_say_what_is_seen(trace):
    assert "changes the window KV from layer 1 on: median" in chart(trace, "cut-layer").title
    assert "rounding noise only" in chart(trace, "cut-layer", point="hidden", bucket="suffix", arm="hit").title
    assert "identical at every cut" in chart(trace, "cut-layer", point="hidden", bucket="all", arm="repeat").title
    assert "computes no window KV here" in chart(trace, "cut-layer", arm="hit").title
    assert "at the replay start to" in chart(trace, "reach").title
    assert "nats" in chart(trace, "logits-kl").title and "top-1 flip" in chart(trace, "logits-kl").title


def test_what_was_not_computed_is_never_a_number(trace):
    figure = cut_layer(trace, arm="hit")
    assert np.isnan(layer(figure, "magnitude").z).all()
    assert (chart(trace, "cut-layer", arm="hit").grid.kind == ABSENT).all()
    assert "nothing computed here" in [note.text for note in figure.layout.annotations]


def test_the_kl_lines_are_the_table(trace):
    made = chart(trace, "logits-kl")
    table = trace.table("full", "logits")
    encoder = next(line for line in made.lines if line.label == "encoder")
    runs = [run.index for run in trace.runs if run.arm == "encoder"]
    b = table.bucket("suffix")
    np.testing.assert_array_equal(encoder.mean, metric(table, "kl")[runs, 0, b])
    np.testing.assert_array_equal(encoder.largest, metric(table, "kl_max")[runs, 0, b])
    np.testing.assert_array_equal(encoder.flips, table.arrays["flips"][runs, 0, b])
    assert [line.label for line in made.lines] == ["encoder", "hit"], "oracles and planted faults are not in it"
    drawn = next(t for t in logits_by_cut(trace).data if t.name == "encoder")
    assert "rows, floor " in drawn.text[3] and "above the noise" in drawn.text[3]
    marks = next(t for t in logits_by_cut(trace).data if t.name == "flip")
    assert list(marks.x) == np.flatnonzero(encoder.flips).tolist()


def test_zero_and_inf_have_lanes_of_their_own():
    trace = memory(cuts=(9, 24))
    table = trace.table("full", "logits")
    for name in ("kl_sum", "kl_max"):
        table.arrays[name][trace.run("encoder")] = 0.0
        table.arrays[name][trace.run("encoder") + 4] = np.inf
    figure = logits_by_cut(trace, arms=["encoder"])
    assert {"0", "inf"} <= set(figure.layout.yaxis.ticktext)
    line = next(t for t in figure.data if t.name == "encoder")
    assert np.isfinite(line.y).all() and line.y[0] < line.y[1]


def test_all_zero_logits_say_so():
    trace = memory()
    for values in trace.table("full", "logits").arrays.values():
        values[:] = np.where(values > 0, values, 0) if values is trace.table("full", "logits").arrays["n"] else 0
    assert "as it is at every cut" in chart(trace, "logits-kl", arms=["encoder"]).title
    notes = [note.text for note in logits_by_cut(trace, arms=["encoder"]).layout.annotations]
    assert "all zero: identical everywhere" in notes


def test_not_finite_cells_are_told_from_missing_ones():
    trace = memory(cuts=(9, 24))
    arrays = trace.table("full", "window_kv").arrays
    arrays["nonfinite"][trace.run("encoder"), 2] = 3
    arrays["n"][trace.run("encoder"), 3] = 0
    figure = cut_layer(trace, arm="encoder")
    infinite = next(t for t in figure.data if t.name == "not finite")
    assert (infinite.x, infinite.y) == ((0,), (2,))
    assert np.isfinite(layer(figure, "not computed").z[3, 0])
    assert "inf" in layer(figure, "magnitude").text[2][0] and "not computed" in layer(figure, "not computed").text[3][0]


def test_the_two_designs_never_share_a_figure():
    trace = memory(cuts=(9, 16, 24))
    encoders = [run.index for run in trace.runs if run.arm == "encoder"]
    hits = [run.index for run in trace.runs if run.arm == "hit"]
    for run in encoders:
        trace.change(run, stop=trace.runs[run].cut + 8)
    assert pick(trace, "encoder").design == "after" and pick(trace, "hit").design == "fixed"
    assert "suffix 8 rows · design after" in chart(trace, "cut-layer", arm="encoder").sentence
    made = chart(trace, "logits-kl")
    assert [line.label for line in made.lines] == ["encoder"]
    assert any("left out: hit" in note for note in made.notes)
    trace.change(encoders[0], stop=trace.runs[hits[0]].stop)
    assert pick(trace, "encoder").design == "mixed"
    assert "do not compare" in chart(trace, "cut-layer", arm="encoder").title


@pytest.mark.parametrize("name", ["cut-layer", "position-layer", "reach", "logits-kl"])
def test_suffix_and_design_are_those_of_the_recording(name):
    trace = memory()
    whole = chart(trace, name)
    assert "suffix all · design fixed" in whole.sentence and whole.meta["suffix"] is None
    # One cut does not tell a suffix of 8 from all that follows.
    trace.provenance |= {"suffix": 8, "design": "after"}
    made = chart(trace, name)
    assert "suffix 8 rows · design after" in made.sentence
    assert (made.meta["suffix"], made.meta["design"]) == (8, "after")
    for odd in ({"suffix": [8]}, {"suffix": -1}, {"suffix": True}, {"design": None}, {"design": {}}):
        trace.provenance = {**trace.provenance, "suffix": 8, "design": "after"} | odd
        assert "suffix all · design fixed" in chart(trace, name).sentence, "what is not understood is not repeated"


def test_a_run_without_a_cut_has_no_suffix():
    trace = memory()
    trace.provenance |= {"suffix": 8, "design": "after"}
    assert "suffix all · design fixed" in chart(trace, "position-layer", run=trace.run("rechunk")).sentence


def test_the_suffix_of_one_position_map_is_that_of_its_arm():
    trace = memory(cuts=(16, 24))
    for run in list(trace.runs):
        if run.arm == "encoder":
            trace.change(run.index, stop=run.cut + 8)
    made = chart(trace, "position-layer", run=trace.run("encoder"))
    assert "suffix 8 rows · design after" in made.sentence, "the provenance says nothing, the other cut does"


def test_after_design_may_end_at_the_end_of_the_text():
    trace = memory(cuts=(9, 16, 44))
    for run in [run.index for run in trace.runs if run.arm == "encoder"]:
        trace.change(run, stop=min(48, trace.runs[run].cut + 8))
    assert pick(trace, "encoder").design == "after"


def test_an_arm_without_a_cut_is_one_column(trace):
    made = chart(trace, "cut-layer", point="hidden", bucket="all", arm="rechunk")
    assert made.grid.shape[1] == 1 and made.axis == "the arm has no cut"


def test_replay_lengths_and_semantics_are_told_apart():
    trace = memory(cuts=(24,))
    more = [replace(run, index=run.index + 20, replay=16) for run in trace.runs if run.arm == "encoder"]
    labels = [one.label for one in series([*trace.runs, *more])]
    assert labels[:2] == ["encoder, replay 8", "encoder, replay 16"]
    other = [replace(run, index=run.index + 20, semantics="vllm-0.33") for run in trace.runs if run.arm == "encoder"]
    assert "encoder, vllm-0.33" in [one.label for one in series([*trace.runs, *other])]


def test_the_decoder_half_is_marked():
    assert chart(memory(), "cut-layer").divider == (2, "decoder half")


def over_cells(figure) -> list[str]:
    """Words that lie over the cells of a map: neither beside its right edge nor on its upper one."""
    tops = [1.0, *(axis.domain[1] for axis in figure.select_yaxes() if axis.domain)]

    def outside(note):
        across, up = ("paper" in str(ref) or "domain" in str(ref) for ref in (note.xref, note.yref))
        right = across and note.x == 1 and note.xanchor == "left"
        return right or (up and note.y in tops and note.yanchor == "bottom")

    return [note.text for note in figure.layout.annotations if not outside(note)]


@pytest.mark.parametrize("name", ["cut-layer", "position-layer", "reach", "compare"])
def test_no_label_covers_a_cell(name):
    figure = FIGURES[name](memory())
    assert "decoder half" in [note.text for note in figure.layout.annotations]
    assert over_cells(figure) == []
    # The twin: the same label inside of the right edge is found.
    figure.update_annotations(xanchor="right", selector={"text": "decoder half"})
    assert set(over_cells(figure)) == {"decoder half"}


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="drawn by matplotlib")
def test_a_printed_label_lies_beside_the_cells_too():
    from replayscope.ui import printed

    figure = FIGURES["cut-layer"](memory())
    svg = printed.render(figure, "svg", 1100, 400).decode()
    without = printed.render(figure.update_annotations(text="", selector={"text": "decoder half"}), "svg", 1100, 400)
    assert "<!-- decoder half -->" in svg and b"decoder half" not in without
    turned = svg.partition("<!-- decoder half -->")[2][:200]
    assert "rotate(-90)" in turned, turned


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("cut-layr", {}, "cut-layer"),
        ("cut-layer", {"point": "window-kv"}, "window_kv"),
        ("cut-layer", {"arm": "encodr"}, "encoder"),
        ("cut-layer", {"bucket": "windw"}, "window"),
        ("cut-layer", {"reference": "truth"}, "full, oracle"),
        ("cut-layer", {"metric_name": "rel_l3"}, "rel_l2"),
        ("cut-layer", {"metric_name": "kl"}, "logits-kl"),
        ("logits-kl", {"metric_name": "cosine"}, "kl_rev"),
        ("position-layer", {"run": 999}, "the runs of this trace are 0 to"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_valid_ones(trace, name, options, said):
    with pytest.raises(UsageError) as error:
        chart(trace, name, **options)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_metric_of_states_stands_for_a_figures_own(trace):
    assert chart(trace, "logits-kl", "rel_l2").meta["metric"] == "kl"
    assert set(figures.CHARTS) == set(FIGURES) and METRICS["kl"].unit == "nats"
