"""Window and selected-global attention over packed rows: what it means, in torch.

Window W means that query i sees keys i-W+1 … i: W keys, the query itself included. ``window_keys`` is the one place
where the running code says so.
"""

import math

import torch
from torch import Tensor


def window_keys(position: Tensor, window: int, floor: Tensor) -> Tensor:
    """Key positions [rows, W] that each row may see, oldest first, -1 where there is none.

    position, floor [rows] int64: absolute position of the row, and the lowest key that it may see.
    """
    keys = position[:, None] - torch.arange(window - 1, -1, -1, device=position.device)
    return torch.where(keys >= floor.clamp(min=0)[:, None], keys, -1)


def window_global_attention(
    q: Tensor,
    window_kv: Tensor,
    window_slots: Tensor,
    global_kv: Tensor | None,
    global_slots: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """One softmax per head over window keys, selected global entries and a sink; keys are values.

    q [rows, heads, D]; window_kv [slots, D]; window_slots [rows, W] int64, -1 = absent; global_kv [slots, D] and
    global_slots [rows, K] int64, -1 = absent (or None for a window-only layer); sink [heads]: a logit that only enters
    the denominator. Scores are q·k/√D. Returns [rows, heads, D]; a row without any key gives 0. Computed in float64
    for float64 inputs, else float32. A slot that is not listed is never read, whatever it holds.
    """
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, absent = _gather(window_kv, window_slots, acc)
    if global_kv is not None and global_slots is not None:
        more, gone = _gather(global_kv, global_slots, acc)
        keys, absent = torch.cat((keys, more), 1), torch.cat((absent, gone), 1)
    scores = torch.bmm(q.to(acc), keys.transpose(1, 2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(absent[:, None], -math.inf)
    logit = sink.to(acc)[None, :, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), logit)
    # Without any key and with a sink of -inf there is nothing to normalise: the row is 0 by definition.
    top = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True) + torch.exp(logit - top)
    return torch.bmm(weight / torch.where(total == 0, 1.0, total), keys).to(q.dtype)


def _gather(pool: Tensor, slots: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """``pool`` at ``slots`` [rows, n] as [rows, n, D], with absent ones as zeros, and the mask of absent ones."""
    absent = slots < 0
    if pool.shape[0] == 0:
        return pool.new_zeros(*slots.shape, pool.shape[-1], dtype=acc), torch.ones_like(absent)
    # Slot 0 stands in for absent ones and may hold anything, NaN included: overwrite it rather than multiply by 0.
    picked = pool.index_select(0, slots.clamp(min=0).flatten()).view(*slots.shape, -1).to(acc)
    return picked.masked_fill_(absent[..., None], 0.0), absent
