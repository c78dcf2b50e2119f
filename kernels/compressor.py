"""The ratio-2 compressor: two rows pooled channel by channel into one latent, then normed."""

import torch
from torch import Tensor

from replayscope.kernels.impl import expect, use_triton


def compress_pairs(
    content: Tensor, score: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, impl: str = "torch"
) -> Tensor:
    """RMSNorm(cast(Σ_t softmax_t(score)·content)) over the two rows t of a pair: latents [n, D] in ``dtype``.

    content, score [n, 2, D] float32 (float64 for a float64 model), norm [D]. The pooled rows are rounded to ``dtype``
    before they are normed, in float32 or float64. impl: ``torch``, ``triton`` (no float64) or ``auto``. Raises
    ValueError for shapes or dtypes that do not go together: sums of 16-bit numbers would differ from form to form.
    """
    if content.shape != score.shape or content.dim() != 3 or content.shape[1] != 2:
        raise ValueError(f"content and score must be [n, 2, D], not {list(content.shape)} and {list(score.shape)}")
    if content.dtype != score.dtype or content.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"content and score must be both float32 or float64, not {content.dtype} and {score.dtype}")
    expect("norm", norm, (content.shape[2],))
    if use_triton(impl, content):
        from replayscope.kernels import compressor_triton

        return compressor_triton.compress_pairs(content, score, norm, eps, dtype)
    pooled = (score.softmax(-2) * content).sum(-2).to(dtype).to(content.dtype)
    scale = torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps)
    return (pooled * scale * norm.to(content.dtype)).to(dtype)
