"""Window and selected-global attention over packed rows: what it means, in torch."""

import math

import torch
from torch import Tensor

from replayscope.kernels.impl import expect, use_triton
from replayscope.kernels.packed import EntryRows, WindowRows


def packed_attention(
    q: Tensor,
    window_kv: Tensor,
    rows: WindowRows,
    window: int,
    global_kv: Tensor | None,
    entries: EntryRows | None,
    sink: Tensor,
    impl: str = "torch",
) -> Tensor:
    """``window_global_attention`` of packed rows by their descriptors; window: W, the most keys that a row sees.

    impl: ``torch``, ``triton`` (fp32 sums; no float64) or ``auto``. Raises ValueError for shapes or dtypes that do not
    go together, and for an impl that cannot run.
    """
    expect("q", q, ("rows", "heads", "D"))
    count, heads, head_dim = q.shape
    expect("window_kv", window_kv, ("slots", head_dim), q.dtype)
    if window < 1:
        raise ValueError(f"window must be at least 1, the row itself, not {window}")
    if count and not len(window_kv):
        raise ValueError(f"window_kv must have slots for the keys of {count} rows, not {list(window_kv.shape)}")
    if global_kv is not None:
        expect("global_kv", global_kv, ("slots", head_dim), q.dtype)
    expect("sink", sink, (heads,))
    one = (count,)
    for name, x in vars(rows).items():
        if x.shape != one:
            expect(f"rows.{name}", x, one)
    if entries is not None:
        expect("entries.picks", entries.picks, (count, "K"))
        for name, x in vars(entries).items():
            if name != "picks" and x.shape != one:
                expect(f"entries.{name}", x, one)
    if use_triton(impl, q):
        from replayscope.kernels import attention_triton

        return attention_triton.packed_attention(q, window_kv, rows, window, global_kv, entries, sink)
    slots = None if entries is None else entries.slots()
    return window_global_attention(q, window_kv, rows.slots(window), global_kv, slots, sink)


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
    the denominator (-inf: none, +inf: it takes everything). Scores are q·k/√D. Returns [rows, heads, D]; a row without
    any key gives 0. Computed in float64 for float64 inputs, else float32. A slot that is not listed is never read,
    whatever it holds.
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
    # Equal infinities have no difference: a sink of +inf weighs 1 against keys that weigh 0.
    total = weight.sum(-1, keepdim=True) + torch.where(logit == top, 1.0, torch.exp(logit - top))
    return torch.bmm(weight / torch.where(total == 0, 1.0, total), keys).to(q.dtype)


def _gather(pool: Tensor, slots: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """``pool`` at ``slots`` [rows, n] as [rows, n, D], with absent ones as zeros, and the mask of absent ones."""
    absent = slots < 0
    if pool.shape[0] == 0:
        return pool.new_zeros(*slots.shape, pool.shape[-1], dtype=acc), torch.ones_like(absent)
    # Slot 0 stands in for absent ones and may hold anything, NaN included: overwrite it rather than multiply by 0.
    picked = pool.index_select(0, slots.clamp(min=0).flatten()).view(*slots.shape, pool.shape[-1]).to(acc)
    return picked.masked_fill_(absent[..., None], 0.0), absent
