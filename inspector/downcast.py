"""Raw states in a smaller dtype than the model holds, on request, and what that loses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from replayscope.traces.schema import Cast


@dataclass
class Downcast:
    """Casts floats on their way to the file to ``dtype`` (None: to nothing), and counts what that loses of them all."""

    dtype: torch.dtype | None = None
    numbers: int = 0
    overflowed: int = 0
    underflowed: int = 0
    nan: int = 0

    def take(self, values: Tensor) -> tuple[Tensor, Cast | None]:
        """The numbers to store, and what was lost of them; integers and what is smaller already stay as they are."""
        small = values.dtype.itemsize < 2
        if self.dtype is None or not values.is_floating_point() or small or values.dtype == self.dtype:
            return values, None
        out = values.to(self.dtype)
        cast = Cast(
            source=str(values.dtype).removeprefix("torch."),
            overflowed=int((out.isinf() & values.isfinite()).sum()),
            underflowed=int(((out == 0) & (values != 0)).sum()),
            nan=int(out.isnan().sum()),
        )
        self.numbers += out.numel()
        self.overflowed += cast.overflowed
        self.underflowed += cast.underflowed
        self.nan += cast.nan
        return out, cast

    @property
    def lost(self) -> int:
        return self.overflowed + self.underflowed + self.nan

    @property
    def text(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"states stored as {name}: of {self.numbers:,} numbers {self.overflowed:,} overflowed to infinity, "
            f"{self.underflowed:,} became 0, {self.nan:,} are NaN"
        )
