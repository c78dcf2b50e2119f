"""What each engine does of a replay, on integers: cuts, short hits, decoder tails, chunks (cases A1, A2, A3, A19)."""

import re
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from replayscope.inspector import engines
from replayscope.inspector.cli import main
from replayscope.inspector.engines import (
    ENGINES,
    chunk_ends,
    decoder_tail,
    kept_rows,
    page_hit,
    replay_start,
    rule_table,
    usable_hit,
)
from replayscope.inspector.errors import UsageError
from replayscope.inspector.exact import exact_rows
from replayscope.inspector.features import FEATURES, VERDICTS, feature
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.plan import Request
from replayscope.inspector.semantics import Shape, admits, request
from replayscope.model.config import ModelConfig
from tests import v41
from tests.test_inspector_plan import config
from tests.test_model_parity import plan_of

NAMES = tuple(ENGINES)
SGLANG = ("sglang-0.5.23", "sglang-day0")
RATIOS = (0, 0, 2, 2, 1, 1, 1, 1)
D = 4


def deep(W: int = 4) -> ModelConfig:
    """Four encoder layers, of which two have pairs, and four decoder layers."""
    return config(W, len(RATIOS), RATIOS)


def counts(r: Request) -> tuple[int, int, int]:
    return r.replayed, r.cached, r.fresh


@pytest.mark.parametrize(
    ("semantics", "block", "want"),
    [
        ("paper", None, [0, 1, 2, 127, 128, 129, 130, 255, 256]),
        ("paper", 64, [0, 1, 2, 127, 128, 129, 130, 255, 256]),
        ("vllm-0.33", None, [0, 128, 256]),
        ("vllm-0.33", 2, [0, 2, 128, 130, 256]),
        ("vllm-0.33", 256, [0, 256]),
        *((name, None, [0, 2, 128, 130, 256]) for name in SGLANG),
        *((name, 256, [0, 256]) for name in SGLANG),
        ("tokenspeed", None, [0, 128, 256]),
        ("tokenspeed", 256, [0, 256]),
    ],
)
def test_a3_which_cuts_are_admitted(semantics, block, want):
    cuts = [0, 1, 2, 127, 128, 129, 130, 255, 256]
    assert [cut for cut in cuts if admits(semantics, cut, block)] == want
    shape = Shape(config(W=128), 300, block=block)
    for cut in cuts:
        if cut in want:
            assert request(shape, "encoder", cut, semantics=semantics).cut == cut
        else:
            with pytest.raises(UsageError, match=f"cut {cut} is not admitted by {semantics}"):
                request(shape, "encoder", cut, semantics=semantics)


@pytest.mark.parametrize(("semantics", "block"), [("tokenspeed", 64), ("sglang-day0", 3), ("vllm-0.33", 0)])
def test_a_block_size_that_an_engine_cannot_have_is_refused(semantics, block):
    with pytest.raises(UsageError, match=f"does not suit {semantics}"):
        admits(semantics, 128, block)


def test_a19_a_prompt_cached_whole_hits_up_to_the_page_before_its_last_token():
    assert [page_hit(N, 256) for N in (0, 1, 256, 257, 8192, 8193)] == [0, 0, 0, 256, 7936, 8192]
    # Eight such requests replay one window each.
    shape = Shape(config(W=128), 8192, block=256)
    for semantics in NAMES:
        r = request(shape, "encoder", page_hit(8192, 256), semantics=semantics)
        assert 8 * r.replayed == 1024 and counts(r) == (128, 7936, 256)


def test_hits_reported_by_others_are_floored_to_a_block():
    """vLLM with H = 255 and blocks of 128 lost the first replayed row until hits were floored."""
    assert [usable_hit("vllm-0.33", hit, 128) for hit in (127, 128, 255, 256)] == [0, 128, 128, 256]
    assert usable_hit("sglang-day0", 257, 128) == 256 and usable_hit("paper", 257, 128) == 257


def test_decoder_replay_without_encoder_replay():
    alone = {"encoder": False, "decoder": True}
    for semantics in SGLANG:
        assert usable_hit(semantics, 7936, 128, **alone) == 7808
        assert usable_hit(semantics, 7936, 128, 256, **alone) == 7680
        assert usable_hit(semantics, 100, 128, **alone) == 0
        assert usable_hit(semantics, 7936, 128, encoder=False, decoder=False) == 7936
    with pytest.raises(UsageError, match="no decoder replay without encoder replay"):
        usable_hit("vllm-0.33", 7936, 128, **alone)


