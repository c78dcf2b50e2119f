"""The indexer's scores, its top-k under the causal rule, and the candidate pool, over rows of one request.

An entry is named by its number j in the request, whatever slot it lies in; -1 means absent.
"""

import math

import torch
from torch import Tensor

from replayscope.kernels.impl import expect, use_triton


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: list[Tensor],
    seen: Tensor,
    blocks: Tensor | None = None,
    size: int = 0,
    impl: str = "torch",
) -> Tensor:
    """Σ_h w_h·ReLU(q_h·k_j): q [rows, h, di], weights [rows, h] (acc), keys in parts [e, di], seen [rows] → [rows, E].

    seen[i] entries, 0 … seen[i]-1, are visible to row i; the rest score -inf, as do entries outside the rows' candidate
    blocks [rows, count] of ``size`` entries, where there are any. acc, and the dtype of the scores, is float32, or
    float64 for a float64 q. impl: ``torch``, ``triton`` (no float64) or ``auto``. Raises ValueError for shapes or
    dtypes that do not go together.
    """
    expect("q", q, ("rows", "h", "di"))
    rows, heads, head_dim = q.shape
    expect("weights", weights, (rows, heads), torch.float64 if q.dtype == torch.float64 else torch.float32)
    expect("seen", seen, (rows,))
    for part in keys:
        expect("keys", part, ("e", head_dim), q.dtype)
    if blocks is not None:
        expect("blocks", blocks, (rows, "count"))
        if size < 1:
            raise ValueError(f"blocks must be of at least 1 entry each, not {size}")
    if use_triton(impl, q):
        from replayscope.kernels import index_triton

        inside = None if blocks is None else _inside(blocks, sum(len(k) for k in keys), size)
        return index_triton.index_scores(q, weights, keys, seen, inside, size)
    if not keys:
        return weights.new_zeros(rows, 0)
    flat = q.to(weights.dtype).reshape(rows * heads, head_dim)
    parts = [(flat @ k.to(weights.dtype).T).view(rows, heads, len(k)) for k in keys]
    raw = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).relu_()
    scores = torch.bmm(weights[:, None], raw)[:, 0]
    scores.masked_fill_(torch.arange(scores.shape[1], device=q.device) >= seen[:, None], -math.inf)
    return scores if blocks is None else keep_candidates(scores, blocks, size)


def topk_entries(scores: Tensor, k: int, impl: str = "torch") -> tuple[Tensor, Tensor]:
    """ids [rows, k] of the k best scores above -inf, ascending, then -1; margin [rows]: worst accepted - best rejected.

    margin: inf where nothing above -inf was rejected. Which of equal scores at the border are taken is left open: their
    margin is 0. NaN counts as the largest score, as in torch's sorts and in the dense pass: an entry that could not be
    scored is attended, so that what is broken shows in all that follows instead of being dropped. The margin is NaN
    where NaN stands at the border. impl as for ``index_scores``. Raises ValueError for a k below 1.
    """
    expect("scores", scores, ("rows", "E"))
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    rows, entries = scores.shape
    if use_triton(impl, scores):
        from replayscope.kernels import index_triton

        return index_triton.topk_entries(scores, k)
    ids = torch.full((rows, k), -1, dtype=torch.long, device=scores.device)
    margin = torch.full((rows,), math.inf, dtype=scores.dtype, device=scores.device)
    best, which = scores.topk(min(k + 1, entries), -1)
    which = which.masked_fill(best == -math.inf, entries)
    kept = which[:, :k].sort(-1).values
    ids[:, : kept.shape[1]] = kept.masked_fill(kept == entries, -1)
    if entries > k:
        margin = torch.where(best[:, k] == -math.inf, margin, best[:, k - 1] - best[:, k])
    return ids, margin


def candidate_blocks(scores: Tensor, size: int, count: int) -> Tensor:
    """Block numbers [rows, count] of the candidate pool, -1 = none: the newest visible, then the best by an entry.

    scores [rows, E], -inf where an entry is not visible; blocks are of ``size`` entries, the last one of what is left.
    A block that holds NaN is the best there is, as in ``topk_entries``.
    """
    rows, entries = scores.shape
    out = torch.full((rows, count), -1, dtype=torch.long, device=scores.device)
    if not entries:
        return out
    blocks = -(-entries // size)
    padded = torch.nn.functional.pad(scores, (0, blocks * size - entries), value=-math.inf)
    best = padded.view(rows, blocks, size).amax(-1)
    visible = best > -math.inf
    number = torch.arange(blocks, device=scores.device)
    newest = (number * visible).amax(-1, keepdim=True)
    best = torch.where((number == newest) & visible, math.inf, best)
    value, block = best.topk(min(count, blocks), -1)
    out[:, : block.shape[1]] = block.masked_fill(value == -math.inf, -1)
    return out


def keep_candidates(scores: Tensor, blocks: Tensor, size: int) -> Tensor:
    """scores [rows, E] with -inf for every entry outside the rows' candidate blocks [rows, count]."""
    inside = _inside(blocks, scores.shape[1], size)
    return scores.masked_fill(~inside.repeat_interleave(size, 1)[:, : scores.shape[1]], -math.inf)


def _inside(blocks: Tensor, entries: int, size: int) -> Tensor:
    """Block numbers [rows, count], -1 = none, as a mask [rows, blocks]."""
    total = -(-entries // size)
    inside = torch.zeros(len(blocks), total + 1, dtype=torch.bool, device=blocks.device)
    return inside.scatter_(1, torch.where(blocks < 0, total, blocks), True)[:, :total]
