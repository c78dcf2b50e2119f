"""What every Triton form shares: 64-bit offsets, and a test for finite numbers."""

import triton
import triton.language as tl


@triton.jit
def offset(index, stride):
    """index * stride in 64 bits: the product of two 32-bit numbers would stay in 32 and wrap at 2^31."""
    return index.to(tl.int64) * stride


@triton.jit
def finite(x):
    """Neither infinite nor NaN: every comparison with NaN is false."""
    return tl.abs(x) < float("inf")
