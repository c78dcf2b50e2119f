"""What a number looks like: one fixed colour range per metric, shared by all cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replayscope.ui.theme import LIGHT, number, scale

MAX_DECADES = 6
Kind = Literal["log", "linear", "ratio", "signed"]


@dataclass(frozen=True)
class Scale:
    """Maps values of one metric to colour.

    kind: `log` for magnitudes; `linear` for shares and counts; `ratio` diverges around 1, equal factors up and down;
    `signed` diverges around 0.
    low, high: the values at the ends of the colour bar, in `unit`. Values beyond them take the end's colour.
    """

    kind: Kind
    low: float
    high: float
    label: str
    unit: str = ""
    saturates: bool = False

    def place(self, value: np.ndarray) -> np.ndarray:
        """Values in the unit of the metric → numbers that plotly colours; NaN stays, inf becomes the end of the bar."""
        value = np.asarray(value, float)
        if self.kind in ("linear", "signed"):
            return np.clip(value, self.low, self.high)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.clip(np.log10(value), math.log10(self.low), math.log10(self.high))

    @property
    def ends(self) -> tuple[float, float]:
        """`place` of low and high."""
        if self.kind in ("linear", "signed"):
            return self.low, self.high
        return math.log10(self.low), math.log10(self.high)

    @property
    def colours(self) -> list[list]:
        """The plotly colour scale."""
        if self.kind in ("ratio", "signed"):
            return scale((*LIGHT.below, LIGHT.magnitude[0], *LIGHT.magnitude[2:]))
        return scale(LIGHT.magnitude)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Places on the bar and the real values written beside them."""
        low, high = self.ends
        if self.kind in ("linear", "signed"):
            places = [float(v) for v in np.linspace(low, high, 5)]
            return places, [number(v) for v in places]
        if self.kind == "ratio":
            places = [low, low / 2, 0.0, high / 2, high]
            return places, [number(10**v, 3) for v in places]
        step = max(1, math.ceil((high - low) / 7))
        exponents = list(range(round(high), round(low) - 1, -step))[::-1]
        texts = [number(10.0**e) for e in exponents]
        if self.saturates and exponents and exponents[0] == round(low):
            texts[0] = f"≤ {texts[0]}"
        return [float(e) for e in exponents], texts


def fit(values: np.ndarray, label: str, kind: Kind = "log", unit: str = "", floor: float = 0.0) -> Scale:
    """A range for all `values` of a metric: whole decades, at most six, and nothing spent on what is below the floor.

    values: any shape, of every cut and arm that shares the bar. floor: the largest noise floor of them, 0 if unknown.
    No finite positive value gives the range 1e-6 … 1, so that an empty figure still has a bar.
    """
    finite = np.asarray(values, float).ravel()
    finite = finite[np.isfinite(finite)]
    if kind == "linear":
        high = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
        return Scale(kind, 0.0, high, label, unit)
    if kind == "signed":
        reach = float(np.abs(finite).max(initial=0.0)) or 1.0
        return Scale(kind, -reach, reach, label, unit)
    finite = finite[finite > 0]
    if kind == "ratio":
        spread = float(np.abs(np.log10(finite)).max(initial=0.0))
        factor = 10 ** max(spread, 0.01)
        return Scale(kind, 1 / factor, factor, label, unit)
    if not finite.size:
        return Scale(kind, 1e-6, 1.0, label, unit)
    high = math.ceil(math.log10(finite.max()) - 1e-9)
    low = math.floor(math.log10(finite.min()) + 1e-9)
    if 0 < floor < finite.max():
        low = max(low, math.floor(math.log10(floor)))
    low = min(max(low, high - MAX_DECADES), high - 1)
    return Scale(kind, 10.0**low, 10.0**high, label, unit, saturates=bool(finite.min() < 10.0**low * (1 - 1e-9)))
