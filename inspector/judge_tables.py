"""Tables of a contract as dataclasses: keys, types and ranges are checked, and what is wrong is named. No torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose

_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple[int, ...]: "a list of whole numbers, not empty",
    tuple[str, ...]: "a list of texts, not empty",
}
# The least budget needs 3 million prompts to be shown; below, 1 - budget rounds to 1.
_LEAST_BUDGET = 1e-6
_LONGEST = 1000  # characters of a text: all are names and globs, and a glob of megabytes takes seconds to read
Range = tuple[Callable[[float], bool], str]


def _from(low: int, high: int) -> Range:
    return (lambda x: low <= x <= high), f"from {low} to {high:,}"


RANGES: Mapping[str, Range] = {
    "at_most": (lambda x: math.isfinite(x) and x >= 0, "a finite number of at least 0"),
    "confidence": (lambda x: 0.5 < x < 1, "a number between 0.5 and 1"),
    "budget": (lambda x: _LEAST_BUDGET <= x < 1, f"a number of at least {_LEAST_BUDGET:g} and below 1"),
    "reference": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "temperature": (lambda x: 0 < x <= 1000, "a number above 0, at most 1000"),
    "samples": _from(1, 100_000),
    "resamples": _from(1, 100_000),
    # Seeds count up from the first, and are kept in JSON, which is exact up to here.
    "seed": _from(0, 2**53),
    "lengths": _from(1, 10_000_000),
    "concurrency": _from(1, 100_000),
    "neighbours": _from(0, 64),
}


def filled(kind: type, raw: Any, where: str) -> Any:
    """A dataclass from a table. Raises UsageError for unknown and missing keys, values of another type or range."""
    raw = table(raw, where)
    known = {f.name: f for f in fields(kind)}
    values = {}
    for key, value in raw.items():
        f = known[choose(f"key of {where}", key, list(known))]
        values[key] = typed(value, f.type, key, where)
    if missing := [f.name for f in known.values() if f.name not in values and f.default is MISSING]:
        raise UsageError(f"{where} lacks {missing[0]}")
    return kind(**values)


def typed(value: Any, kind: Any, key: str, where: str, within: str = "") -> Any:
    """A TOML value as a field's type: a whole number is a float too, true is no number, no list is empty.

    within: the key of RANGES, where it is another one than ``key``.
    """
    many = {tuple[int, ...]: int, tuple[str, ...]: str}.get(kind)
    values: list[Any] = value if many and isinstance(value, list) else [value]
    allowed = (int, float) if kind is float else (many or kind,)
    if not values or (many and values is not value) or any(type(one) not in allowed for one in values):
        raise UsageError(f"{where}: {key} must be {_TYPES[kind]}, not {value!r:.60}")
    if long := [one for one in values if isinstance(one, str) and len(one) > _LONGEST]:
        raise UsageError(f"{where}: {key} has {len(long[0]):,} characters, at most {_LONGEST:,} are read")
    inside, says = RANGES.get(within or key, (None, ""))
    for one in values:
        try:
            fits = inside is None or inside(one)
        except OverflowError:  # a whole number above all floats
            fits = False
        if not fits:
            raise UsageError(f"{where}: {key} must be {says}, not {one!r:.60}")
    if many:
        return tuple(values)
    return float(values[0]) if kind is float else value


def table(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UsageError(f"{where} must be a table, not {raw!r:.60}")
    return raw


def tables(raw: Any, where: str) -> list[Any]:
    """The entries of an array of tables; each is checked when it is filled."""
    if not isinstance(raw, list):
        raise UsageError(f"{where} must be written with two brackets, once for each entry, not as {raw!r:.60}")
    return raw


def texts(raw: Any, key: str, where: str) -> tuple[str, ...]:
    """A list of texts that may be empty."""
    return () if raw == [] else typed(raw, tuple[str, ...], key, where)
