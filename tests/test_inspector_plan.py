"""Plans on integers, without a model: which rows run, what they may see and write (cases A1, A2, A3, A7, A19)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayscope.inspector.errors import UsageError
from replayscope.inspector.exact import exact_rows, intervals
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import ARMS, Shape, exact_replay, has_cut, request, valid_arms
from replayscope.model.config import ModelConfig
from tests import v41


def config(W: int = 4, layers: int = 6, ratios=(0, 0, 2, 2, 1, 1)) -> ModelConfig:
    sources = tuple(i for i, r in enumerate(ratios) if r and (i == 0 or ratios[i - 1] != r))
    return ModelConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, head_dim=8, qk_rope_head_dim=4,
        q_lora_rank=8, o_lora_rank=4, o_groups=1, sliding_window=W, compress_ratios=ratios, kv_source_layer_ids=sources,
        index_source_layer_ids=sources, index_n_heads=2, index_head_dim=4, index_topk=4, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=8, hc_mult=2,
    )  # fmt: skip


def pure_window(W: int, layers: int) -> ModelConfig:
    return config(W, layers, (0,) * layers)


def test_a1_replay_runs_the_last_window_before_the_cut_and_writes_no_cached_entry():
    r = request(Shape(config(W=4), 22), "encoder", 20)
    assert list(range(r.start, 20)) == [16, 17, 18, 19]
    assert (r.replayed, r.cached, r.fresh) == (4, 20, 2)
    assert set(r.floor) == {16} and set(r.first_window) == {16}
    # Entries below 20 // ratio stay as they are; suffix rows write the rest.
    assert [r.first_entry[l] for l in (2, 4)] == [10, 20]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a1_a_hit_no_longer_than_the_window_replays_from_the_start(cut):
    r = request(Shape(config(W=4), 22), "encoder", cut)
    assert r.start == 0 and set(r.floor) == {0}
    enters, leaves = exact_rows(config(W=4), r)
    assert enters.all() and leaves.all()


def test_a2_a_decoder_tail_keeps_the_last_window_of_each_prompt():
    c = config(W=128, ratios=(0, 0, 2, 2, 1, 1))
    for prompt, kept, floor in ((300, 128, 172), (100, 100, 0), (501, 128, 373)):
        r = request(Shape(c, prompt), "decoder")
        assert r.stop - r.first_row[c.decoder_start] == kept
        assert r.floor[c.decoder_start] == floor
        # The encoder half runs whole, and the source layer is projected for every row.
        assert r.first_row[c.decoder_start - 1] == 0 and r.projected(c.decoder_start) == 0


@pytest.mark.parametrize("cut", [0, 1, 2, 127, 128, 129, 130, 255, 256])
def test_a3_paper_admits_even_and_odd_cuts(cut):
    r = request(Shape(config(W=128), 300), "encoder", cut)
    assert r.start == max(0, cut - 128)
    # The pair that straddles an odd cut is published again: from the replayed row and the first suffix row.
    assert r.first_entry[2] == cut // 2
    if cut == 0:
        assert r.prefix is None and r.cached == 0


def test_a19_the_whole_prompt_is_no_cut():
    shape = Shape(config(), 22)
    for cut in (22, 23, -1):
        with pytest.raises(UsageError, match=r"outside 0 … 21"):
            request(shape, "encoder", cut)
    assert request(shape, "encoder", 21).fresh == 1
    assert [request(shape, "encoder", H).replayed for H in (0, 3, 4, 21)] == [0, 3, 4, 4]


def test_exact_replay_lengths_of_the_real_models():
    real = ModelConfig.from_dict(v41_flash())
    assert exact_replay(real) == 5081
    assert 20 * 127 + 1 == 2541 and 19 * 127 + 1 == 2414
    assert real.decoder_start == 20
    assert [real.kv_source(l) for l in (1, 3, 13, 19, 20, 39)] == [None, 2, 8, 14, 20, 20]
    assert [real.index_source(l) for l in (19, 21, 25, 39)] == [14, 20, 24, 36]
    assert [l for l in real.layers if real.uses_candidates(l)] == [24, 28, 32, 36]


def v41_flash() -> dict:
    return {
        "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "n_routed_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 2304, "hc_mult": 4,
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    }  # fmt: skip


def test_pure_window_stack_obeys_the_light_cone():
    """Spec d.3, case 0.2: what enters layer l is exact iff position ≥ s + l(W-1), what leaves iff ≥ s + (l+1)(W-1)."""
    W, L = 4, 4
    for cut in (5, 12, 16):
        r = request(Shape(pure_window(W, L), 40), "encoder", cut)
        enters, leaves = exact_rows(pure_window(W, L), r)
        position = np.arange(r.start, r.stop)
        for l in range(L):
            assert (enters[l] == (position >= r.start + l * (W - 1))).all()
            assert (leaves[l] == (position >= r.start + (l + 1) * (W - 1))).all()
    assert intervals(enters[1], r.start) == [(15, 40)]


def test_global_entries_of_the_suffix_end_the_exact_region():
    """Case 0.3: with a global branch the law holds until a layer reads an entry that a replayed row contaminated."""
    c = config(W=4, ratios=(1, 1, 1, 1, 1, 1))
    c = replace(c, kv_source_layer_ids=tuple(range(6)), index_source_layer_ids=tuple(range(6)))
    r = request(Shape(c, 40), "encoder", 16)
    enters, _ = exact_rows(c, r)
    position = np.arange(r.start, r.stop)
    for l in (0, 1, 2):
        assert (enters[l] == (position >= 12 + l * 3)).all()
    # Layer 2 writes inexact entries at 16 and 17: from layer 3 on no suffix row is exact again.
    assert not enters[2][(position >= 16) & (position < 18)].any()
    assert not enters[3:, position >= 16].any()


@pytest.mark.parametrize("layer", range(1, 6))
def test_replay_of_l_windows_makes_the_last_row_exact_and_one_row_less_does_not(layer):
    c = pure_window(5, 6)
    for R, want in ((layer * 4 + 1, True), (layer * 4, False)):
        r = request(Shape(c, 80), "encoder", 60, R)
        enters, _ = exact_rows(c, r)
        assert enters[layer][59 - r.start] == want


@given(st.data())
def test_every_plan_reads_only_what_was_written(data):
    W, N = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 60))
    shape = Shape(config(W=W), N, data.draw(st.integers(0, N - 1)))
    cut, R = data.draw(st.integers(0, N - 1)), data.draw(st.integers(1, 20))
    for arm in ARMS:
        r = request(shape, arm, *((cut, R) if has_cut(arm) else ()))
        r.check(shape.config)
        assert r.replayed + r.fresh == r.stop - r.start
        enters, leaves = exact_rows(shape.config, r)
        # Once a row is inexact no deeper layer mends it, and hit is exact everywhere.
        assert (enters[1:] <= enters[:-1]).all() and (leaves <= enters).all()
        if arm in ("full", "repeat", "rechunk", "hit"):
            assert leaves.all()


def test_a_plan_that_could_read_unwritten_keys_is_refused():
    r = request(Shape(config(), 22), "encoder", 20)
    with pytest.raises(ValueError, match="may see window key 15"):
        replace(r, floor=(15,) * 6).check(config())
    with pytest.raises(ValueError, match="does not run before"):
        Plan((r,))


def test_broken_arms_are_refused_where_they_change_nothing():
    shape = Shape(config(W=4), 22)
    for kind in ("start-1", "stale", "overwrite", "floor@2"):
        with pytest.raises(UsageError, match="changes nothing at cut 4"):
            request(shape, f"broken:{kind}", 4)
    for kind in ("start+1", "window+1"):
        assert request(shape, f"broken:{kind}", 4).arm == f"broken:{kind}"
    with pytest.raises(UsageError, match=r"valid:.*broken:floor@5"):
        request(shape, "broken:floor@6", 20)
    assert "oracle:encoder" in valid_arms(shape.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": (0, 0, 2)}, "entries for 6 layers"),
        ({"kv_source_layer_ids": (3,)}, "subset"),
        ({"index_source_layer_ids": (0, 2, 4)}, "no global KV"),
        ({"compress_ratios": (1, 0, 2, 2, 1, 1)}, "no kv source"),
        ({"candidate_source_layer_id": 3}, "not a kv source"),
        (
            {"candidate_source_layer_id": 4, "candidate_topk_blocks": 2, "candidate_block_size": 2},
            "candidate pool too small",
        ),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_a10_a_schedule_that_cannot_run_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        replace(config(), **change)


def test_config_round_trips_in_the_official_layout():
    assert ModelConfig.from_dict(v41.config().to_dict()) == v41.config()
    with pytest.raises(ValueError, match="config lacks"):
        ModelConfig.from_dict({"text_config": {"hidden_size": 3}})
