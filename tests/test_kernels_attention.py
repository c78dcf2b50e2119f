"""Window and selected-global attention: the window rule, sinks, absent keys, dirty memory (cases A6, A12, A18)."""

import math
from dataclasses import replace

import pytest
import torch

from replayscope.kernels.attention import window_global_attention
from replayscope.kernels.index import candidate_blocks, index_scores, keep_candidates, topk_entries
from replayscope.kernels.packed import window_keys
from replayscope.model import reference
from tests import v41

ZERO = torch.zeros(1, dtype=torch.long)


def attend(n, window, sink=-math.inf, v=None, floor=0, dtype=torch.float64):
    """Uniform attention (q = 0 makes every score 0) over values v [n, D] as keys, for rows 0 … n-1."""
    position = torch.arange(n)
    slots = window_keys(position, window, torch.full((n,), floor))
    values = torch.eye(n, dtype=dtype) if v is None else v
    q = torch.zeros(n, 1, values.shape[1], dtype=dtype)
    return window_global_attention(q, values, slots, None, None, torch.tensor([sink], dtype=dtype))[:, 0]


def test_a6_uniform_attention_reaches_exactly_w_keys():
    out = attend(8, 4)
    assert (out > 0).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    assert torch.equal(out[7], torch.tensor([0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25], dtype=torch.float64))
    assert torch.equal(attend(8, 1), torch.eye(8, dtype=torch.float64))
    assert (attend(8, 8) > 0).sum(1).tolist() == list(range(1, 9))
    assert (attend(8, 99) > 0).sum(1).tolist() == list(range(1, 9))


@pytest.mark.parametrize(
    ("sink", "want"), [(0.0, [0.5, 2 / 3, 0.75, 0.8, 0.8]), (-math.inf, [1.0] * 5), (50.0, [0.0] * 5)]
)
def test_a18_a_sink_only_enters_the_denominator(sink, want):
    out = attend(5, 4, sink, torch.ones(5, 1, dtype=torch.float64))
    assert torch.allclose(out[:, 0], torch.tensor(want, dtype=torch.float64), atol=1e-15 if sink < 50 else 1e-20)


@pytest.mark.parametrize("sink", [0.0, -math.inf, 50.0])
def test_a18_a_row_without_any_key_gives_zero(sink):
    out = attend(4, 4, sink, torch.ones(4, 1, dtype=torch.float64), floor=2)
    assert torch.equal(out[:2], torch.zeros(2, 1, dtype=torch.float64)) and torch.isfinite(out).all()


def test_slots_that_are_not_listed_are_never_read():
    pool = torch.full((6, 2), float("nan"), dtype=torch.float64)
    pool[3:5] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    q = torch.zeros(2, 1, 2, dtype=torch.float64)
    slots = torch.tensor([[-1, 3, 4], [-1, -1, -1]])
    out = window_global_attention(q, pool, slots, pool, torch.tensor([[4, -1], [-1, -1]]), torch.tensor([-math.inf]))
    assert out[0, 0].tolist() == pytest.approx([7 / 3, 10 / 3]) and out[1, 0].tolist() == [0.0, 0.0]


def test_it_equals_dense_masked_attention_on_random_rows():
    torch.manual_seed(0)
    n, heads, D, W, E = 13, 3, 10, 4, 7
    q, kv, glob = (torch.randn(*s, dtype=torch.float64) for s in ((n, heads, D), (n, D), (E, D)))
    sink, floor = torch.randn(heads, dtype=torch.float64), torch.full((n,), 2)
    picks = torch.stack([torch.randperm(E)[:3] for _ in range(n)])
    picks[5] = -1
    got = window_global_attention(q, kv, window_keys(torch.arange(n), W, floor), glob, picks, sink)
    mask = torch.cat((reference.window_mask(n, W) & (torch.arange(n) >= 2), reference.as_mask(picks, E)), 1)
    scores = torch.einsum("nhd,md->nhm", q, torch.cat((kv, glob))) * D**-0.5
    scores = torch.cat((scores.masked_fill(~mask[:, None], -math.inf), sink[None, :, None].expand(n, -1, 1)), -1)
    want = torch.einsum("nhm,md->nhd", scores.softmax(-1)[..., :-1], torch.cat((kv, glob)))
    assert (got - want).abs().max() < 1e-14
    # The twin: one window key too many is seen.
    wrong = window_global_attention(q, kv, window_keys(torch.arange(n), W + 1, floor), glob, picks, sink)
    assert (wrong - want).abs().max() > 1e-2


def test_topk_candidates_and_scores_equal_the_reference():
    torch.manual_seed(1)
    c = v41.config()
    rows, E = 40, 33
    q, w = torch.randn(rows, c.index_n_heads, c.index_head_dim).double(), torch.randn(rows, c.index_n_heads).double()
    keys = torch.randn(E, c.index_head_dim).double()
    seen = torch.arange(rows).clamp(max=E)
    scores = index_scores(q, w, [keys[:10], keys[10:]], seen)
    want = (torch.einsum("nhd,ed->nhe", q, keys).relu() * w[..., None]).sum(1)
    visible = torch.arange(E) < seen[:, None]
    assert torch.allclose(scores, want.masked_fill(~visible, -math.inf), atol=1e-12)
    ids, margin = topk_entries(scores, c.index_topk)
    ref_ids, ref_margin = reference.select_topk(scores, c.index_topk)
    assert torch.equal(ids, ref_ids) and torch.equal(margin, ref_margin)
    assert (ids[0] == -1).all() and (ids[3] >= 0).sum() == 3
    blocks = candidate_blocks(scores, c.candidate_block_size, c.candidate_topk_blocks)
    pool = reference.candidate_pool(c, scores)
    kept = keep_candidates(scores, blocks, c.candidate_block_size)
    assert torch.equal(kept > -math.inf, pool & (scores > -math.inf))
    # The newest visible entry is always in the pool.
    assert all(pool[i, seen[i] - 1] for i in range(1, rows))


def test_nan_scores_are_chosen_as_in_the_reference_and_never_dropped():
    """NaN counts as the largest, so that what could not be scored is attended; the margin is NaN at the border only."""
    nan, inf = math.nan, math.inf
    scores = torch.tensor([[1.0, nan, 3.0, 2.0, -inf], [nan, 1.0, nan, 0.0, -inf], [-inf, nan, -inf, -inf, -inf]])
    ids, margin = topk_entries(scores, 2)
    assert ids.tolist() == [[1, 2], [0, 2], [1, -1]]
    assert margin[[0, 2]].tolist() == [1.0, inf] and math.isnan(margin[1])
    want, gap = reference.select_topk(scores, 2)
    assert torch.equal(ids, want) and torch.equal(margin.isnan(), gap.isnan()) and torch.equal(margin[::2], gap[::2])
    # A block that holds NaN is in the pool as well.
    kept = keep_candidates(scores, candidate_blocks(scores, 2, 2), 2)
    assert torch.equal(kept.isnan(), scores.isnan())
    pool = reference.candidate_pool(
        replace(v41.config(), index_topk=2, candidate_block_size=2, candidate_topk_blocks=2), scores
    )
    assert torch.equal(kept != -inf, pool & (scores != -inf))
