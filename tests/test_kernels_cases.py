"""Failures that others reported of numerical comparison and of kernels, each as a test of ours; E8 to E12 of the Triton
forms stand in tests/triton_*.py, E5 in tests/test_inspector_metrics.py."""

import math

import numpy as np
import pytest
import torch

from replayscope.inspector.metrics import metric
from replayscope.kernels.attention import packed_attention
from replayscope.kernels.divergence import logits_rows, row_sums
from replayscope.kernels.packed import WindowRows
from replayscope.traces import RowTable

NAN, INF = math.nan, math.inf


def value(name: str, a, r, dtype=torch.float32) -> float:
    """A metric of one row, from its sums."""
    sums = row_sums(torch.tensor([a], dtype=dtype), torch.tensor([r], dtype=dtype))
    arrays = {k: v.numpy()[None] for k, v in sums.items() if k not in ("max_col", "bad")}
    return float(metric(RowTable(np.arange(1), arrays), name)[0, 0])


def test_e1_a_vector_has_the_distance_zero_from_itself():
    """fp32 gives it a cosine of 1.0000001 (pytorch/pytorch#18057)."""
    x = list(range(84))
    assert value("cosine", x, x) == 0.0 and value("rel_l2", x, x) == 0.0
    assert math.sqrt(value("cosine", x, x)) == 0.0
    # The twin: the plain formula leaves a distance at one multiple or another.
    scaled = [torch.tensor(x) * s for s in (0.1, 0.3, 0.7, 1.0)]
    assert any(float(1 - torch.cosine_similarity(v, v, dim=0)) != 0 for v in scaled)
    # Rounding the numbers to fp32 turns a vector by 2^-24 at most, and the distance is the square of that.
    assert 0.0 <= value("cosine", [0.1 * v for v in x], [0.3 * v for v in x]) <= 1e-13


def test_e2_zero_against_zero_is_equal_and_against_something_undefined():
    """An epsilon makes equal zero vectors totally different (pytorch/torchdynamo#587)."""
    assert value("cosine", [0.0, 0.0], [0.0, 0.0]) == 0.0
    assert math.isnan(value("cosine", [1.0, 0.0], [0.0, 0.0])) and value("rel_l2", [1.0, 0.0], [0.0, 0.0]) == INF
    both, one = row_sums(*(torch.tensor([[NAN, 1.0]]),) * 2), row_sums(torch.tensor([[NAN, 1.0]]), torch.ones(1, 2))
    assert (int(both["nonfinite"]), int(both["bad"])) == (0, 1) and (int(one["nonfinite"]), int(one["bad"])) == (1, 1)
    assert value("rel_l2", [NAN, 1.0], [NAN, 1.0]) == 0.0 and value("rel_l2", [NAN, 1.0], [1.0, 1.0]) == INF


def test_e4_only_real_infinities_stay():
    """0·(-inf - -inf) makes a KL NaN, and cutting all infinities hides those that are real (p-e-w/heretic#348)."""
    p, q = torch.tensor([[1.0, 2.0, -INF]]), torch.tensor([[1.0, 2.5, -INF]])
    none = torch.tensor([-1])
    assert float(logits_rows(q, p, none)["kl"]) == pytest.approx(0.0226, abs=5e-5)
    rows = logits_rows(torch.tensor([[1.0, 2.0, 0.0]]), p, none)
    assert float(rows["kl"]) == pytest.approx(0.0943, abs=5e-5) and float(rows["kl_rev"]) == INF
    assert torch.isnan(logits_rows(p, torch.full((1, 3), -INF), none)["kl"]).all()


def test_e6_an_overflow_is_found_where_it_happens():
    """A residual beyond 65504 makes all that follows NaN in fp16; bf16 rounds it (ROCm/hip-ep#168)."""
    parts = torch.tensor([[58820.0]]), torch.tensor([[33760.0]])
    half = sum(x.half() for x in parts)
    sums = row_sums(half, sum(parts))
    assert (int(sums["bad"]), int(sums["nonfinite"]), float(sums["max_abs"])) == (1, 1, 0.0)
    brain = row_sums(sum(x.bfloat16() for x in parts), sum(parts))
    assert (int(brain["bad"]), float(brain["max_abs"])) == (0, 92.0)


def test_e13_neighbours_change_no_bit_and_company_only_the_rounding():
    """A row's bits may depend on the shape it runs in, never on its neighbours' content (pegainfer#414)."""
    torch.manual_seed(0)
    at, zero = torch.arange(6), torch.zeros(6, dtype=torch.long)
    rows, sink, kv = WindowRows(at, zero, zero, zero, zero), torch.zeros(3), torch.randn(6, 24)
    q = torch.randn(6, 3, 24)
    other = torch.where((at == 2)[:, None, None], q, q + 7)
    many = packed_attention(q, kv, rows, 4, None, None, sink)
    assert torch.equal(packed_attention(other, kv, rows, 4, None, None, sink)[2], many[2])
    alone = WindowRows(*(t[2:3] for t in vars(rows).values()))
    # Other shapes may sum in another order: a few 2^-24 of values up to 4.
    assert (packed_attention(q[2:3], kv, alone, 4, None, None, sink)[0] - many[2]).abs().max() < 1e-5
    # The twin: a neighbour's key is not a neighbour's content.
    moved = torch.where((at == 1)[:, None], kv + 1, kv)
    assert not torch.equal(packed_attention(q, moved, rows, 4, None, None, sink)[2], many[2])


def test_e13_ties_are_told_by_their_margin_and_count_as_a_set():
    """A flip between two logits one ulp apart says little: the margin stands beside it."""
    near = math.nextafter(2.0, 3.0)
    a, r = (torch.tensor([x], dtype=torch.float64) for x in ([1.0, near, 2.0], [1.0, 2.0, near]))
    rows = logits_rows(a, r, torch.tensor([-1]))
    assert int(rows["flip"]) == 1 and float(rows["margin"]) == near - 2.0
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert float(logits_rows(tied, tied, torch.tensor([-1]), k=2)["overlap"]) == 1.0
    apart = torch.tensor([[5.0, 4.0, 0.0, 0.0, 0.0]])
    assert float(logits_rows(tied, apart, torch.tensor([-1]), k=2)["overlap"]) == 0.5
