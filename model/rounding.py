"""The released rounding of cached activations: FP8 window KV, FP4 main KV, FP4 index queries and keys.

Values come back in the model's dtype, exactly representable in the stored format ("fake" quantisation). Binning is done
on float32 values: nearest, ties to even, saturating.
"""

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
# Implementations differ here, and only for blocks whose largest value is below about 0.045: one clamps amax / 448 at
# 1e-4, another amax itself. This is the second.
FP8_FLOOR = 1e-4
# The smallest positive e4m3 number: what a block of near-zero main KV is scaled by.
E4M3_MIN = 2.0**-9
WINDOW_BLOCK, MAIN_BLOCK, INDEX_BLOCK = 32, 16, 32

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Midpoints between neighbours; at a tie the even code wins, so that every second midpoint belongs to the lower bin.
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_TIE_UP = torch.tensor([False, True, False, True, False, True, False])


def round_window(kv: Tensor) -> Tensor:
    """Window KV [..., D] as e4m3 with a power-of-two scale per 32 channels."""
    return _blocks(kv, WINDOW_BLOCK, lambda x, amax: _e4m3(x, _ue8m0(amax.clamp(min=FP8_FLOOR) / E4M3_MAX)))


def round_main(kv: Tensor) -> Tensor:
    """Global KV [..., D] as e2m1 with an e4m3 scale per 16 channels, the RoPE channels included."""

    def block(x: Tensor, amax: Tensor) -> Tensor:
        scale = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float().clamp(min=E4M3_MIN)
        return e2m1(x / scale) * scale

    return _blocks(kv, MAIN_BLOCK, block)


def round_index(x: Tensor) -> Tensor:
    """Index queries or keys [..., di] as e2m1 with a power-of-two scale per min(32, di) channels."""

    def block(x: Tensor, amax: Tensor) -> Tensor:
        scale = _ue8m0(amax / E2M1_MAX)
        return e2m1(x / scale) * scale

    return _blocks(x, min(INDEX_BLOCK, x.shape[-1]), block)


def e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 number of float32 x: 0, ½, 1, 1½, 2, 3, 4, 6 with a sign; ties to even, beyond 6 saturated."""
    size = x.abs()
    midpoints, up = _MIDPOINTS.to(x.device), _TIE_UP.to(x.device)
    code = torch.bucketize(size, midpoints)  # midpoints strictly below x
    tie = code < len(midpoints)
    at = code.clamp(max=len(midpoints) - 1)
    code = code + (tie & (size == midpoints[at]) & up[at])
    return torch.copysign(_E2M1.to(x.device)[code], x)


def _e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def _ue8m0(ratio: Tensor) -> Tensor:
    """2^ceil(log2(ratio)) by exponent and mantissa, exact; 1 where ratio is 0."""
    mantissa, exponent = torch.frexp(ratio)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(ratio == 0, 1.0, torch.ldexp(torch.ones_like(ratio), exponent))


def _blocks(x: Tensor, size: int, rule) -> Tensor:
    """Apply ``rule`` to float32 blocks of ``size`` neighbouring channels; a last block may be shorter."""
    whole = x.float()
    pad = -x.shape[-1] % size
    cut = torch.nn.functional.pad(whole, (0, pad)).unflatten(-1, (-1, size))
    out = rule(cut, cut.abs().amax(-1, keepdim=True)).flatten(-2)
    return out[..., : x.shape[-1]].to(x.dtype)
