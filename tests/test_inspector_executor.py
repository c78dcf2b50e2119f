"""What the executor keeps: dirty pools, packing, chunks, decoding, cached bytes (cases A1, A5, A8, A12, A13, E13)."""

from dataclasses import replace

import pytest
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.generate import generate
from replayscope.inspector.plan import Plan
from replayscope.inspector.pool import Pool
from replayscope.inspector.semantics import exact_replay, request
from replayscope.kernels.packed import window_keys
from tests import v41

# fp64 runs that are equal on paper differ by rounding in products of other shapes: measured 1e-14 on these weights.
EQUAL = 1e-12
W, N = 6, v41.TOKENS


@pytest.fixture(scope="module")
def pool() -> Pool:
    """One pool for all tests of this file: every run finds what the others left."""
    return Pool()


def run(pool, requests, dtype=torch.float64, tokens=None, **options):
    executor = Executor(v41.model(dtype), pool, **options)
    return v41.rows(executor, requests, tokens=tokens), executor


def worst(a: dict, b: dict, first_a: int, first_b: int, since: int, names=None) -> float:
    """Largest relative L2 over the row points of two runs, from position ``since`` on."""
    out = 0.0
    for name in names or [
        n for n in a if n.split(".")[-1] in ("attn_in", "window_kv", "hidden", "attn_out", "streams", "logits")
    ]:
        x, y = a[name], b[name]
        # Rows are stored up to the same last position; a tail arm has fewer of them.
        n = min(len(x), len(y), N - since)
        out = max(out, v41.relative(x[len(x) - n :], y[len(y) - n :]))
    return out


@pytest.mark.parametrize("poison", [219.0, float("nan"), float("inf")])
@pytest.mark.parametrize("arm", ["encoder", "hit", "exact", "both"])
def test_a5_nothing_is_read_that_this_run_did_not_write(pool, arm, poison):
    requests = [request(v41.shape(), "full"), request(v41.shape(), arm, 40)]
    clean, _ = run(Pool(), requests)
    pool.poison(poison)
    dirty, executor = run(pool, requests)
    for name, value in clean[1].items():
        assert torch.equal(value, dirty[1][name]), name
    assert executor.plan.requests[1].cached == 40


def test_a5_a_window_left_by_another_prompt_does_not_leak(pool):
    other = v41.ids().flip(0)
    run(pool, [request(v41.shape(), "full"), request(v41.shape(), "encoder", 40)], tokens={"prompt": other})
    after, _ = run(pool, [request(v41.shape(), "full"), request(v41.shape(), "encoder", 40)])
    fresh, _ = run(Pool(), [request(v41.shape(), "full"), request(v41.shape(), "encoder", 40)])
    assert all(torch.equal(after[1][k], fresh[1][k]) for k in fresh[1])


def test_a5_twin_a_forgotten_floor_lets_the_poison_in(pool):
    full, enc = request(v41.shape(), "full"), request(v41.shape(), "encoder", 40)
    stale = replace(enc, floor=(0,) * 12, window_owner="foreign")
    foreign = replace(full, arm="foreign", tokens="foreign")
    tokens = {"prompt": v41.ids(), "foreign": v41.ids().flip(0)}
    right, _ = run(pool, [full, enc])
    wrong, _ = run(pool, [full, foreign, stale], tokens=tokens)
    assert v41.relative(wrong[2]["layers.0.attn_out"], right[1]["layers.0.attn_out"]) > 1e-2


@pytest.mark.parametrize("cut", [1, 2, 5, 6])
def test_h_at_most_w_equals_full(pool, cut):
    (full, enc), ex = run(pool, [request(v41.shape(), "full"), request(v41.shape(), "encoder", cut)])
    assert worst(enc, full, 0, 0, 0) <= EQUAL
    assert ex.plan.requests[1].replayed == cut  # the replay really ran
    (full, wrong), _ = run(pool, [request(v41.shape(), "full"), request(v41.shape(), "broken:window+1", cut)])
    assert worst(wrong, full, 0, 0, 0) > 1e-3


@pytest.mark.parametrize("cut", [7, 15, 16, 40, 62, 67])
def test_hit_equals_full_at_even_and_odd_cuts(pool, cut):
    (full, hit), ex = run(pool, [request(v41.shape(), "full"), request(v41.shape(), "hit", cut)])
    r = ex.plan.requests[1]
    assert (r.replayed, r.cached, r.fresh) == (0, cut, N - cut)
    assert worst(hit, full, cut, 0, cut) <= EQUAL


