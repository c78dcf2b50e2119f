"""The first divergent cell and the noise floor of a comparison, on traces with planted differences."""

import json
from dataclasses import replace

import numpy as np
import pytest

from replayscope.inspector import cli
from replayscope.inspector.compare import compare, comparison
from replayscope.inspector.errors import CompareError, UsageError
from replayscope.inspector.first import First, told
from replayscope.traces import Table, TraceReader, TraceWriter
from tests.test_inspector_compare import CONFIG, RUN, TOKENS, N, states, tolerances, write


@pytest.fixture
def pair(tmp_path):
    return lambda **changes: (write(tmp_path / "a.h5"), write(tmp_path / "b.h5", **changes))


def plant(*cells):
    """Adds to element (name, stored row, channel)."""

    def edit(values):
        for name, row, channel, by in cells:
            values[name][row, channel] += by

    return edit


def first(traces, *texts, **options):
    return comparison(*traces, tolerances=tolerances(*texts), stop_at_first=True, **options)


def test_the_first_cell_is_the_one_of_the_lowest_layer_then_position(pair):
    edit = plant(
        ("logits", 0, 0, 9.0), ("layers.1.window_kv", 2, 5, 1.0), ("layers.1.window_kv", 9, 1, 50.0),
        ("layers.0.hidden", 8, 3, 2.0), ("layers.0.hidden", 11, 0, 70.0),
    )  # fmt: skip
    found = first(pair(edit=edit), "*=rel_l2<=1e-3", "layers.1.topk=changed<=0")
    cell, before = found.first, float(states()["layers.0.hidden"][8, 3])
    assert (cell.name, cell.position, cell.worst.channel, cell.metric) == ("layers.0.hidden", 12, (3,), "rel_l2")
    assert (cell.worst.first, cell.worst.second) == (pytest.approx(before), pytest.approx(before + 2))
    assert not found.passed and (cell.points, cell.rows) == (1, N - 4)


def test_within_a_layer_the_position_comes_before_the_point(pair):
    def edit(values):
        values["layers.1.window_kv"][6, 0] += 1
        values["layers.1.topk"][4] = [90, 91, 92]

    cell = first(pair(edit=edit)).first
    assert (cell.name, cell.position) == ("layers.1.topk", 8)
    cell = first(pair(edit=edit), "*.window_kv=rel_l2<=0").first
    assert (cell.name, cell.position) == ("layers.1.window_kv", 10)


def test_of_equal_positions_the_point_that_a_token_meets_first(pair):
    def edit(values):
        values["layers.1.topk"][4] = [90, 91, 92]
        values["layers.1.window_kv"][4, 0] += 1

    assert first(pair(edit=edit)).first.name == "layers.1.window_kv"


def test_only_what_is_over_its_threshold_counts(pair):
    edit = plant(("layers.0.hidden", 2, 0, 1e-4), ("layers.1.window_kv", 9, 1, 50.0))
    assert first(pair(edit=edit), "*=rel_l2<=1e-2").first.name == "layers.1.window_kv"
    assert first(pair(edit=edit)).first.name == "layers.0.hidden"
    none = first(pair(edit=edit), "layers.0.*=rel_l2<=1e-2")
    assert none.passed and none.first is None and none.compared == (4 * (N - 4), 4)


def test_layers_behind_the_first_cell_are_not_read(pair, monkeypatch):
    traces, read = pair(edit=plant(("layers.0.hidden", 8, 3, 2.0))), []
    state = TraceReader.state
    monkeypatch.setattr(TraceReader, "state", lambda self, run, name: read.append(name) or state(self, run, name))
    assert first(traces).first and set(read) == {"layers.0.hidden"}
    read.clear()
    # With nothing planted there is no cell, and everything must be read to know it.
    assert first((traces[0], traces[0])).first is None and len(set(read)) == 4


def test_a_row_that_a_region_dilutes_is_found(pair):
    """One wrong row of sixteen passes as a region and not as a row."""
    traces = pair(edit=plant(("layers.0.hidden", 8, 3, 1.0)))
    limit = "layers.0.hidden=rel_l2<=0.2"
    assert comparison(*traces, tolerances=tolerances(limit)).passed
    assert first(traces, limit).first.position == 12


def test_a_number_that_is_finite_on_one_side_only_is_over_any_threshold(pair):
    cell = first(pair(edit=plant(("layers.0.hidden", 8, 3, np.nan))), "*.hidden=rel_l2<=1e9").first
    assert cell.position == 12 and np.isnan(cell.worst.second)


