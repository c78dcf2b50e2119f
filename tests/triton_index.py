"""Cases of the indexer and of the compressor."""

import math
from unittest.mock import patch

import torch
from torch import Tensor

from replayscope.kernels.compressor import compress_pairs
from replayscope.kernels.impl import interpreted
from replayscope.kernels.index import candidate_blocks, index_scores, topk_entries
from tests.triton_table import TOLERANCE, case, same


def _scores(rows: int, heads: int, dim: int, parts: tuple[int, ...], size: int = 0) -> None:
    @case(
        f"index scores rows={rows} heads={heads} dim={dim} parts={'+'.join(map(str, parts))}"
        + f" pool={size}" * (size > 0)
    )
    def check(device, dtype):
        g = torch.Generator().manual_seed(rows)
        q = torch.randn(rows, heads, dim, generator=g).to(device, dtype)
        w = torch.randn(rows, heads, generator=g).to(device) / heads
        keys = [torch.randn(n, dim, generator=g).to(device, dtype) for n in parts]
        total = sum(parts)
        seen = torch.randint(0, total + 1, (rows,), generator=g).to(device)
        seen[0], seen[-1] = 0, total
        blocks = None
        if size:
            blocks = candidate_blocks(index_scores(q, w, keys, seen), size, 3)
        got = index_scores(q, w, keys, seen, blocks, size, impl="triton")
        want = index_scores(q, w, keys, seen, blocks, size)
        same("scores", got, want, TOLERANCE["scores", dtype])
        for k in (1, 3, total, total + 4):
            check_topk(want, k)


_scores(1, 1, 16, (1,))
_scores(5, 4, 24, (10, 23))
_scores(7, 3, 32, (0, 40), size=4)
_scores(3, 8, 128, (5,))


def check_topk(scores: Tensor, k: int) -> None:
    """The same sets and margins; where the margin is 0 any of the tied ones may be taken: then the same scores."""
    (got, margin), (want, at) = topk_entries(scores, k, impl="triton"), topk_entries(scores, k)
    same("margin", margin, at)
    assert ((got[:, :-1] < got[:, 1:]) | (got[:, 1:] < 0)).all(), "not ascending, or absent ones in between"
    for row in range(len(scores)):
        if at[row] > 0:
            assert torch.equal(got[row], want[row]), f"row {row}: {got[row].tolist()} is not {want[row].tolist()}"
        taken, right = (scores[row][x[row][x[row] >= 0]].sort().values for x in (got, want))
        assert torch.equal(taken.nan_to_num(9e9), right.nan_to_num(9e9)), f"row {row} takes other scores"


@case("top-k with ties, infinities and nothing to take")
def _(device, dtype):
    g = torch.Generator().manual_seed(5)
    scores = torch.randint(-2, 3, (7, 50), generator=g).float()
    scores[1] = -math.inf
    scores[2, 3:] = -math.inf
    scores[3, ::2] = -math.inf
    scores[4] = 0.0
    scores[5] *= 1e30
    scores[6, 7], scores[6, 9] = math.inf, -0.0
    with patch("replayscope.kernels.index_triton._BLOCK", 32):
        for k in (4, 60):
            check_topk(scores.to(device), k)
        check_topk(scores.to(device)[:, ::3], 4)
        check_topk(scores.to(device)[:, :0], 4)


@case("index scores of NaN and infinite numbers")
def _(device, dtype):
    """A score that cannot be computed is NaN, in the row and for the entry where it is, and nowhere else."""
    g = torch.Generator().manual_seed(8)
    # Three heads: the tile has a fourth, which must not meet what is infinite.
    q, keys = (torch.randn(*s, generator=g).to(device, dtype) for s in ((5, 3, 16), (6, 16)))
    w, seen = torch.randn(5, 3, generator=g).to(device), torch.tensor([6, 6, 4, 6, 0], device=device)
    q[1, 2, 3], q[3] = math.nan, math.nan
    for key, value in ((2, math.nan), (5, math.nan), (2, math.inf), (2, -math.inf)):
        some = keys.clone()
        some[key, 7] = value
        got, want = (index_scores(q, w, [some], seen, impl=impl) for impl in ("triton", "torch"))
        same("scores", got, want, TOLERANCE["scores", dtype])
        assert torch.isnan(got[1]).all() and torch.isnan(got[3]).all() and (got[4] == -math.inf).all()
        if math.isnan(value):
            # The third row sees four entries.
            assert torch.isnan(got[0]).nonzero()[:, 0].tolist() == [key]
            assert torch.isnan(got[2]).nonzero()[:, 0].tolist() == ([key] if key < 4 else [])
        check_topk(want, 2)


