"""The table of cases that hold a Triton form against its torch meaning, and how two results are compared.

A case is a function of (device, dtype) that raises AssertionError.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Largest absolute error, by op and dtype of the inputs, and why.
TOLERANCE = {
    # A mean of keys up to 4: fp32 weights are off by a few 2^-24 times scores up to 10.
    ("attention", torch.float32): 1e-5,
    # Weights are rounded to bf16 before they meet the keys, and the output is: 2^-9 twice, of values up to 4.
    ("attention", torch.bfloat16): 2e-2,
    # Sums of up to 128 products up to 4, over up to 8 heads, in another order; products of bf16 numbers are exact.
    ("scores", torch.float32): 2e-4,
    ("scores", torch.bfloat16): 2e-4,
    # Latents up to 3; in bf16 a rounding (2^-8) may fall the other way, before the norm and after it.
    ("compress", torch.float32): 5e-6,
    ("compress", torch.bfloat16): 5e-2,
}
# Relative and absolute, of float64 sums of the same terms in another order: 1e5 times 2^-53 at the very most.
SUMS = {"rtol": 1e-11, "atol": 1e-13}
Case = Callable[[torch.device, torch.dtype], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(f: Case) -> Case:
        CASES[name] = f
        return f

    return keep


def same(name: str, got: Tensor, want: Tensor, tolerance: float = 0.0) -> None:
    """NaN and infinities as masks first, then the largest absolute error, with the place and both values."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}, not {want.shape}"
    got, want = got.detach().cpu(), want.detach().cpu()
    plain = torch.isfinite(want)
    odd = ~plain & ~((got == want) | (torch.isnan(got) & torch.isnan(want))) | (plain & ~torch.isfinite(got))
    assert not odd.any(), f"{name}: {int(odd.sum())} not finite in another way, first at {odd.nonzero()[0].tolist()}"
    gap = torch.where(plain, (got.double() - want.double()).abs(), 0.0)
    if gap.numel() and gap.max() > tolerance:
        place = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)]
        a, r = got[tuple(place)].item(), want[tuple(place)].item()
        raise AssertionError(f"{name}: {a} is not {r} at {place}, apart by {float(gap.max()):.2e} > {tolerance:.0e}")


def same_sums(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        scale = float(value[torch.isfinite(value)].abs().max()) if torch.isfinite(value).any() else 0.0
        exact = not value.is_floating_point() or name in ("max_abs", "margin", "overlap")
        same(name, got[name], value, 0.0 if exact else SUMS["rtol"] * scale + SUMS["atol"])
