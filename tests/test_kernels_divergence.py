"""Row sums in torch against their meaning in numpy, with everything that is awkward."""

import numpy as np
import pytest
import torch

from replayscope.inspector.metrics import logits_sums, state_sums
from replayscope.kernels.divergence import _top, logits_rows, row_sums


def awkward(seed: int, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, r = rng.normal(size=(rows, width)), rng.normal(size=(rows, width))
    a[1], r[1] = 0.0, 0.0
    a[2] = r[2]
    a[3], r[3] = 0.0, 1.0
    if width > 4:
        a[4, 0], r[4, 0] = np.nan, np.nan
        a[4, 1], r[4, 1] = np.inf, np.inf
        a[4, 2], r[4, 3] = np.nan, -np.inf
        a[5, :3], r[5, :3] = np.inf, -np.inf
    return a, r


@pytest.mark.parametrize("width", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_row_sums_equal_their_meaning(width, dtype):
    a, r = (torch.tensor(x).to(dtype) for x in awkward(width, 9, width))
    got = {k: v.numpy() for k, v in row_sums(a, r).items()}
    want = state_sums(a.double().numpy(), r.double().numpy())
    assert got.keys() == want.keys()
    for name, value in want.items():
        # Both sum in float64; the order differs.
        np.testing.assert_allclose(got[name], value, rtol=1e-12, atol=1e-14, err_msg=name)


def test_row_sums_of_views_and_wider_shapes_are_logical():
    base = torch.randn(8, 6, 5, dtype=torch.float64)
    ref = torch.randn(8, 6, 5, dtype=torch.float64)
    got, want = (
        row_sums(base[::2].transpose(1, 2), ref[::2].transpose(1, 2)),
        row_sums(base[::2].contiguous(), ref[::2].contiguous()),
    )
    assert torch.allclose(got["diff2"], want["diff2"], rtol=1e-14)
    one = base.clone()
    one[3, 2, 1] += 5
    sums = row_sums(one, base)
    assert sums["max_abs"].nonzero().flatten().tolist() == [3] and int(sums["max_col"][3]) == 2 * 5 + 1


@pytest.mark.parametrize("vocab", [2, 5, 33, 300])
def test_logits_rows_equal_their_meaning(vocab):
    rng = np.random.default_rng(vocab)
    a, r = rng.normal(size=(7, vocab)) * 3, rng.normal(size=(7, vocab)) * 3
    a[1] = r[1]
    a[2, 0], r[2, 0] = -np.inf, -np.inf
    r[3, 1] = -np.inf
    a[4], r[4] = 500 * a[4], 500 * r[4]
    # Not impossible, but too unlikely for a float64: it adds nothing, also where the other side rules it out.
    r[5, 0], a[5, 0] = -3000, -np.inf
    following = np.array([0, 1, 1, 0, -1, 1, 0])
    got = {k: v.numpy() for k, v in logits_rows(torch.tensor(a), torch.tensor(r), torch.tensor(following)).items()}
    want = logits_sums(a, r, following)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-10, atol=1e-14, err_msg=name)
    assert np.isfinite(got["kl"][5]) and np.isfinite(got["js"][5])
    assert got["kl"][1] == 0.0 and got["kl"][2] < np.inf and got["kl_rev"][3] == np.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_largest_logits_are_those_that_a_sort_finds(dtype):
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(0)).mul_(2).round_().to(dtype)  # many are equal
    x[::5, 3], x[1::7, 4], x[2], x[3], x[4, :2] = torch.nan, torch.inf, -torch.inf, torch.nan, -torch.inf
    for k in (1, 2, 5, 9):
        got, want = _top(x, k), x.sort(-1, descending=True).values[:, :k]
        assert got.dtype == dtype and torch.equal(torch.isnan(got), torch.isnan(want))
        assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))


def test_row_sums_and_logits_rows_can_be_compiled():
    a, r = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    for call in (lambda: row_sums(a, r), lambda: logits_rows(a, r, torch.arange(6))):
        got, want = torch.compile(call, backend="eager")(), call()
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
