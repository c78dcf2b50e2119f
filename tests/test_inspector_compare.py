"""Comparing two traces and showing one: alignment, refusals that name the field, tolerances, planted elements."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replayscope.inspector.compare import compare, comparison
from replayscope.inspector.compared import tightest_limit
from replayscope.inspector.errors import CompareError, UsageError
from replayscope.inspector.metrics import METRICS
from replayscope.inspector.specs import parse_tolerance
from replayscope.inspector.summary import lines, show, size, summarise
from replayscope.traces import RunInfo, Tokens, TraceError, TraceReader, TraceWriter
from replayscope.traces.dtypes import encode_bf16
from tests.synthetic import synthetic_trace

N, WIDTH = 20, 6
CONFIG = {"layers": 2, "window": 4, "rope": {"theta": 10000, "factor": 16}}
TOKENS = Tokens(np.arange(N) % 9, [f"t{i % 9}" for i in range(N)])
RUN = RunInfo(0, "encoder", "paper", cut=8, replay=4, start=4, stop=N, prompt_end=N, window=4)


def states() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "layers.0.hidden": rng.normal(size=(N - 4, WIDTH)).astype(np.float32),
        "layers.1.window_kv": rng.normal(size=(N - 4, WIDTH)).astype(np.float32),
        "layers.1.topk": np.sort(rng.permuted(np.tile(np.arange(8), (N - 4, 1)), axis=1)[:, :3]).astype(np.int32),
        "logits": rng.normal(size=(N - 4, 9)).astype(np.float32),
    }


def write(
    path: Path, *, run: RunInfo = RUN, first: int = 4, ids=None, config=CONFIG, edit=None, more=(), text="t"
) -> TraceReader:
    """A trace of one run whose states start at position `first`; edit changes the values, text the tokenizer."""
    values = states()
    if edit:
        edit(values)
    ids = np.arange(N) % 9 if ids is None else np.asarray(ids)
    with TraceWriter(path, force=True) as out:
        out.header(config=config, provenance={"dtype": "float32"}, tokens=Tokens(ids, [f"{text}{i}" for i in ids]))
        out.runs([run, *(replace(other, index=i + 1) for i, other in enumerate(more))])
        for index in range(1 + len(more)):
            for name, array in values.items():
                out.state(index, name, np.arange(first, N), array[first - 4 :], str(array.dtype))
    return TraceReader(path)


def tolerances(*texts: str) -> list:
    return [parse_tolerance(text, METRICS) for text in texts]


@pytest.fixture
def pair(tmp_path) -> Callable[..., tuple[TraceReader, TraceReader]]:
    """A plain trace and another one made with the given changes."""
    return lambda **changes: (write(tmp_path / "a.h5"), write(tmp_path / "b.h5", **changes))


def row(found, name: str):
    return next(row for row in found.rows if row.name == name)


# --- values -----------------------------------------------------------------------------------------------------


def test_equal_traces_are_identical(pair):
    found = comparison(*pair(), tolerances=tolerances("*=rel_l2<=0", "layers.1.topk=changed<=0"))
    assert [r.name for r in found.rows] == ["layers.0.hidden", "layers.1.window_kv", "layers.1.topk", "logits"]
    assert found.passed and not found.notes
    assert all(r.n == N - 4 and r.worst is None and r.left_out == 0 for r in found.rows)
    assert row(found, "layers.0.hidden").tightest == "rel_l2<=0" and row(found, "logits").metrics["kl"] == 0


def test_one_planted_element_is_found_with_both_values(pair):
    def edit(values):
        values["layers.1.window_kv"][7, 3] = 5.0

    before = states()["layers.1.window_kv"][7, 3]
    found = comparison(
        *pair(edit=edit), tolerances=tolerances("layers.*.window_kv=rel_l2<=1e-3", "*.hidden=max_abs<=0")
    )
    hit = row(found, "layers.1.window_kv")
    assert (hit.worst.position, hit.worst.channel) == (11, (3,))
    assert (hit.worst.first, hit.worst.second) == (pytest.approx(before), 5.0)
    assert hit.passed is False and not found.passed
    assert row(found, "layers.0.hidden").passed is True and row(found, "logits").passed is None
    name, limit = hit.tightest.split("<=")
    assert name == "rel_l2" and hit.metrics["rel_l2"] <= float(limit) < hit.metrics["rel_l2"] * 1.1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_element_is_the_worst_whatever_else_differs(pair, bad):
    def edit(values):
        values["layers.0.hidden"][2, 1] = 100.0
        values["layers.0.hidden"][9, 4] = bad

    found = comparison(*pair(edit=edit), tolerances=tolerances("layers.0.hidden=rel_l2<=1e9"))
    hit = row(found, "layers.0.hidden")
    assert (hit.worst.position, hit.worst.channel) == (13, (4,)) and not np.isfinite(hit.worst.second)
    assert hit.passed is False and hit.tightest is None and hit.metrics["nonfinite"] == 1


def test_choices_are_compared_as_sets(pair):
    def edit(values):
        values["layers.1.topk"][3] = values["layers.1.topk"][3][::-1]
        values["layers.1.topk"][5] = [0, 1, -1]

    before = set(states()["layers.1.topk"][5].tolist())
    found = comparison(*pair(edit=edit), tolerances=tolerances("layers.1.topk=changed<=0.01"))
    hit = row(found, "layers.1.topk")
    assert hit.metrics["changed"] == 1 / 16 and hit.worst.position == 9 and hit.passed is False
    share = len(before & {0, 1}) / len(before | {0, 1})
    assert hit.metrics["jaccard"] == pytest.approx((1 - share) / 16)


def test_logits_carry_their_divergence(pair):
    def edit(values):
        values["logits"][4] += np.eye(9, dtype=np.float32)[0] * 9

    hit = row(comparison(*pair(edit=edit)), "logits")
    assert hit.metrics["kl_max"] > 0.1 and hit.metrics["kl"] == pytest.approx(hit.metrics["kl_max"] / 16)
    assert hit.metrics["top1"] == 1 / 16 and hit.worst.channel == (0,)


def test_a_zero_reference_is_counted_beside_the_relative_error(tmp_path):
    def zero(values):
        values["layers.0.hidden"][0, 0] = 0.0

    def small(values):
        values["layers.0.hidden"][0, 0] = 1e-8

    found = comparison(write(tmp_path / "a.h5", edit=zero), write(tmp_path / "b.h5", edit=small))
    metrics = row(found, "layers.0.hidden").metrics
    assert (metrics["max_rel"], metrics["zero_reference"]) == (0.0, 1)
    assert metrics["zero_max_abs"] == pytest.approx(1e-8)


def test_bf16_against_fp32_compares_numbers_not_bits(tmp_path):
    values = states()["layers.0.hidden"]
    with TraceWriter(tmp_path / "b.h5") as out:
        out.header(config=CONFIG, provenance={"dtype": "bfloat16"}, tokens=TOKENS)
        out.runs([RUN])
        out.state(0, "layers.0.hidden", np.arange(4, N), encode_bf16(values), "bfloat16")
    found = comparison(write(tmp_path / "a.h5"), TraceReader(tmp_path / "b.h5"))
    assert 0 < found.rows[0].metrics["rel_l2"] < 2**-8
    assert found.notes == [
        "dtype is float32 in the first, bfloat16 in the second",
        "encoder cut 8 replay 4: held by one trace only: layers.1.window_kv, layers.1.topk, logits",
    ]


# --- alignment --------------------------------------------------------------------------------------------------


def test_rows_are_aligned_by_absolute_position(pair):
    found = comparison(*pair(first=9))
    assert all(r.worst is None and (r.n, r.left_out) == (11, 5) for r in found.rows)


def test_a_shift_by_one_is_seen(tmp_path):
    def shift(values):
        for name, array in values.items():
            values[name] = np.roll(array, 1, 0)

    assert row(comparison(write(tmp_path / "a.h5"), write(tmp_path / "b.h5", edit=shift)), "logits").worst is not None


def test_no_row_in_common_cannot_pass(tmp_path):
    with TraceWriter(tmp_path / "b.h5") as out:
        out.header(config=CONFIG, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        out.state(0, "layers.0.hidden", np.arange(3), np.zeros((3, WIDTH), np.float32), "float32")
    found = comparison(
        write(tmp_path / "a.h5"), TraceReader(tmp_path / "b.h5"), tolerances=tolerances("layers.0.hidden=rel_l2<=1")
    )
    assert found.rows[0].n == 0 and found.rows[0].passed is False and found.rows[0].tightest is None


def test_other_runs_stay_alone_and_are_named(pair):
    other = replace(RUN, cut=10, start=6)
    found = comparison(*pair(more=[other]))
    assert len(found.rows) == 4 and found.notes == ["only in the second: encoder cut 10 replay 4"]


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"ids": [*range(7), 99, *range(8, N)]},
            "the prompts differ: tokens.ids[7] is 7 in the first, 99 in the second",
        ),
        ({"ids": range(N - 1)}, "tokens.ids has 20 tokens in the first, 19 in the second"),
        ({"text": "T"}, "the tokenizers differ: tokens.texts[0] (id 0) is 't0' in the first, 'T0' in the second"),
        ({"config": CONFIG | {"window": 8}}, "the models differ: config.window is 4 in the first, 8 in the second"),
        (
            {"config": CONFIG | {"rope": {"theta": 1, "factor": 16}}},
            "config.rope.theta is 10000 in the first, 1 in the",
        ),
        ({"config": CONFIG | {"new": 1}}, "config.new is only in the second"),
        ({"run": replace(RUN, window=5)}, "window is 4 in the first, 5 in the second"),
        ({"run": replace(RUN, arm="oracle:encoder")}, "arm is encoder in the first, oracle:encoder in the second"),
        ({"run": replace(RUN, cut=9)}, "cut is 8 in the first, 9 in the second; add --cross-arm"),
        ({"run": replace(RUN, replay=8)}, "replay is 4 in the first, 8 in the second"),
        ({"run": replace(RUN, semantics="tokenspeed")}, "semantics is paper in the first, tokenspeed in the second"),
    ],
)
def test_what_differs_is_refused_by_name(tmp_path, changes, says):
    ids = list(range(N)) if "ids" in changes else None
    first = write(tmp_path / "a.h5", ids=ids)
    with pytest.raises(CompareError) as raised:
        comparison(first, write(tmp_path / "b.h5", **changes))
    assert says in str(raised.value) and raised.value.exit_code == 2


@pytest.mark.parametrize("fields", [{"arm": "full"}, {"cut": 9}, {"replay": 8}, {"semantics": "sglang-day0"}])
def test_cross_arm_lets_the_arm_differ_and_nothing_else(pair, fields):
    found = comparison(*pair(run=replace(RUN, **fields)), cross_arm=True)
    assert len(found.rows) == 4 and found.passed
    with pytest.raises(CompareError, match="window is 4"):
        comparison(*pair(run=replace(RUN, window=5, **fields)), cross_arm=True)


def test_texts_that_are_only_the_numbers_of_the_ids_name_no_tokenizer(pair):
    assert comparison(*pair(text="")).passed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ids": [*range(7), 99, *range(8, N)]}, "the prompts differ: tokens.ids[7]"),
        ({"text": "T"}, "the tokenizers differ"),
        ({"config": CONFIG | {"layers": 3}}, "config.layers is 2 in the first, 3 in the second"),
    ],
)
def test_cross_arm_excuses_no_other_prompt_tokenizer_or_config(tmp_path, changes, says):
    first = write(tmp_path / "a.h5", ids=list(range(N)) if "ids" in changes else None)
    second = write(tmp_path / "b.h5", run=replace(RUN, arm="full"), **changes)
    with pytest.raises(CompareError) as raised:
        comparison(first, second, cross_arm=True)
    assert says in str(raised.value)


def test_cross_arm_does_not_guess_between_several(pair):
    with pytest.raises(CompareError, match="record one arm in each to pair them"):
        comparison(*pair(run=replace(RUN, arm="x"), more=[replace(RUN, arm="y")]), cross_arm=True)


def test_states_of_another_width_and_none_at_all(tmp_path, pair):
    def wider(values):
        values["layers.0.hidden"] = np.zeros((N - 4, WIDTH + 1), np.float32)

    first, second = pair(edit=wider)
    with pytest.raises(CompareError, match=r"a row of layers.0.hidden is \[6\] in the first, \[7\] in the second"):
        comparison(first, second)
    with pytest.raises(CompareError, match="holds no raw states; record it with --hooks"):
        comparison(first, write(tmp_path / "none.h5", edit=dict.clear))


# --- tolerances -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers.9.hidden=rel_l2<=1", "unknown hook point 'layers.9.hidden'"),
        ("layers.1.topk=rel_l2<=1", "no point of 'layers.1.topk' has rel_l2; they have changed, jaccard"),
        ("layers.0.*=kl<=1", "no point of 'layers.0.*' has kl"),
        ("logits=margin_noise<=1", "no point of 'logits' has margin_noise"),
    ],
)
def test_a_tolerance_that_judges_nothing_is_an_error(pair, text, says):
    with pytest.raises(UsageError) as raised:
        comparison(*pair(), tolerances=tolerances(text))
    assert says in str(raised.value)


def test_a_ratio_is_judged_by_its_distance_from_one(tmp_path):
    def half(values):
        values["layers.0.hidden"] *= np.float32(0.5)

    traces = write(tmp_path / "a.h5"), write(tmp_path / "b.h5", edit=half)
    for limit, passed in (("0.49", False), ("0.51", True)):
        found = comparison(*traces, tolerances=tolerances(f"layers.0.hidden=norm_ratio<={limit}"))
        assert found.passed is passed
    assert row(found, "layers.0.hidden").metrics["cosine"] == pytest.approx(0, abs=1e-12)


def test_several_tolerances_of_a_point_must_all_hold(pair):
    def edit(values):
        values["layers.0.hidden"][0] *= 1.5

    found = comparison(
        *pair(edit=edit), tolerances=tolerances("layers.{0,1}.*=rel_l2<=1", "layers.0.hidden=max_abs<=1e-6")
    )
    hit = row(found, "layers.0.hidden")
    assert hit.passed is False and hit.tightest.count("<=") == 2
    assert row(found, "layers.1.topk").passed is None


@given(st.floats(1e-300, 1e300))
@example(1.25)
@example(9.96)
def test_the_tightest_tolerance_passes_and_is_tight(value):
    limit = float(tightest_limit("rel_l2", value).split("<=")[1])
    assert value <= limit <= value * 1.11


# --- the commands -----------------------------------------------------------------------------------------------


def test_the_command_gives_a_table_strict_json_and_an_exit_code(tmp_path):
    def edit(values):
        values["layers.0.hidden"][0, 0] = np.nan
        values["layers.1.window_kv"][:] = 0.0

    write(tmp_path / "a.h5"), write(tmp_path / "b.h5", edit=edit)
    done = compare(tmp_path / "a.h5", tmp_path / "b.h5", tolerances=tolerances("*=rel_l2<=0.1"))
    assert done.exit_code == 1 and done.text.count("OVER") == 2 and "identical" in done.text
    document = json.loads(json.dumps(done.json, allow_nan=False))
    assert document["passed"] is False and document["rows"][0]["metrics"]["rel_l2"] == "inf"
    assert compare(tmp_path / "a.h5", tmp_path / "a.h5").exit_code == 0


def test_two_real_traces(tmp_path):
    synthetic_trace(tmp_path / "t.h5", n_tokens=32, layers=3, cuts=(9, 12, 16, 24))
    found = comparison(TraceReader(tmp_path / "t.h5"), TraceReader(tmp_path / "t.h5"))
    assert {r.first for r in found.rows} >= {"full", "hit cut 24", "encoder cut 24 replay 8"}
    assert all(r.worst is None for r in found.rows)


def test_show_names_every_part(tmp_path):
    synthetic_trace(tmp_path / "t.h5", n_tokens=32, layers=3, cuts=(9, 24))
    data = summarise(TraceReader(tmp_path / "t.h5"))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [arm["arm"] for arm in data["arms"]][:3] == ["full", "repeat", "rechunk"]
    assert data["divergence"]["full"][0] == "embed" and data["rows"]["oracle"] == ["window_kv", "hidden"]
    assert list(data["states"])[:2] == ["layers.0.window_kv", "layers.0.hidden"] and data["tokens"] == 32
    text = "\n".join(lines(data))
    for part in ("complete", "encoder", "cuts 9, 24, replay 8", "layers.2.topk", "provenance", "float64", "config"):
        assert part in text
    assert "fault" not in text


def test_show_verify_finds_damage_and_says_so(tmp_path):
    synthetic_trace(tmp_path / "t.h5", n_tokens=32, layers=3, cuts=(9,))
    sound = show(tmp_path / "t.h5", verify=True)
    assert sound.exit_code == 0 and sound.text.endswith("every checksum right") and sound.json["faults"] == []
    raw = bytearray((tmp_path / "t.h5").read_bytes())
    at = raw.find(np.arange(32).tobytes())
    raw[at] ^= 1
    (tmp_path / "t.h5").write_bytes(raw)
    damaged = show(tmp_path / "t.h5", verify=True)
    assert damaged.exit_code == 1 and "fault: /" in damaged.text
    # Where nothing can be opened either, the next step is not the command that just ran.
    (tmp_path / "t.h5").write_bytes(raw[:48] + bytes(4096) + raw[4144:])
    broken = show(tmp_path / "t.h5", verify=True)
    assert broken.exit_code == 1 and "copy or record it again" in broken.text and "--verify" not in broken.text
    with pytest.raises(TraceError, match="show --verify"):
        show(tmp_path / "t.h5")


def test_a_partial_trace_is_shown_as_such(tmp_path):
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.h5") as out:
        out.header(config=CONFIG, provenance={}, tokens=Tokens(np.arange(2), ["a", "\x1b[31m"]))
        out.runs([RUN])
        raise KeyboardInterrupt
    assert "partial: its writer did not finish" in show(out.partial).text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 52, "4096.0 TiB")])
def test_sizes_read_well(count, text):
    assert size(count) == text
