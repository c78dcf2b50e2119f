"""Parts of kernels as they must not be, and a look at the offsets: imported only where triton is to be."""

import torch
import triton
import triton.language as tl

from replayscope.kernels import offsets_triton


@triton.jit
def one_key_more(position, floor, window):
    return tl.maximum(tl.maximum(floor, position - window), 0)


@triton.jit
def one_key_less(position, floor, window):
    return tl.maximum(tl.maximum(floor, position - window + 2), 0)


@triton.jit
def without_floor(position, floor, window):
    return tl.maximum(position - window + 1, 0)


@triton.jit
def in_32_bits(index, stride):
    return index * stride


@triton.jit
def one_entry_more(entry, seen):
    return entry <= seen


@triton.jit
def always(x):
    return x == x


@triton.jit
def without_rule(p, q):
    return tl.exp(p) * (p - q)


def offsets(index: int, stride: int, device: torch.device) -> int:
    """index * stride as a kernel computes it from 32-bit numbers."""

    out = torch.zeros(1, dtype=torch.long, device=device)
    _look[(1,)](torch.tensor([index], dtype=torch.int32, device=device), out, stride)
    return int(out)


@triton.jit
def _look(index_ptr, out_ptr, stride):
    tl.store(out_ptr, offsets_triton.offset(tl.load(index_ptr), stride).to(tl.int64))
