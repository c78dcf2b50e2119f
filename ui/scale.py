"""What a number looks like: one fixed colour range per metric, shared by all cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replayscope.ui.theme import LIGHT, number, scale

MAX_DECADES = 5
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
        places = [float(e) for e in range(round(low), math.floor(high + 1e-9) + 1)]
        texts = [number(10.0**e) for e in places]
        if high - places[-1] > max(0.15, 0.09 * (high - low)):
            places, texts = [*places, high], [*texts, number(self.high)]
        if self.saturates:
            texts[0] = f"≤ {texts[0]}"
        return places, texts


def fit(values: np.ndarray, label: str, kind: Kind = "log", unit: str = "", floor: float = 0.0) -> Scale:
    """A range for all `values` of a metric: at most five decades, and nothing spent on what is below the floor.

    values: any shape, of every cut and arm that shares the bar. floor: the largest noise floor of them, 0 if unknown.
    No finite positive value gives the range 1e-5 … 1, so that an empty figure still has a bar.
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
        return Scale(kind, 1e-5, 1.0, label, unit)
    high = _round_up(float(finite.max()))
    decade = math.ceil(math.log10(high) - 1e-9)
    low = math.floor(math.log10(finite.min()) + 1e-9)
    if 0 < floor < finite.max():
        low = max(low, math.floor(math.log10(floor)))
    low = min(max(low, decade - MAX_DECADES), decade - 1)
    return Scale(kind, 10.0**low, high, label, unit, saturates=bool(finite.min() < 10.0**low * (1 - 1e-9)))


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
