"""Cases of the sums of two states and of two rows of logits."""

import math
from unittest.mock import patch

import torch
from torch import Tensor

from replayscope.kernels.divergence import logits_rows, row_sums
from tests.triton_table import case, same_sums


def _states(rows: int, width: int, device, dtype) -> tuple[Tensor, Tensor]:
    """Two states in the middle of NaN, with everything that is awkward in the first rows."""
    g = torch.Generator().manual_seed(width)
    a, r = (torch.full((rows, width + 9), math.nan, device=device, dtype=dtype) for _ in range(2))
    a, r = a[:, 4 : 4 + width], r[:, 4 : 4 + width]
    x, noise = torch.randn(rows, width, generator=g), 1e-3 * torch.randn(rows, width, generator=g)
    a.copy_(x)
    r.copy_(torch.where(torch.arange(rows)[:, None] % 2 == 0, x + noise, -x))
    a[1], r[1] = 0.0, 0.0
    a[2] = r[2]
    if width > 4:
        a[3, 0], r[3, 0], a[3, 1], r[3, 1] = math.nan, math.nan, math.inf, math.inf
        a[3, 2], r[3, 3], a[3, 4] = math.nan, -math.inf, -math.inf
        a[4, 1], r[4, 1], a[4, 3], r[4, 3] = 100.0, 0.0, -100.0, 0.0
        a[0, -1] += 3
    return a, r


def _width(width: int) -> None:
    @case(f"row sums width={width}")
    def check(device, dtype):
        a, r = _states(6, width, device, dtype)
        # The pieces of a long row, made short.
        with patch("replayscope.kernels.divergence_triton.PIECE", 128 if width > 128 else 4096):
            same_sums(row_sums(a, r, impl="triton"), row_sums(a, r))


for width in (1, 2, 7, 127, 128, 129, 257, 400):
    _width(width)


@case("row sums of views and none (E12)")
def _(device, dtype):
    g = torch.Generator().manual_seed(3)
    a, r = (torch.randn(8, 6, 5, generator=g).to(device, dtype) for _ in range(2))
    want = row_sums(a[::2].transpose(1, 2).contiguous(), r[:1].expand(4, 6, 5).transpose(1, 2).contiguous())
    same_sums(row_sums(a[::2].transpose(1, 2), r[:1].expand(4, 6, 5).transpose(1, 2), impl="triton"), want)
    for empty in (a[:0], a[:, :0]):
        same_sums(row_sums(empty, empty, impl="triton"), row_sums(empty, empty))
    same_sums(row_sums(a, a, impl="triton"), row_sums(a, a))
    assert (row_sums(a, a, impl="triton")["diff2"] == 0).all()


