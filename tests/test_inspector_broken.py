"""Every planted fault is found at every cut H > W, right arms trip nothing, and the exact region is not enough."""

import numpy as np
import pytest
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.pool import Pool
from replayscope.inspector.runner import foreign_tokens, run
from replayscope.inspector.semantics import ARMS, NOISE
from replayscope.traces.schema import THRESHOLDS
from tests import v41

W, L = 6, 12
RIGHT = tuple(a for a in ARMS if a != "full")
KINDS = ("start+1", "start-1", "window+1", "stale", "overwrite", "floor@0", "floor@6", "floor@11")
POINTS = ("window_kv", "global_kv", "attn_out", "hidden", "logits", "topk", "router")
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool()


def judge(pool, dtype, arms, cuts, suffix=None):
    """Fold and runs of an audit on the fixture's weights, on a pool that earlier runs left dirty and poisoned."""
    job = Job(v41.shape(), arms, tuple(cuts), (W,), suffix, oracles=True, audit=True, points=POINTS)
    line, _ = line_up(job)
    pool.poison(float("nan"))
    executor = Executor(v41.model(dtype), pool, frozen=True)
    return run(v41.model(dtype), v41.ids(), job, line, executor, foreign=foreign_tokens(v41.ids(), 0))


def worst(fold, reference, run_, bucket="all"):
    """Largest row error of a run over the state points, and over the logits the largest KL."""
    at = list(fold.buckets).index(bucket)
    states = [
        fold.tables[reference, p].arrays["rel_max"][run_, :, at].max()
        for p in ("window_kv", "global_kv", "attn_out", "hidden")
    ]
    return max(states), fold.tables[reference, "logits"].arrays["kl_max"][run_, 0, at]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_right_arms_trip_nothing_and_every_broken_kind_is_found(pool, dtype):
    cuts = [1, W, *range(W + 1, v41.TOKENS - 1, 6), v41.TOKENS - 1]
    fold, runs = judge(pool, dtype, (*RIGHT, *(f"broken:{k}" for k in KINDS)), cuts)
    floor = max(worst(fold, "full", r.index)[0] for r in runs if r.arm in NOISE)
    assert floor < BOUND[dtype]
    bound = max(BOUND[dtype], 10 * floor)
    found = dict.fromkeys(KINDS, 0)
    for r in runs:
        if r.oracle is None:
            continue
        error, kl = worst(fold, "oracle", r.index)
        if r.arm.startswith("broken:"):
            kind = r.arm.removeprefix("broken:")
            if r.cut > W:
                assert (r.cached_changed > 0) == (kind == "overwrite"), r.label
                assert error > 100 * bound, f"{r.label}: {error:.1e}"
                found[kind] += 1
        else:
            assert error <= bound and kl <= bound, f"{r.label}: {error:.1e}, {kl:.1e}"
            assert worst(fold, "full", r.index, "exact")[0] <= bound, r.label
            assert r.cached_changed == 0
    assert set(found.values()) == {sum(c > W for c in cuts)}


def test_right_runs_have_the_row_counts_of_their_arm(pool):
    """No arm can quietly run as another."""
    _, runs = judge(pool, torch.float64, RIGHT, [40], suffix=None)
    counts = {r.arm: (r.replayed, r.cached, r.fresh, r.decoder_rows) for r in runs}
    N = v41.TOKENS
    assert counts["full"] == counts["repeat"] == counts["rechunk"] == (0, 0, N, N)
    assert counts["hit"] == (0, 40, 28, 28)
    assert counts["encoder"] == (W, 40, 28, 34)
    assert counts["exact"] == (40, 40, 28, 68)
    assert counts["decoder"] == (0, 0, N, W)
    assert counts["both"] == (W, 40, 28, W)


@pytest.mark.parametrize(
    ("kind", "layer", "point", "position"),
    [
        ("start+1", 0, "attn_out", 35),  # row 34 does not run; the next W-1 rows miss it
        ("start-1", 0, "attn_out", 33),  # a row too many, whose own window is cut where the oracle sees all of it
        ("window+1", 0, "attn_out", 40),  # the first row with W+1 keys above the floor: s + W
        ("stale", 0, "attn_out", 34),
        ("floor@6", 6, "attn_out", 34),
        ("floor@11", 11, "attn_out", 34),
    ],
)
def test_the_first_wrong_layer_and_position(pool, kind, layer, point, position):
    fold, runs = judge(pool, torch.float64, ("repeat", f"broken:{kind}"), [40])
    at = next(r.index for r in runs if r.arm.startswith("broken:"))
    threshold = THRESHOLDS.index(1e-12)
    firsts = {
        p: fold.tables["oracle", p].arrays["first_at"][at, :, threshold] for p in ("window_kv", "attn_out", "hidden")
    }
    wrong = {p: np.flatnonzero(f >= 0) for p, f in firsts.items()}
    assert wrong["attn_out"][0] == wrong["hidden"][0] == layer and wrong["window_kv"].min(initial=99) > layer
    assert firsts[point][layer] == position
    if kind == "floor@11":
        # Only the last hidden state and the logits show it.
        assert not wrong["window_kv"].size and fold.tables["oracle", "logits"].arrays["kl_max"][at, 0, 0] > 1e-6


def test_the_exact_region_alone_misses_most_kinds(pool):
    """Against full inside the exact region only the wrong window shows on these weights; the oracle finds all."""
    fold, runs = judge(pool, torch.float64, ("repeat", *(f"broken:{k}" for k in KINDS)), [16, 40])
    seen = {
        r.arm.removeprefix("broken:")
        for r in runs
        if r.arm.startswith("broken:") and worst(fold, "full", r.index, "exact")[0] > 1e-12
    }
    assert "window+1" in seen
    assert not seen & {"stale", "overwrite", "floor@0", "floor@6", "floor@11"}


def test_a15_noise_is_measured_beside_the_replay_and_a_short_hit_sits_at_it(pool):
    """Two cold runs in the same blocks are equal bit by bit, other sums give the floor, and H ≤ W stays at it."""
    job = Job(v41.shape(), ("repeat", "rechunk", "hit", "encoder"), (5, 40), (W,), points=POINTS)
    line, _ = line_up(job)
    fold, runs = run(v41.model(torch.float32), v41.ids(), job, line, Executor(v41.model(torch.float32), pool))
    errors = {(r.arm, r.cut): worst(fold, "full", r.index)[0] for r in runs[1:]}
    assert errors["repeat", None] == 0.0
    floor = max(errors["rechunk", None], errors["hit", 5], errors["hit", 40])
    assert 0.0 < floor < 1e-5
    assert errors["encoder", 5] <= 2 * floor < 1e-2 < errors["encoder", 40]
    assert [r.replayed for r in runs if r.arm == "encoder"] == [5, W]


@pytest.mark.parametrize("cut", [5, 6])
def test_at_h_at_most_w_only_two_kinds_change_anything(pool, cut):
    fold, runs = judge(pool, torch.float64, ("repeat", "broken:start+1", "broken:window+1"), [cut])
    for r in runs:
        if r.arm.startswith("broken:"):
            assert worst(fold, "oracle", r.index)[0] > 1e-6, r.label
