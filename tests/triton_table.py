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
# Of float64 sums of the same terms in another order: 400 terms of 2^-53 of the result where none cancels, and of the
# terms, which are below 20, where they do.
RELATIVE, ABSOLUTE = 1e-12, 1e-12
Case = Callable[[torch.device, torch.dtype], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(f: Case) -> Case:
        CASES[name] = f
        return f

    return keep


def same(name: str, got: Tensor, want: Tensor, absolute: float = 0.0, relative: float = 0.0) -> None:
    """NaN and infinities as masks first, then the error that is furthest above its bound, with its place and values."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}, not {want.shape}"
    got, want = got.detach().cpu(), want.detach().cpu()
    plain = torch.isfinite(want)
    odd = ~plain & ~((got == want) | (torch.isnan(got) & torch.isnan(want))) | (plain & ~torch.isfinite(got))
    assert not odd.any(), f"{name}: {int(odd.sum())} not finite in another way, first at {odd.nonzero()[0].tolist()}"
    r = want.double().where(plain, torch.zeros((), dtype=torch.float64))
    gap = torch.where(plain, (got.double() - r).abs(), 0.0)
    above = gap - (absolute + relative * r.abs())
    if above.numel() and above.max() > 0:
        place = tuple(int(i) for i in torch.unravel_index(above.argmax(), above.shape))
        far = f"apart by {float(gap[place]):.2e} > {absolute:.0e} + {relative:.0e}·|r|"
        raise AssertionError(f"{name}: {got[place].item()} is not {want[place].item()} at {list(place)}, {far}")


def same_sums(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        exact = not value.is_floating_point() or name in ("max_abs", "margin", "overlap")
        same(name, got[name], value, *(() if exact else (ABSOLUTE, RELATIVE)))