@pytest.mark.parametrize("semantics", NAMES)
def test_a1_the_replayed_rows(semantics):
    W, N, H, block = (128, 300, 256, None) if semantics == "tokenspeed" else (4, 22, 20, None)
    block = 4 if semantics == "vllm-0.33" else block
    r = request(Shape(config(W), N, block=block), "encoder", H, semantics=semantics)
    assert (r.start, counts(r)) == (H - W, (W, H, N - H))
    assert set(r.floor) == set(r.first_window) == {H - W}
    assert [r.first_entry[l] for l in (2, 4)] == [H // 2, H]


@pytest.mark.parametrize("semantics", NAMES)
@pytest.mark.parametrize("cut", [2, 4])
def test_a1_a_hit_no_longer_than_the_window(semantics, cut):
    W, block = 4, 2
    if semantics == "tokenspeed":
        W, cut, block = 128, 128, None
    r = request(Shape(config(W), 300, block=block), "encoder", cut, semantics=semantics)
    assert r.start == 0 and exact_rows(config(W), r)[1].all()
    if semantics == "vllm-0.33":
        assert counts(r) == (0, 0, 300) and r.prefix is None and set(r.first_entry) == {0}
    else:
        assert counts(r) == (cut, cut, 300 - cut) and r.first_entry[4] == cut
    # A window that came with the hit is not rebuilt.
    assert replay_start(semantics, cut, W, carried=True) == (cut, cut)


def test_a1_twin_an_engine_that_kept_short_hits_is_another(monkeypatch):
    monkeypatch.setitem(ENGINES, "vllm-0.33", replace(ENGINES["vllm-0.33"], keeps_short_hits=True))
    with pytest.raises(AssertionError):
        test_a1_a_hit_no_longer_than_the_window("vllm-0.33", 4)


@pytest.mark.parametrize(
    ("semantics", "first_row", "first_window", "floor"),
    [
        ("paper", [0, 18, 18, 18], [0, 18, 18, 18], [0, 18, 18, 18]),
        ("tokenspeed", [0, 18, 18, 18], [0, 18, 18, 18], [0, 18, 18, 18]),
        ("sglang-0.5.23", [0, 18, 18, 18], [0, 18, 18, 18], [0, 18, 18, 18]),
        ("vllm-0.33", [0, 18, 18, 18], [0, 0, 18, 18], [0, 0, 18, 18]),
        ("sglang-day0", [0, 0, 18, 18], [0, 0, 18, 18], [0, 0, 18, 18]),
    ],
)
def test_where_the_decoder_tail_starts_and_what_the_source_layer_sees(semantics, first_row, first_window, floor):
    """Layers D-1 … D+2 of a cold prompt of 22 tokens, W = 4."""
    r = request(Shape(deep(), 22), "decoder", semantics=semantics)
    layers = slice(D - 1, D + 3)
    assert list(r.first_row[layers]) == first_row
    assert list(r.first_window[layers]) == first_window
    assert list(r.floor[layers]) == floor
    assert r.projected(D) == 0, "the source layer's global KV needs every row"


@pytest.mark.parametrize(
    ("semantics", "exact"),
    [
        *((name, [4, 1, 0, 0]) for name in ("paper", "tokenspeed", "sglang-0.5.23")),
        *((name, [4, 4, 1, 0]) for name in ("vllm-0.33", "sglang-day0")),
    ],
)
@pytest.mark.parametrize("N", [5, 22, 40])
def test_exact_decoder_rows(semantics, exact, N):
    """Window KV rows of the last W that equal a full prefill's, in layers D … D+3."""
    r = request(Shape(deep(), N), "decoder", semantics=semantics)
    enters, _ = exact_rows(deep(), r)
    assert enters[D:, N - 4 :].sum(1).tolist() == exact
    assert not enters[D + 1 :, : N - 4].any() or semantics == "sglang-day0"


@pytest.mark.parametrize("semantics", NAMES)
@pytest.mark.parametrize("N", [1, 3, 4])
def test_a_prompt_no_longer_than_the_window_is_not_trimmed(semantics, N):
    r = request(Shape(deep(), N), "decoder", semantics=semantics)
    assert set(r.first_row) == {0} and exact_rows(deep(), r)[1].all()


def test_both_lifts_the_tail_over_the_replay_start():
    for semantics in ("paper", "vllm-0.33", *SGLANG):
        r = request(Shape(deep(), 22, block=20), "both", 20, semantics=semantics)
        late = D + (semantics in ("vllm-0.33", "sglang-day0"))
        assert r.floor == (16,) * late + (18,) * (8 - late)


@pytest.mark.parametrize("fixture", ["dec_fullwin", "both_H24"])
def test_vllm_is_the_full_window_variant_of_the_fixtures(fixture):
    shape = replace(v41.shape(v41.TOKENS - v41.PROMPT_END), block=8)
    arm = ("both", 24) if fixture == "both_H24" else ("decoder",)
    made = plan_of(fixture)
    assert replace(request(shape, *arm, semantics="vllm-0.33"), arm=made.arm, semantics="paper") == made
    assert replace(request(shape, *arm, semantics="sglang-0.5.23"), arm=made.arm, semantics="paper") != made


def test_a2_kept_rows_of_a_batch():
    """A decode step at 500, a whole prompt of 300, and 100 of 300."""
    batch = [(500, 501), (0, 300), (0, 100)]
    for semantics in NAMES:
        kept = [kept_rows(semantics, begin, end, 128) for begin, end in batch]
        assert kept == [1, 128, 100] and list(accumulate(kept, initial=0)) == [0, 1, 129, 229]
        assert decoder_tail(semantics, 0, (300,), 128).floor == 172
    assert kept_rows("paper", 0, 300, 128, last=False) == kept_rows("tokenspeed", 0, 300, 128, last=False) == 1
    assert {kept_rows(name, 0, 300, 128, last=False) for name in ("vllm-0.33", *SGLANG)} == {128}


@pytest.mark.parametrize(
    ("semantics", "ends", "row", "floor", "steps"),
    [
        # The last chunk is short: its rows reach into the tail of the one before.
        *((name, (10, 18, 20), 14, 14, ((18, 16),)) for name in SGLANG),
        ("vllm-0.33", (10, 18, 20), 14, 14, ()),
        # A last chunk of exactly W rows: SGLang cuts it off, vLLM trims only longer ones.
        *((name, (16, 20), 16, 16, ()) for name in SGLANG),
        ("vllm-0.33", (16, 20), 12, 12, ()),
        # Short chunks only: nothing is trimmed, but SGLang still moves the floor.
        *((name, (3, 6, 8), 0, 0, ((3, 2), (6, 4))) for name in SGLANG),
        ("vllm-0.33", (3, 6, 8), 0, 0, ()),
        ("paper", (10, 16, 20), 16, 16, ()),
        ("tokenspeed", (10, 16, 20), 16, 16, ()),
    ],
)
def test_how_chunks_trim(semantics, ends, row, floor, steps):
    tail = decoder_tail(semantics, 0, ends, 4)
    assert (tail.row, tail.floor, tail.steps) == (row, floor, steps)
    r = request(Shape(deep(), ends[-1], chunks=ends), "decoder", semantics=semantics)
    r.check(deep())
    assert r.first_row[-1] == row and r.floors(7) == [(0, floor), *steps]
    assert r.floors(0) == [(0, 0), *((at, 0) for at, _ in steps)]


def test_chunk_ends():
    assert chunk_ends("paper", None, 0, 0, 20, 4) == (20,)
    assert chunk_ends("sglang-day0", 8, 6, 10, 30, 4) == (14, 22, 30)
    assert chunk_ends("vllm-0.33", (3, 12, 25, 40), 6, 10, 30, 4) == (12, 25, 30)
    # The scheduler moves the last boundary so that the last chunk holds W rows; by hand it must.
    for semantics in ("paper", "tokenspeed"):
        assert chunk_ends(semantics, 6, 0, 0, 20, 4) == (6, 12, 16, 20)
        assert chunk_ends(semantics, 4, 0, 0, 5, 4) == (1, 5) and chunk_ends(semantics, 2, 0, 0, 3, 4) == (3,)
        with pytest.raises(UsageError, match="last chunk of at least W = 4 rows, not 2"):
            chunk_ends(semantics, (10, 18), 0, 0, 20, 4)
    for ends in ((5, 5), (5, 3), (0, 3)):
        with pytest.raises(UsageError, match="ascending"):
            chunk_ends("paper", ends, 0, 0, 20, 4)


def test_what_the_first_chunk_must_hold_of_a_replay():
    for semantics in SGLANG:
        assert chunk_ends(semantics, 132, 128, 256, 600, 128, 4)[0] == 260
        with pytest.raises(UsageError, match="first chunk of at least 132 rows, not 131"):
            chunk_ends(semantics, 131, 128, 256, 600, 128, 4)
        assert chunk_ends(semantics, 1, 0, 0, 600, 128, 4)[0] == 1, "without a hit there is no replay to hold"
    assert chunk_ends("tokenspeed", 128, 128, 256, 600, 128)[0] == 256
    with pytest.raises(UsageError, match="first chunk of at least 128 rows"):
        chunk_ends("tokenspeed", 127, 128, 256, 600, 128)
    assert chunk_ends("vllm-0.33", 5, 128, 256, 600, 128)[0] == 133


def literal(semantics: str, start: int, ends: tuple[int, ...], W: int) -> tuple[list[range], list[int]]:
    """Chunk by chunk as an engine runs them: kept rows of each chunk, and the lowest key of every row from start on."""
    kept, lowest = [], []
    for begin, end in pairwise((start, *ends)):
        n = kept_rows(semantics, begin, end, W, last=end == ends[-1])
        trimmed = end - begin > W or not semantics.startswith("vllm")
        kept.append(range(end - n, end))
        lowest += [max(start, end - W) if trimmed else start] * (end - begin)
    return kept, lowest


@given(st.data())
def test_rows_of_earlier_chunks_that_nothing_later_sees_are_the_ones_left_out(data):
    """Down the decoder layers, what the last W rows and the first decoded one see lies in the range that is run."""
    semantics = data.draw(st.sampled_from(NAMES))
    W, start = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 5))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    ends = tuple(accumulate(lengths, initial=start))[1:]
    assume(ENGINES[semantics].trims != "last" or len(ends) == 1 or lengths[-1] >= W)
    P, tail = ends[-1], decoder_tail(semantics, start, ends, W)
    kept, lowest = literal(semantics, start, ends, W)
    steps = dict(tail.steps)
    floor, floors = tail.floor, []
    for row in range(start, P):
        floor = steps.get(row, floor)
        floors.append(floor)
    needed = set(range(max(start, P - W), P))
    for _ in range(12):
        for row in sorted(needed):
            sees = range(max(lowest[row - start], row - W + 1, start), row + 1)
            assert sees == range(max(floors[row - start], row - W + 1, start), row + 1), (
                "the plan's floor is the engine's"
            )
            needed |= set(sees)
    assert needed <= set().union(*kept), "an engine may read only what it wrote"
    assert needed <= set(range(tail.row, P))
    # Not one row too many either: the first row that is run is read, unless it is its own chunk's tail.
    assert tail.row in needed or any(tail.row == rows.start for rows in kept)


