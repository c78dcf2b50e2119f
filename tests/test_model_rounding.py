"""Rounding bins, bit by bit, and the Engram hash: values worked out by hand or with another implementation."""

import itertools

import numpy as np
import pytest
import torch

from replayscope.model import rounding
from replayscope.model.engram import hash_rows, multipliers, table_sizes
from tests import v41

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_e2m1_bins_ties_to_even_and_saturates():
    for low, high in itertools.pairwise(E2M1):
        middle = (low + high) / 2
        even = low if E2M1.index(low) % 2 == 0 else high
        below, above = np.nextafter(np.float32(middle), np.float32(0)), np.nextafter(np.float32(middle), np.float32(9))
        got = rounding.e2m1(torch.tensor([middle, below, above, -middle]))
        assert got.tolist() == [even, low, high, -even], middle
    assert rounding.e2m1(torch.tensor([5.01, 7.0, 1e30, -1e30, 0.0])).tolist() == [6.0, 6.0, 6.0, -6.0, 0.0]
    every = torch.tensor(E2M1 + [-x for x in E2M1])
    assert torch.equal(rounding.e2m1(every), every)


def test_power_of_two_scales_are_exact_at_their_edges():
    ratio = torch.tensor([1.0, 2.0, np.nextafter(np.float32(2), np.float32(3)), 0.5, 0.3, 3.0, 2.0**-100, 0.0])
    assert rounding._ue8m0(ratio).tolist() == [1.0, 2.0, 4.0, 0.5, 0.5, 4.0, 2.0**-100, 1.0]


def test_window_rounding_is_e4m3_under_a_scale_per_32_channels():
    x = torch.randn(50, 70, dtype=torch.float64) * torch.logspace(-3, 3, 50, dtype=torch.float64)[:, None]
    got = rounding.round_window(x)
    assert got.dtype == torch.float64
    for row, block in itertools.product(range(50), range(3)):
        at = slice(32 * block, min(32 * block + 32, 70))
        values = x[row, at].float()
        scale = 2.0 ** np.ceil(np.log2(max(float(values.abs().max()), 1e-4) / 448))
        want = (values / scale).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(got[row, at].float(), want)


def test_main_rounding_has_an_e4m3_scale_per_16_channels_and_index_rounding_a_power_of_two():
    torch.manual_seed(0)
    x = torch.randn(40, 32, dtype=torch.float64)
    got = rounding.round_main(x)
    for row, block in itertools.product(range(40), range(2)):
        at = slice(16 * block, 16 * block + 16)
        scale = (x[row, at].float().abs().max() / 6).to(torch.float8_e4m3fn).float()
        levels = (got[row, at].float() / scale).abs()
        assert all(min(abs(float(v) - e) for e in E2M1) < 1e-6 for v in levels)
    index = rounding.round_index(torch.tensor([[6.0, 1.24, -2.6, 0.24]]))
    # amax 6 → scale 1: 1.24 → 1, -2.6 → -3, 0.24 → 0.
    assert index.tolist() == [[6.0, 1.0, -3.0, 0.0]]


def test_zero_rows_stay_zero_and_rounding_is_idempotent():
    for f in (rounding.round_window, rounding.round_main, rounding.round_index):
        assert torch.equal(f(torch.zeros(2, 32)), torch.zeros(2, 32))
        once = f(torch.randn(20, 32))
        assert torch.equal(f(once), once), f.__name__


def test_engram_tables_are_ascending_primes_that_no_layer_shares():
    c = v41.config("released")
    assert table_sizes(c) == {1: [41, 43, 47, 53, 59, 61]}
    assert (multipliers(c, 1) % 2 == 1).all() and len(multipliers(c, 1)) == 4


def test_engram_rows_of_a_suffix_need_the_ids_before_it():
    c, ids = v41.config("released"), v41.ids()
    z = v41.arrays("full", "released")
    token_map = torch.tensor(z["engram_token_map"]).long()
    for first in (0, 1, 2, 3, 17, 67):
        assert (hash_rows(c, 1, ids, token_map, first).numpy() == z["engram_hash_L1"][first:]).all()
    # The twin: the first three rows of a suffix that is hashed on its own are wrong.
    alone = hash_rows(c, 1, ids[17:], token_map).numpy()
    differs = (alone != z["engram_hash_L1"][17:]).any(1)
    assert differs[:3].all() and not differs[3:].any()


@pytest.mark.parametrize("back", [1, 2, 3])
def test_the_look_back_stops_at_an_image_token(back):
    c, ids = v41.config("released"), v41.ids().clone()
    token_map = torch.tensor(v41.arrays("full", "released")["engram_token_map"]).long()
    ids[20 - back] = c.image_token_id
    rows = hash_rows(c, 1, ids, token_map)
    changed = ids.clone()
    changed[: 20 - back] = (changed[: 20 - back] + 1) % 100
    assert (hash_rows(c, 1, changed, token_map)[20] == rows[20]).all()