@pytest.mark.parametrize("cut", [62, 65, 67])
def test_exact_replay_rebuilds_every_window_and_everything_from_the_last_prefix_row_on(pool, cut):
    c = v41.config()
    R = exact_replay(c)
    assert R == 61
    (full, exact, short), _ = run(
        pool,
        [
            request(v41.shape(), "full"),
            request(v41.shape(), "exact", cut),
            request(v41.shape(), "encoder", cut, R - 12),
        ],
    )
    s = cut - R
    for l in c.layers:
        window = slice(cut - W - s, cut - s)
        assert (
            v41.relative(exact[f"layers.{l}.window_kv"][window], full[f"layers.{l}.window_kv"][cut - W : cut]) <= EQUAL
        )
    assert worst(exact, full, s, 0, cut - 1) <= EQUAL
    assert v41.relative(short["layers.6.window_kv"][:8], full["layers.6.window_kv"][cut - R + 12 : cut - R + 20]) > 1e-6


@pytest.mark.parametrize("layer", range(1, 7))
def test_replay_length_per_layer_is_minimal(pool, layer):
    """R = l(W-1)+1 makes row H-1 of layer l exact, one row less does not; deeper the influence drops below 1e-10."""
    cut, R = 62, layer * (W - 1) + 1
    (full, enough, short), _ = run(
        pool,
        [
            request(v41.shape(), "full"),
            request(v41.shape(), "encoder", cut, R),
            request(v41.shape(), "encoder", cut, R - 1),
        ],
    )
    name, want = f"layers.{layer}.window_kv", full[f"layers.{layer}.window_kv"][cut - 1 : cut]
    assert v41.relative(enough[name][R - 1 : R], want) <= EQUAL
    assert v41.relative(short[name][R - 2 : R - 1], want) > 1e-10


@pytest.mark.parametrize("cut", [16, 24, 40])
def test_layer_0_is_exact_layer_1_only_in_its_last_row(pool, cut):
    """Spec d.3, counted on unrounded weights in the lower layers."""
    (full, enc), _ = run(pool, [request(v41.shape(), "full"), request(v41.shape(), "encoder", cut)])
    s = cut - W
    for layer, exact in ((0, W), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)):
        name = f"layers.{layer}.window_kv"
        gaps = [v41.relative(enc[name][i : i + 1], full[name][s + i : s + i + 1]) for i in range(W)]
        assert [g <= EQUAL for g in gaps] == [i >= W - exact for i in range(W)], gaps


def test_decoder_exact_counts(pool):
    """Spec e.2, paper: the source layer keeps W exact window rows, the next one a single row, later ones none."""
    (full, tail), ex = run(pool, [request(v41.shape(), "full"), request(v41.shape(), "decoder")])
    D = v41.config().decoder_start
    assert ex.plan.requests[1].stop - ex.plan.requests[1].first_row[D] == W
    for layer, exact in ((D, W), (D + 1, 1), (D + 2, 0)):
        rows = tail[f"layers.{layer}.window_kv"][-W:]
        gaps = [
            v41.relative(rows[i : i + 1], full[f"layers.{layer}.window_kv"][N - W + i : N - W + i + 1])
            for i in range(W)
        ]
        assert sum(g <= EQUAL for g in gaps) == exact, gaps
    # A2: rows that were not run are not there to be read.
    assert len(tail["logits"]) == W and len(tail[f"layers.{D - 1}.hidden"]) == N


