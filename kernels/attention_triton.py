"""Triton form of ``attention.packed_attention``: one program per row and group of heads, keys read once as values.

All heads share one key vector, so that the heads of a single row fill a tensor-core tile and no two rows need to agree
on what they see. A row's bits depend on nothing but the row: the tile sizes are a function of head_dim, heads and
dtype, and nothing is tuned at run time.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayscope.kernels.impl import on_its_device, readable
from replayscope.kernels.offsets_triton import offset
from replayscope.kernels.packed import EntryRows, WindowRows

# exp2 is what the hardware has, so that scores and sinks are scaled once instead of at every exponential.
LOG2E = tl.constexpr(math.log2(math.e))


class Tiles(NamedTuple):
    """heads, keys: sizes of a tile. warps, stages: of a program; each stage beyond one loads a tile ahead."""

    heads: int
    keys: int
    warps: int
    stages: int


def tiles(heads: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes that keep q, the key tiles in flight and the accumulator inside of Hopper's 227 KB and 64 K registers.

    16-bit, head_dim 512: q 64 KB, three key tiles of 32 KB, and 64 x 512 fp32 sums over 256 threads: twice as many keys
    spill registers (compiled for sm_90). fp32 is multiplied in full precision outside of the tensor cores, where small
    tiles spill least.
    """
    if dtype == torch.float32:
        return Tiles(16, 16 if head_dim > 128 else 32, 4, 1)
    block = max(16, min(64, triton.next_power_of_2(heads)))
    return Tiles(block, 32 if head_dim > 256 else 64, 8 if block * head_dim > 64 * 128 else 4, 3)


@triton.jit
def lowest_key(position, floor, window):
    """First key of the window [max(floor, position - window + 1), position], itself at least 0."""
    return tl.maximum(tl.maximum(floor, position - window + 1), 0)


@triton.jit
def _fold(q, keys, live, top, total, acc, scale, PRECISION: tl.constexpr):
    """One tile of keys into the running softmax. top is in units of log 2; -inf until a key was seen."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(live[None, :], scores, -float("inf"))
    above = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(above == -float("inf"), 0.0, above)
    weight = tl.exp2(scores - base[:, None])
    keep = tl.exp2(top - base)
    total = total * keep + tl.sum(weight, 1)
    acc = tl.dot(weight.to(keys.dtype), keys, acc * keep[:, None], input_precision=PRECISION)
    return above, total, acc


@triton.jit
def _attend(
    q_ptr, window_ptr, global_ptr, sink_ptr, out_ptr,
    position_ptr, floor_ptr, start_ptr, own_ptr, below_ptr,
    picks_ptr, kept_ptr, other_ptr, mine_ptr,
    q_row, q_head, q_dim, window_slot, window_dim, global_slot, global_dim, out_row, out_head, picks_row, picks_at,
    window, heads, picks, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    GLOBAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    there = dim < HEAD_DIM
    some = (head < heads)[:, None] & there[None, :]
    q_at = offset(row, q_row) + offset(head, q_head)[:, None] + offset(dim, q_dim)[None, :]
    q = tl.load(q_ptr + q_at, mask=some, other=0.0)
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)

    position = tl.load(position_ptr + row)
    first = lowest_key(position, tl.load(floor_ptr + row), window)
    start, own, below = tl.load(start_ptr + row), tl.load(own_ptr + row), tl.load(below_ptr + row)
    count = (position - first + 1).to(tl.int32)
    for step in range(0, count, BLOCK_N):
        key = first + step + tl.arange(0, BLOCK_N)
        live = key <= position
        slot = key + tl.where(key >= start, own, below)
        key_at = offset(slot, window_slot)[:, None] + offset(dim, window_dim)[None, :]
        keys = tl.load(window_ptr + key_at, mask=live[:, None] & there[None, :], other=0.0)
        top, total, acc = _fold(q, keys, live, top, total, acc, scale, PRECISION)

    if GLOBAL:
        kept, other, mine = tl.load(kept_ptr + row), tl.load(other_ptr + row), tl.load(mine_ptr + row)
        # Short prompts fill a part of their list: stop behind the last pick that is there.
        used = 0
        pick_at = picks_ptr + offset(row, picks_row)
        for step in range(0, picks, BLOCK_N):
            place = step + tl.arange(0, BLOCK_N)
            entry = tl.load(pick_at + offset(place, picks_at), mask=place < picks, other=-1)
            used = tl.maximum(used, tl.max(tl.where(entry >= 0, place + 1, 0), 0))
        for step in range(0, used, BLOCK_N):
            place = step + tl.arange(0, BLOCK_N)
            entry = tl.load(pick_at + offset(place, picks_at), mask=place < used, other=-1)
            live = entry >= 0
            slot = entry + tl.where(entry < kept, other, mine)
            key_at = offset(slot, global_slot)[:, None] + offset(dim, global_dim)[None, :]
            keys = tl.load(global_ptr + key_at, mask=live[:, None] & there[None, :], other=0.0)
            top, total, acc = _fold(q, keys, live, top, total, acc, scale, PRECISION)

    sink = tl.load(sink_ptr + head, mask=head < heads, other=-float("inf")).to(tl.float32) * LOG2E
    above = tl.maximum(top, sink)
    base = tl.where(above == -float("inf"), 0.0, above)
    keep = tl.exp2(top - base)
    # Equal infinities have no difference, and a sink of +inf takes everything.
    total = total * keep + tl.where(sink == base, 1.0, tl.exp2(sink - base))
    out = acc * (keep / tl.where(total == 0.0, 1.0, total))[:, None]
    out_at = offset(row, out_row) + offset(head, out_head)[:, None] + dim[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=some)


@on_its_device
def packed_attention(
    q: Tensor,
    window_kv: Tensor,
    rows: WindowRows,
    window: int,
    global_kv: Tensor | None,
    entries: EntryRows | None,
    sink: Tensor,
    config: Tiles | None = None,
) -> Tensor:
    """``attention.packed_attention`` on a device; fp32 sums and softmax, and 16-bit weights for 16-bit keys.

    Slots, picks and descriptors are as there. config: other tile sizes than ``tiles``, for benchmarks. Raises
    ValueError for a head_dim above 512, whose tiles no program could hold.
    """
    count, heads, head_dim = q.shape
    if head_dim > 512:
        raise ValueError(f"impl triton: head_dim {head_dim} is more than 512; use torch")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.numel() == 0:
        return out
    c = config or tiles(heads, head_dim, q.dtype)
    kq, kw = readable(q), readable(window_kv)
    has_global = global_kv is not None and entries is not None and global_kv.shape[0] > 0
    # Without global entries the kernel is given something to point at, and reads none of it.
    nothing = EntryRows(rows.position[:, None], rows.position, rows.position, rows.position)
    kg, e = (readable(global_kv), entries) if global_kv is not None and entries is not None else (kw, nothing)
    picks = e.picks
    target = out if kq.dtype == out.dtype else torch.empty_like(out, dtype=kq.dtype)
    _attend[count, triton.cdiv(heads, c.heads)](
        kq, kw, kg, readable(sink).contiguous(), target,
        *(x.contiguous() for x in (rows.position, rows.floor, rows.start, rows.own, rows.below)),
        picks, *(x.contiguous() for x in (e.kept, e.other, e.own)),
        *kq.stride(), *kw.stride(), *kg.stride(), *target.stride()[:2], *picks.stride(),
        window, heads, picks.shape[1], head_dim**-0.5 * math.log2(math.e),
        HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_H=c.heads, BLOCK_N=c.keys,
        GLOBAL=has_global, PRECISION="ieee", num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out if target is out else out.copy_(target)