@case("index scores of wide heads")
def _(device, dtype):
    """Heads of 512 get smaller tiles, and what no program can hold is refused by name."""
    g = torch.Generator().manual_seed(10)
    q, keys = (torch.randn(*s, generator=g).to(device, dtype) for s in ((3, 2, 512), (70, 512)))
    w, seen = torch.randn(3, 2, generator=g).to(device), torch.tensor([70, 65, 3], device=device)
    got, want = (index_scores(q, w, [keys], seen, impl=impl) for impl in ("triton", "torch"))
    # Four times as many products as in the other cases, over fewer heads.
    same("scores", got, want, 2 * TOLERANCE["scores", dtype])
    try:
        index_scores(torch.zeros(1, 8, 4096, device=device), w[:1, :1].expand(1, 8), [], seen[:1], impl="triton")
    except ValueError as error:
        assert "8 heads of 4096 numbers are too many for a program; use torch" in str(error)
    else:
        raise AssertionError("heads of 4096 ran")


@case("top-k with NaN")
def _(device, dtype):
    """NaN counts as the largest score and is taken; the margin says so where it stands at the border."""
    nan, inf = math.nan, math.inf
    scores = torch.full((7, 40), -inf)
    scores[:, :5] = torch.tensor([1.0, 5.0, 3.0, 2.0, 4.0])
    scores[0, 2], scores[1, 1:3], scores[2, 1:4] = nan, nan, nan
    scores[3], scores[5, 4] = nan, -nan
    scores[4, :5] = torch.tensor([inf, nan, inf, 2.0, -inf])
    scores[6, 2:] = -inf
    scores[6, 0] = nan
    with patch("replayscope.kernels.index_triton._BLOCK", 16):
        ids, margin = topk_entries(scores.to(device), 2, impl="triton")
        for k in (1, 2, 3, 5, 50):
            check_topk(scores.to(device), k)
    assert ids.tolist() == [[1, 2], [1, 2], [1, 2], [0, 1], [0, 1], [1, 4], [0, 1]]
    assert margin[[0, 5, 6]].tolist() == [1.0, 2.0, inf] and torch.isnan(margin[1:5]).all()


@case("top-k of equal zeros of either sign")
def _(device, dtype):
    scores = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]], device=device)
    ids, margin = topk_entries(scores, 2, impl="triton")
    assert ids.tolist() == [[1, 2]] and margin.tolist() == [0.0]


@case("top-k of 16-bit scores")
def _(device, dtype):
    g = torch.Generator().manual_seed(9)
    for short in (torch.bfloat16, torch.float16):
        check_topk(torch.randn(4, 40, generator=g).to(device, short), 3)


@case("compressor")
def _(device, dtype):
    if dtype == torch.bfloat16 and interpreted():
        return
    for pairs, dim in ((1, 16), (3, 24), (2, 512), (0, 8)):
        g = torch.Generator().manual_seed(dim)
        content, score = (torch.randn(2, pairs, dim, generator=g).to(device).transpose(0, 1) for _ in range(2))
        if pairs > 2:
            score[0, 1], score[1] = -math.inf, score[1] * 1e30
        norm = torch.rand(dim, generator=g).to(device)
        got, want = (compress_pairs(content, score, norm, 1e-20, dtype, impl) for impl in ("triton", "torch"))
        same("latents", got, want, TOLERANCE["compress", dtype])
        if pairs:
            swapped = compress_pairs(content, -score, norm, 1e-20, dtype)
            assert not torch.allclose(got.float(), swapped.float(), atol=TOLERANCE["compress", dtype])