def test_entries_are_placed_by_the_token_they_begin_with(tmp_path):
    """Entry 3 of ratio 2 begins at position 6, behind a row that differs at position 5."""
    config = {"text_config": {"compress_ratios": [2]}}

    def trace(name, **changed):
        with TraceWriter(tmp_path / name) as out:
            out.header(config=config, provenance={}, tokens=TOKENS)
            out.runs([RUN])
            for point, rows in (("global_kv", 8), ("hidden", 16)):
                values = np.ones((rows, 2), np.float32)
                for at in changed.get(point, ()):
                    values[at] = 2
                out.state(0, f"layers.0.{point}", np.arange(rows), values, "float32")
        return TraceReader(tmp_path / name)

    reference = trace("a.h5")
    cell = first((reference, trace("b.h5", global_kv=[3], hidden=[5]))).first
    assert (cell.name, cell.position, cell.entry) == ("layers.0.hidden", 5, None)
    cell = first((reference, trace("c.h5", global_kv=[3], hidden=[7]))).first
    assert (cell.name, cell.position, cell.entry) == ("layers.0.global_kv", 6, 3)


def test_a_position_held_twice_is_refused(tmp_path):
    with TraceWriter(tmp_path / "b.h5") as out:
        out.header(config=CONFIG, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        out.state(0, "layers.0.hidden", np.array([4, 5, 5]), np.zeros((3, 6), np.float32), "float32")
    with pytest.raises(CompareError, match="holds a position twice in the second"):
        comparison(write(tmp_path / "a.h5"), TraceReader(tmp_path / "b.h5"))


def test_a_metric_that_no_point_has_is_refused(pair):
    with pytest.raises(UsageError, match="has margin_noise"):
        first(pair(), "logits=margin_noise<=1")


def holding(path, positions: range, **other: range):
    """The plain trace, of whose states only these positions are held; other: by the last part of a name."""
    with TraceWriter(path) as out:
        out.header(config=CONFIG, provenance={"dtype": "float32"}, tokens=TOKENS)
        out.runs([RUN])
        for name, values in states().items():
            at = np.array(other.get(name.rsplit(".", 1)[-1], positions))
            out.state(0, name, at, values[at - 4], str(values.dtype))
    return TraceReader(path)


@pytest.mark.parametrize("limit", [[], ["--tol", "*=rel_l2<=1e9", "--tol", "*.topk=changed<=1"], ["--floor", "f.h5"]])
@pytest.mark.parametrize("how", [[], ["--first"]])
def test_where_no_row_is_compared_nothing_passes(how, limit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    holding(tmp_path / "a.h5", range(4, 8))
    holding(tmp_path / "b.h5", range(12, 20))
    noisy(tmp_path / "f.h5", 0.01, 5.0)
    words = ["compare", "a.h5", "b.h5", *how, *limit]
    assert cli.main(words) == 1
    told = capsys.readouterr().out
    assert "nothing was compared, so nothing passes: no row in common" in told and "no cell is over" not in told
    assert cli.main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_a_point_that_is_judged_does_not_pass_without_a_row(tmp_path, capsys):
    traces = holding(tmp_path / "a.h5", range(4, 8)), holding(tmp_path / "b.h5", range(4, 8), logits=range(8, 12))
    found = first(traces, "logits=rel_l2<=1e9")
    assert not found.passed and found.first is None and found.empty == ("logits",) and found.compared == (12, 3)
    assert cli.main(["compare", *(str(one.path) for one in traces), "--first", "--tol", "logits=rel_l2<=1e9"]) == 1
    assert "not passed: no row in common at logits; give traces" in capsys.readouterr().out
    # Points that nobody named are told of, and the others are judged.
    assert first(traces, "layers.*=rel_l2<=0").passed
    found = first(traces)
    assert found.passed and found.notes == ["no row in common at logits"]


def test_a_metric_without_a_value_is_told_in_words():
    cell = First("final", "full", "full", 3, None, "rel_l2", np.nan, 0.1, None, 4, 1)
    assert list(told(cell, []))[1] == "  rel_l2 has no value, and so is not within 1.000e-01"


# --- the floor ---------------------------------------------------------------------------------------------------


def noisy(path, value: float, worst: float, arm: str = "repeat", ids=TOKENS):
    """A trace whose noise run is `value` from full at layers.0.hidden, and `worst` in one row."""
    runs = [replace(RUN, arm="full", cut=None), replace(RUN, index=1, arm=arm, cut=None)]
    arrays = {key: np.zeros((2, 2, 1)) for key in ("diff2", "nonfinite", "rel_max", "max_abs")}
    arrays |= {key: np.ones((2, 2, 1)) for key in ("n", "ref2", "arm2", "dot", "elements")}
    arrays["diff2"][1, 0], arrays["rel_max"][1, 0], arrays["max_abs"][1, 0] = value**2, worst, value
    with TraceWriter(path, force=True) as out:
        out.header(config=CONFIG, provenance={"dtype": "float32"}, tokens=ids)
        out.runs(runs)
        out.table("full", "hidden", Table("state", ("all",), arrays))
    return TraceReader(path)


def test_what_lies_within_the_measured_floor_passes(pair, tmp_path):
    traces = pair(edit=plant(("layers.0.hidden", 8, 3, 1.0)))
    loud, quiet = noisy(tmp_path / "f.h5", 0.01, 5.0), noisy(tmp_path / "q.h5", 0.01, 0.02)
    row = comparison(*traces, floor=loud).rows[0]
    assert row.passed is True and row.floor == 5.0
    row = comparison(*traces, floor=quiet).rows[0]
    assert row.passed is False and row.floor == 0.02
    assert first(traces, floor=loud).first is None
    cell = first(traces, floor=quiet).first
    assert (cell.position, cell.limit) == (12, 0.02)
    # A tolerance below the floor asks for more than can be measured.
    assert first(traces, "*.hidden=rel_l2<=0", floor=loud).first is None


def test_points_without_a_measured_floor_are_named_and_not_judged(pair, tmp_path):
    found = comparison(*pair(edit=plant(("logits", 0, 0, 9.0))), floor=noisy(tmp_path / "f.h5", 0.1, 0.1))
    assert found.passed and [row.passed for row in found.rows] == [True, None, None, None]
    assert found.notes == ["no noise was measured at layers.1.window_kv, layers.1.topk, logits"]


def test_another_recording_of_the_first_is_a_floor(pair, tmp_path):
    edit = plant(("layers.0.hidden", 8, 3, 1.0))
    traces = pair(edit=edit)
    again = write(tmp_path / "again.h5", edit=plant(("layers.0.hidden", 2, 1, 4.0), ("layers.1.topk", 0, 0, 50)))
    assert first(traces, floor=again).first is None
    same = write(tmp_path / "same.h5")
    assert first(traces, floor=same).first.position == 12


def test_a_floor_of_another_prompt_or_of_nothing_compared_is_refused(pair, tmp_path):
    other = replace(TOKENS, ids=np.arange(N))
    with pytest.raises(CompareError, match=r"f.h5 is no floor: the prompts differ: tokens.ids\[9\]"):
        comparison(*pair(), floor=noisy(tmp_path / "f.h5", 1, 1, ids=other))
    with pytest.raises(UsageError, match="measured no noise at the points compared"):
        comparison(*pair(edit=lambda values: values.pop("layers.0.hidden")), floor=noisy(tmp_path / "g.h5", 1, 1))


# --- the command -------------------------------------------------------------------------------------------------


def test_the_tightest_tolerances_are_printed_and_would_have_passed(pair, tmp_path):
    pair(edit=plant(("layers.0.hidden", 8, 3, 1.0), ("logits", 0, 0, 9.0)))
    done = compare(tmp_path / "a.h5", tmp_path / "b.h5")
    printed = done.json["tightest"]
    assert [f"tightest: --tol '{text}'" for text in printed] == [l for l in done.text.splitlines() if "tightest" in l]
    assert compare(tmp_path / "a.h5", tmp_path / "b.h5", tolerances=tolerances(*printed)).exit_code == 0
    parts = [text.split("<=") for text in printed]
    tighter = [f"{name}<={0.9 * float(limit)}" for name, limit in parts]
    assert compare(tmp_path / "a.h5", tmp_path / "b.h5", tolerances=tolerances(*tighter)).exit_code == 1


def test_the_rows_compared_are_printed_with_how_many_there_are(pair, tmp_path):
    pair(first=9)
    assert "11 of 16" in compare(tmp_path / "a.h5", tmp_path / "b.h5").text


def test_first_and_floor_on_the_command_line(pair, tmp_path, capsys):
    pair(edit=plant(("layers.0.hidden", 8, 3, 1.0)))
    noisy(tmp_path / "f.h5", 0.01, 5.0)
    words = ["compare", str(tmp_path / "a.h5"), str(tmp_path / "b.h5"), "--first"]
    assert cli.main(words) == 1
    told = capsys.readouterr().out
    before = float(states()["layers.0.hidden"][8, 3])
    assert "first cell over its threshold: layers.0.hidden, position 12, token 't3', in encoder cut 8 replay 4" in told
    assert f"largest difference at [3]: {before:.9g} in the first" in told
    assert cli.main([*words, "--json", "--floor", str(tmp_path / "f.h5")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True and document["first"] is None and document["compared"] == [64, 4]
    assert cli.main([*words, "--floor", str(tmp_path / "none.h5")]) == 2
    assert "no trace" in capsys.readouterr().err
