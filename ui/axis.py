"""A log axis that also has places for exact zeros and for infinities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from replayscope.ui.theme import number

MAX_DECADES = 8


@dataclass(frozen=True)
class LogAxis:
    """log10 of values: at most `MAX_DECADES` decades low … high, and lanes beyond them: 0 or less than low, and inf.

    below: what the lower lane is called, empty without one.
    """

    low: int
    high: int
    below: str
    infinite: bool

    @classmethod
    def over(cls, values: np.ndarray) -> LogAxis:
        """The axis of some values of any shape; without a positive one it is 1e-6 … 1."""
        finite = values[np.isfinite(values) & (values > 0)]
        low, high = (math.floor(np.log10(finite.min())), math.ceil(np.log10(finite.max()))) if finite.size else (-6, 0)
        high = max(high, low + 1)
        cropped = low < high - MAX_DECADES
        low = max(low, high - MAX_DECADES)
        below = f"≤ {number(10.0**low)}" if cropped else "0" if (values == 0).any() else ""
        return cls(low, high, below, bool(np.isposinf(values).any()))

    @property
    def lane(self) -> float:
        """Distance of a lane from the end of the axis, in decades."""
        return 0.08 * (self.high - self.low) + 0.05

    def place(self, values: np.ndarray) -> np.ndarray:
        """Values → places on the axis, in decades; NaN stays."""
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.log10(values)
        y = np.where(values < 10.0**self.low, self.low - self.lane, y)
        return np.where(np.isposinf(values), self.high + self.lane, y)

    @property
    def range(self) -> list[float]:
        """Where the axis begins and ends, in decades."""
        below = 1.6 * self.lane if self.below else 0.03 * (self.high - self.low)
        return [self.low - below, self.high + (1.6 * self.lane if self.infinite else 0.03 * (self.high - self.low))]

    def ticks(self, infinite: str = "inf") -> tuple[list[float], list[str]]:
        """Places and the real values written beside them; `infinite` names the upper lane."""
        step = max(1, math.ceil((self.high - self.low) / 7))
        places = [float(e) for e in range(self.low + (1 if self.below[:1] == "≤" else 0), self.high + 1, step)]
        texts = [number(10.0**e) for e in places]
        if self.below:
            places, texts = [self.low - self.lane, *places], [self.below, *texts]
        if self.infinite:
            places, texts = [*places, self.high + self.lane], [*texts, infinite]
        return places, texts