def test_cached_entries_keep_their_bytes_and_overwrite_is_seen(pool):
    full = request(v41.shape(), "full")
    arms = [request(v41.shape(), a, cut) for a in ("hit", "encoder", "exact", "both") for cut in (10, 41)]
    _, ex = run(pool, [full, *arms])
    kept = [2 * (cut // 2) + cut for cut in (10, 41)] * 4
    assert ex.prefix_check.compared[1:] == kept
    assert ex.prefix_check.changed == [0] * 9
    _, ex = run(pool, [full, request(v41.shape(), "broken:overwrite", 41), request(v41.shape(), "encoder", 41)])
    # Rows 35 … 40 overwrite entries 18, 19 of layers 2 and 4 and 35 … 40 of layer 6, in their own copy only.
    assert ex.prefix_check.changed == [0, 2 * 2 + 6, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_reproducible_packed_is_bitwise_single(pool, dtype):
    """E13, and the reason for the mode: without it the same rows get other bits in other company."""
    full = request(v41.shape(), "full")
    arms = [
        request(v41.shape(), a, cut)
        for a, cut in (("encoder", 16), ("encoder", 41), ("hit", 40), ("broken:window+1", 40))
    ]
    packed, _ = run(pool, [full, *arms], dtype, reproducible=True)
    for i, arm in enumerate(arms):
        (_, single), _ = run(pool, [full, arm], dtype, reproducible=True)
        for name, value in single.items():
            assert torch.equal(value, packed[i + 1][name]), f"{arm.name} {name}"


def test_neighbours_do_not_change_a_request(pool):
    full, enc = request(v41.shape(), "full"), request(v41.shape(), "encoder", 40)
    alone, _ = run(pool, [full, enc])
    among, _ = run(pool, [full, *[request(v41.shape(), "encoder", c) for c in (7, 16, 66)], enc])
    assert (
        max(v41.relative(among[-1][k], v) for k, v in alone[1].items() if v.is_floating_point() and "margin" not in k)
        <= EQUAL
    )


@pytest.mark.parametrize("chunks", [(6,), (1, 1, 1, 1, 1, 1), (1, 2, 3), (5, 1)])
@pytest.mark.parametrize("arm", ["hit", "encoder"])
def test_a8_extending_in_one_call_or_in_steps_is_the_same(pool, arm, chunks):
    """Prefix 10 then 6 more rows, whole or in pieces, at an odd and an even place of the ratio-2 pairs."""
    shape = v41.shape(tokens=16)
    requests = (request(shape, "full"), request(shape, arm, 10))
    plan, tokens = Plan(requests), {"prompt": v41.ids()}
    whole = v41.rows(Executor(v41.model(), pool), list(requests), tokens=tokens)
    ex = Executor(v41.model(), pool, keep_state=True)
    ex.start(plan, tokens)
    stops, got = [16, 10], []
    for i, n in enumerate(chunks):
        stops = [16, stops[1] + n] if i else [16, 10 + n]
        for frame in ex.advance(stops, frozenset({"logits"})):
            if "logits" in frame.tensors:
                got.append(frame.tensors["logits"][frame.spans["logits"][1].rows].clone())
    rows = torch.cat(got)
    assert v41.relative(rows, whole[1]["logits"]) <= EQUAL
    assert torch.equal(rows.argmax(-1), whole[1]["logits"].argmax(-1))


def test_a12_a13_requests_of_other_lengths_have_all_their_rows(pool):
    """Lengths W-1, W, W+1, 2W+3 in one pack equal their own runs and have no row too few."""
    for length in (W - 1, W, W + 1, 2 * W + 3):
        shape = v41.shape(tokens=length)
        pool.poison(float("nan"))
        (short,), _ = run(pool, [request(shape, "full")])
        assert len(short["logits"]) == length and torch.isfinite(short["logits"]).all()
        (full,), _ = run(pool, [request(v41.shape(), "full")])
        assert v41.relative(short["logits"], full["logits"][:length]) <= EQUAL


def test_forced_greedy_and_sampled_decoding(pool):
    steps = 5
    shape = v41.shape(forced=steps)
    arms = [request(shape, "full"), request(shape, "hit", 40), request(shape, "encoder", 40), request(shape, "decoder")]
    plan, tokens = Plan(tuple(arms)), {"prompt": v41.ids()}
    greedy = generate(v41.model(), plan, tokens, steps)
    assert greedy.ids.shape == (4, steps) and greedy.first_difference(1) is None
    # Decoded tokens, forced in one prefill, give the logits that they were decoded from.
    ids = v41.ids().clone()
    ids[N - steps :] = greedy.ids[0]
    forced = v41.rows(Executor(v41.model(), pool), [arms[0]], tokens={"prompt": ids})
    assert v41.relative(greedy.logits[0], forced[0]["logits"][N - steps - 1 : N - 1]) <= EQUAL
    first, again = (generate(v41.model(), plan, tokens, steps, temperature=1.0, seed=3) for _ in range(2))
    assert torch.equal(first.ids, again.ids) and torch.equal(first.ids[0], first.ids[1])
    assert not torch.equal(first.ids, generate(v41.model(), plan, tokens, steps, temperature=1.0, seed=4).ids)
    with pytest.raises(ValueError, match="no room"):
        generate(v41.model(), plan, tokens, steps + 1)


def test_window_rule_is_w_keys_with_the_query_itself():
    position = torch.arange(8)
    keys = window_keys(position, 4, torch.zeros(8, dtype=torch.long))
    assert (keys >= 0).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    assert keys[7].tolist() == [4, 5, 6, 7]
    assert window_keys(position, 1, torch.zeros(8, dtype=torch.long))[:, 0].tolist() == list(range(8))
    assert (window_keys(position, 8, torch.zeros(8, dtype=torch.long)) >= 0).sum(1).tolist() == list(range(1, 9))
    assert window_keys(position, 4, torch.full((8,), 6))[7].tolist() == [-1, -1, 6, 7]


def test_a10_a_global_layer_sees_beyond_the_window_and_a_window_layer_does_not(pool):
    ids = v41.ids().clone()
    ids[0] = (ids[0] + 1) % 100
    (a,), _ = run(pool, [request(v41.shape(tokens=3 * W), "full")])
    (b,), _ = run(pool, [request(v41.shape(tokens=3 * W), "full")], tokens={"prompt": ids})
    assert torch.equal(a["layers.0.attn_out"][-1], b["layers.0.attn_out"][-1])
    assert v41.relative(a["layers.2.attn_out"][-1:], b["layers.2.attn_out"][-1:]) > 1e-6
