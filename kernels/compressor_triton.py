"""Triton form of ``compressor.compress_pairs``: both rows of a pair are read once, the latent is written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayscope.kernels.impl import interpreted, on_its_device, readable
from replayscope.kernels.offsets_triton import offset


@triton.jit
def _compress(
    content_ptr, score_ptr, norm_ptr, out_ptr, content_pair, content_row, content_col, score_pair, score_row, score_col,
    out_row, eps, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    live = col < D
    content = content_ptr + offset(pair, content_pair) + offset(col, content_col)
    score = score_ptr + offset(pair, score_pair) + offset(col, score_col)
    first, second = tl.load(score, mask=live, other=0.0), tl.load(score + score_row, mask=live, other=0.0)
    top = tl.maximum(first, second)
    first, second = tl.exp(first - top), tl.exp(second - top)
    total = first + second
    x = first / total * tl.load(content, mask=live, other=0.0)
    x += second / total * tl.load(content + content_row, mask=live, other=0.0)
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    norm = tl.load(norm_ptr + col, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset(pair, out_row) + col, (x * scale * norm).to(out_ptr.dtype.element_ty), mask=live)


@on_its_device
def compress_pairs(content: Tensor, score: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``compressor.compress_pairs`` of float32 content and score, which may be any views."""
    if dtype == torch.bfloat16 and interpreted():
        raise ValueError("impl triton: the interpreter cannot round to bfloat16; use torch or auto")
    pairs, _, width = content.shape
    out = torch.empty(pairs, width, dtype=dtype, device=content.device)
    if out.numel():
        _compress[pairs,](
            content, score, readable(norm).contiguous(), out, *content.stride(), *score.stride(), out.stride(0), eps,
            D=width, BLOCK=triton.next_power_of_2(width), num_warps=2,
        )  # fmt: skip
    return out