def test_twin_a_tail_that_starts_one_row_late_is_seen(monkeypatch):
    right = decoder_tail

    def late(*args):
        tail = right(*args)
        return replace(tail, row=tail.row + 1)

    monkeypatch.setitem(globals(), "decoder_tail", late)
    with pytest.raises(AssertionError):
        test_rows_of_earlier_chunks_that_nothing_later_sees_are_the_ones_left_out()


def test_several_semantics_share_what_knows_none():
    job = Job(
        replace(v41.shape(), block=8), ("repeat", "hit", "encoder", "decoder"), (24, 40), (6,), None,
        ("paper", "vllm-0.33", "sglang-day0"), oracles=True,
    )  # fmt: skip
    line, notes = line_up(job)
    runs = [(r.arm, r.semantics) for r in line.plan.requests]
    assert not notes and len({r.name for r in line.plan.requests}) == len(runs)
    assert [runs.count((arm, "paper")) for arm in ("full", "repeat", "hit")] == [1, 1, 2]
    for semantics in job.semantics:
        assert runs.count(("encoder", semantics)) == 2 and runs.count(("decoder", semantics)) == 1
    for run in line.runs:
        if run.arm in ("encoder", "decoder"):
            oracle = line.runs[run.oracle]
            assert (oracle.arm, oracle.semantics, oracle.cut) == (f"oracle:{run.arm}", run.semantics, run.cut)
    assert np.unique([r.index for r in line.runs]).size == len(line.runs)


