"""Triton forms of ``index.index_scores`` and ``index.topk_entries``.

Scores: a tile holds some rows times all heads against some entries, so that neither the products of single heads nor
the scores of a tile that no row may see are ever written. Top-k: a radix select over the bits of the scores, four
sweeps of eight bits and one that writes the entries down in order, instead of a sort.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayscope.kernels.impl import on_its_device, readable
from replayscope.kernels.offsets_triton import offset

_BLOCK = 1024
# Bytes of shared memory for a tile of queries and one of keys: what Hopper has for a block, 227 KB, and room for the
# sums over heads.
_SHARED = 200 * 1024


class Tiles(NamedTuple):
    """rows, heads: of the queries of a tile; entries: of its keys. warps: of a program."""

    rows: int
    heads: int
    entries: int
    warps: int


def tiles(heads: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes that keep queries and keys inside of Hopper's shared memory. Raises ValueError where none do.

    128 row-heads by 128 entries fill the tensor cores; fp32 goes without them and would spill. Wide heads leave room
    for fewer entries.
    """
    most = 32 if dtype == torch.float32 else 128
    block_h = triton.next_power_of_2(heads)
    rows, entries = max(1, most // block_h, 16 // block_h), most
    key = max(16, triton.next_power_of_2(head_dim)) * dtype.itemsize
    while (rows * block_h + entries) * key > _SHARED:
        entries //= 2
        if entries < 16:
            raise ValueError(f"impl triton: {heads} heads of {head_dim} numbers are too many for a program; use torch")
    return Tiles(rows, block_h, entries, 4 if dtype == torch.float32 else 8)


@triton.jit
def visible(entry, seen):
    """The causal rule: entry j is visible to a row iff j < seen, its (position + 1) // ratio."""
    return entry < seen


@triton.jit
def _scores(
    q_ptr, weight_ptr, key_ptr, seen_ptr, inside_ptr, out_ptr,
    q_row, q_head, q_dim, weight_row, weight_head, key_row, key_dim, inside_row, out_row,
    rows, heads, entries, first, size, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, POOL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    local = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    entry = first + local
    seen = tl.load(seen_ptr + row, mask=row < rows, other=0)
    live = visible(entry[None, :], seen[:, None]) & (local < entries)[None, :]
    if POOL:
        block_at = offset(row, inside_row)[:, None] + (entry // size)[None, :]
        live = live & (tl.load(inside_ptr + block_at, mask=live, other=0) > 0)
    scores = tl.full([BLOCK_R, BLOCK_E], -float("inf"), tl.float32)
    if tl.max(tl.max(live.to(tl.int32), 1), 0) > 0:
        # Row and head are one axis of the product: heads of a row lie next to each other.
        flat = tl.arange(0, BLOCK_R * BLOCK_H)
        of_row, head = tl.program_id(1) * BLOCK_R + flat // BLOCK_H, flat % BLOCK_H
        dim = tl.arange(0, BLOCK_D)
        some = (of_row < rows) & (head < heads)
        q_at = (offset(of_row, q_row) + offset(head, q_head))[:, None] + offset(dim, q_dim)[None, :]
        q = tl.load(q_ptr + q_at, mask=some[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        key_at = offset(local, key_row)[:, None] + offset(dim, key_dim)[None, :]
        keys = tl.load(key_ptr + key_at, mask=(local < entries)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        weight_at = offset(of_row, weight_row) + offset(head, weight_head)
        weight = tl.load(weight_ptr + weight_at, mask=some, other=0.0).to(tl.float32)
        raw = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        # NaN is not below 0 and stays. A head that is not there is 0 by hand: its 0 times an infinite key is NaN.
        raw = tl.where((raw <= 0.0) | ~some[:, None], 0.0, raw) * weight[:, None]
        total = tl.sum(tl.reshape(raw, [BLOCK_R, BLOCK_H, BLOCK_E]), 1)
        scores = tl.where(live, total, scores)
    out_at = offset(row, out_row)[:, None] + entry[None, :]
    tl.store(out_ptr + out_at, scores, mask=(row < rows)[:, None] & (local < entries)[None, :])


@on_its_device
def index_scores(
    q: Tensor, weights: Tensor, keys: list[Tensor], seen: Tensor, inside: Tensor | None, size: int
) -> Tensor:
    """``index.index_scores``: [rows, E] float32. inside [rows, blocks] bool: the candidates, in blocks of ``size``.

    Raises ValueError for heads that no program could hold.
    """
    rows, heads, head_dim = q.shape
    total = sum(len(k) for k in keys)
    out = torch.empty(rows, total, dtype=torch.float32, device=q.device)
    q, seen, first = readable(q), seen.contiguous(), 0
    weights = readable(weights)
    c = tiles(heads, head_dim, q.dtype)
    pool = seen if inside is None else inside.to(torch.uint8).contiguous()
    for part in map(readable, keys):
        if rows and len(part):
            _scores[triton.cdiv(len(part), c.entries), triton.cdiv(rows, c.rows)](
                q, weights, part, seen, pool, out, *q.stride(), *weights.stride(), *part.stride(), pool.stride(0),
                out.stride(0), rows, heads, len(part), first, max(size, 1), HEAD_DIM=head_dim,
                BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_R=c.rows, BLOCK_H=c.heads, BLOCK_E=c.entries,
                POOL=inside is not None, PRECISION="ieee", num_warps=c.warps, num_stages=1,
            )  # fmt: skip
        first += len(part)
    return out


@triton.jit
def _ordered(x):
    """float32 as uint32 in the same order: -inf is the least, NaN of either sign the largest, and -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x != x, 0xFFFFFFFF, key)


@triton.jit
def _select(
    score_ptr, id_ptr, margin_ptr, score_row, score_col, id_row, entries, k, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    scores = score_ptr + offset(row, score_row)
    bins = tl.arange(0, 512)
    count = 0
    nans = 0
    for step in range(0, entries, BLOCK):
        at = step + tl.arange(0, BLOCK)
        x = tl.load(scores + offset(at, score_col), mask=at < entries, other=-float("inf"))
        count += tl.sum((x != -float("inf")).to(tl.int32), 0)
        nans += tl.sum((x != x).to(tl.int32), 0)
    take = tl.minimum(count, k)
    # The take-th largest, eight bits at a time from the top; `need` is how many are still to be found below.
    need = take
    found = tl.zeros([], tl.uint32)
    known = tl.zeros([], tl.uint32)
    for turn in tl.static_range(4):
        histogram = tl.zeros([512], tl.int32)
        for step in range(0, entries, BLOCK):
            at = step + tl.arange(0, BLOCK)
            x = tl.load(scores + offset(at, score_col), mask=at < entries, other=-float("inf"))
            key = _ordered(x)
            alive = ((key & known) == found) & (x != -float("inf"))
            # What does not count falls into a bin of its own.
            histogram += tl.histogram(tl.where(alive, ((key >> (24 - 8 * turn)) & 255).to(tl.int32), 256), 512)
        histogram = tl.where(bins < 256, histogram, 0)
        above = tl.cumsum(histogram, 0, reverse=True)
        digit = tl.max(tl.where((above >= need) & (bins < 256), bins, 0), 0)
        need -= tl.sum(tl.where(bins > digit, histogram, 0), 0)
        found = found | (digit.to(tl.uint32) << (24 - 8 * turn))
        known = known | (tl.full([], 255, tl.uint32) << (24 - 8 * turn))
    # `need` is now how many of those equal to the last one are taken: the lowest entries.
    written = 0
    equal = 0
    last = tl.full([], float("inf"), tl.float32)
    rejected = tl.full([], -float("inf"), tl.float32)
    for step in range(0, entries, BLOCK):
        at = step + tl.arange(0, BLOCK)
        x = tl.load(scores + offset(at, score_col), mask=at < entries, other=-float("inf"))
        key = _ordered(x)
        there = x != -float("inf")
        tie = (there & (key == found)).to(tl.int32)
        rank = equal + tl.cumsum(tie, 0)
        chosen = there & ((key > found) | ((tie > 0) & (rank <= need)))
        one = chosen.to(tl.int32)
        place = written + tl.cumsum(one, 0) - one
        tl.store(id_ptr + offset(row, id_row) + place, at.to(tl.int64), mask=chosen)
        written += tl.sum(one, 0)
        equal += tl.sum(tie, 0)
        last = tl.minimum(last, tl.min(tl.where(chosen & (x == x), x, float("inf")), 0))
        rejected = tl.maximum(rejected, tl.max(tl.where(there & ~chosen & (x == x), x, -float("inf")), 0))
    # NaN is the largest: the worst that is accepted is NaN only where all are, and only then is one rejected.
    margin = tl.where(nans >= k, float("nan"), last - rejected)
    tl.store(margin_ptr + row, tl.where(count > k, margin, float("inf")))


@on_its_device
def topk_entries(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``index.topk_entries`` of scores [rows, E]; of equal scores at the border, NaN or not, the lowest entries."""
    rows, entries = scores.shape
    dtype, scores = scores.dtype, scores.float()
    ids = torch.full((rows, k), -1, dtype=torch.long, device=scores.device)
    margin = torch.full((rows,), torch.inf, device=scores.device)
    if rows and entries:
        block = min(_BLOCK, max(16, triton.next_power_of_2(entries)))
        _select[rows,](scores, ids, margin, *scores.stride(), ids.stride(0), entries, k, BLOCK=block, num_warps=4)
    return ids, margin.to(dtype)
