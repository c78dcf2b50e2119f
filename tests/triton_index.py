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
        assert torch.equal(taken, right), f"row {row} takes other scores"


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