def _vocab(vocab: int) -> None:
    @case(f"logits vocab={vocab}")
    def check(device, dtype):
        g = torch.Generator().manual_seed(vocab)
        a, r = (3 * torch.randn(9, vocab, generator=g) for _ in range(2))
        a[1] = r[1]
        a[2, 0], r[2, 0], r[3, -1] = -math.inf, -math.inf, -math.inf
        a[4], r[4] = a[4] * 1e30, r[4] * 500
        a[5] = -math.inf
        a[6, 0], r[7, vocab // 2] = math.nan, math.nan
        a[8], r[8] = a[8].round(), r[8].round()
        token = torch.randint(-1, vocab, (9,), generator=g)
        a, r, token = a.to(device, dtype), r.to(device, dtype), token.to(device)
        small = {"PIECE": 128, "_BLOCK": 128} if vocab > 64 else {"_BLOCK": 64}
        with patch.multiple("replayscope.kernels.logits_triton", **small):
            got = logits_rows(a, r, token, 5, impl="triton")
        want = logits_rows(a, r, token, 5)
        same_sums(got, want)
        assert all(float(got[k][1]) == 0.0 for k in ("kl", "kl_rev", "js")), "identical logits are apart"


for vocab in (1, 2, 5, 33, 129):
    _vocab(vocab)


@case("logits of suppressed tokens and ties (E4, E13)")
def _(device, dtype):
    def rows(a, r, k=5):
        a, r = (torch.tensor([x], device=device) for x in (a, r))
        return {n: float(v) for n, v in logits_rows(a, r, torch.tensor([-1], device=device), k, impl="triton").items()}

    inf = math.inf
    assert abs(rows([1.0, 2.5, -inf], [1.0, 2.0, -inf])["kl"] - 0.0226) < 5e-5
    out = rows([1.0, 2.0, 0.0], [1.0, 2.0, -inf])
    assert abs(out["kl"] - 0.0943) < 5e-5 and out["kl_rev"] == inf and out["js"] < math.log(2)
    assert math.isnan(rows([1.0, 2.0], [-inf, -inf])["kl"]) and math.isnan(rows([1.0], [1.0])["dlogp"])
    # Tied tokens count for each other, whichever a sort puts first.
    assert rows([1.0, 2.0, 2.0, 2.0, 0.0], [1.0, 2.0, 2.0, 2.0, 0.0], 2)["overlap"] == 1.0


@case("the first NaN is the most likely token, as in torch")
def _(device, dtype):
    a = torch.zeros(5, 200, device=device, dtype=dtype)
    a[0, 3], a[0, 5], a[1, 5], a[1, 9] = math.inf, math.nan, math.nan, math.inf
    a[2, 150], a[2, 199], a[3, 7] = math.nan, math.nan, math.inf
    a[4, 3], a[4, 190] = math.inf, math.nan
    place, token = torch.tensor([5, 5, 150, 7, 190], device=device), torch.full((5,), -1, device=device)
    small = {"PIECE": 128, "_BLOCK": 64}
    for at, flips in ((place, 0), (place + 1, 1)):
        # A reference whose largest logit is known tells which column the arm's is.
        r = torch.zeros_like(a).scatter_(1, at[:, None], 1.0)
        with patch.multiple("replayscope.kernels.logits_triton", **small):
            got = logits_rows(a, r, token, impl="triton")
        same_sums(got, logits_rows(a, r, token))
        assert got["flip"].tolist() == [flips] * 5


@case("equal logits are at distance 0 in any layout and dtype")
def _(device, dtype):
    """Both sides must be read by one compiled kernel: another order of its sums would be a rounding apart."""
    from replayscope.kernels import logits_triton

    g = torch.Generator().manual_seed(4)
    a = (3 * torch.randn(4, 3000, generator=g)).to(device, dtype)
    token, launched = torch.arange(4, device=device), []
    wide = torch.zeros(4, 6001, device=device, dtype=dtype)
    wide[:, 1::2] = a
    odd = torch.zeros(4 * 3000 + 1, device=device, dtype=dtype)[1:].view(4, 3000)
    odd.copy_(a)

    def keep(x, *more):
        launched.append((x.dtype, x.data_ptr() % 16, x.stride()))
        return made(x, *more)

    made = logits_triton._Normalised
    for other in (wide[:, 1::2], a.T.contiguous().T, odd, a.double(), a.float()):
        for x, y in ((a, other), (other, a)):
            launched.clear()
            # The arm's dtype decides whether Triton is asked at all.
            if x.dtype == torch.float64:
                continue
            with patch("replayscope.kernels.logits_triton._Normalised", keep):
                got = logits_rows(x, y, token, impl="triton")
            assert launched[0] == launched[1], f"launched as {launched}"
            assert all((got[k] == 0).all() for k in ("kl", "kl_rev", "js", "flip", "dlogp"))
            same_sums(got, logits_rows(x, y, token))


@case("pairs of rows are read where they lie")
def _(device, dtype):
    a, r = _states(6, 40, device, dtype)
    both = torch.tensor([[5, 0], [0, 0], [3, 3], [3, 1]], device=device)
    # As two tensors, and as two columns of one, whose numbers do not lie next to each other.
    for pairs in ((both[:, 0].clone(), both[:, 1].clone()), (both[:, 0], both[:, 1])):
        want = row_sums(a[pairs[0]], r[pairs[1]])
        same_sums(row_sums(a, r, impl="triton", pairs=pairs), want)
        same_sums(row_sums(a, r, pairs=pairs), want)
        token = torch.arange(4, device=device)
        want = logits_rows(a[pairs[0]], r[pairs[1]], token)
        same_sums(logits_rows(a, r, token, impl="triton", pairs=pairs), want)
        same_sums(logits_rows(a, r, token, pairs=pairs), want)