def test_features_are_known_words_with_a_source():
    for semantics in NAMES:
        for name in FEATURES:
            found = feature(semantics, name)
            assert found.verdict in VERDICTS and (found.source or found.verdict == "unknown")
    asked = ("speculative decoding", "input logprobs", "hidden states", "multimodal")
    assert [feature("vllm-0.33", name).verdict for name in asked] == ["ok", "untrimmed", "untrimmed", "ok"]
    assert [feature("sglang-0.5.23", name).verdict for name in asked] == ["ok", "untrimmed", "untrimmed", "ok"]
    assert {feature("sglang-day0", name).verdict for name in asked} == {"refused"}
    with pytest.raises(UsageError, match="did you mean 'multimodal'"):
        feature("paper", "multimodel")


def test_the_table_of_rules_has_a_source_for_every_rule(capsys):
    rows = list(rule_table())
    assert all(source for _, rule, _, source in rows if rule != "about")
    assert main(["list", "semantics"]) == 0
    printed = capsys.readouterr().out
    for name, rule, says, source in rows:
        assert re.search(rf"^{re.escape(name)} +{rule} +{re.escape(says)} *{re.escape(source)}$", printed, re.MULTILINE)
    # A twin: a rule whose source is not known would be found.
    bare = replace(ENGINES["paper"], sources={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engines.ENGINES, "paper", bare)
        assert not all(source for _, rule, _, source in rule_table() if rule != "about")
