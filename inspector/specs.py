"""What a user types, made into values: cuts, replay lengths, suffix, device, dtype, sizes, tolerances.

Pure functions of text and integers. Each raises UsageError with one line that names the text and what would be valid.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose

CUT_FORMS = "numbers (128,129), a range (start:stop:step), around:W, grid or all"
REPLAY_FORMS = "numbers (128,256), a range (start:stop:step), W, 2W, around:W or exact"
DTYPES = {
    "fp64": "fp64", "float64": "fp64", "double": "fp64",
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip

_MOST = 2**63 - 1  # of a count: what torch takes as a seed and numpy as a size
_MOST_LENGTHS = 100_000
_POSITION = re.compile(r"(?P<number>[0-9]+)|(?P<times>[0-9]*)W(?P<offset>[+-][0-9]+)?")
_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?P<kind>I?B)?", re.IGNORECASE)
_TOLERANCE = re.compile(r"(?P<glob>[^=<>\s]+)\s*=\s*(?P<metric>[a-z_0-9]+)\s*<=\s*(?P<limit>\S+)")


@dataclass(frozen=True)
class Cuts:
    """Cuts of one prompt: ascending and distinct; how many were moved to admissible ones; what has to be said."""

    values: tuple[int, ...]
    snapped: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tolerance:
    """`metric` of every hook point that matches `glob` must be at most `limit` (in the unit of the metric)."""

    glob: str
    metric: str
    limit: float


@dataclass(frozen=True)
class _Term:
    """One part of a SPEC between commas: kind is number, range, around, or a word; the positions are still text."""

    text: str
    kind: str
    parts: tuple[str, ...] = ()


def parse_cuts(
    spec: str,
    *,
    length: int,
    window: int,
    admits: Callable[[int], bool] = lambda cut: True,
    rule: str = "the semantics",
) -> Cuts:
    """Cuts of a prompt of `length` tokens.

    A number typed by hand must lie in [0, length - 1] and be admitted; `length` itself becomes the largest admitted
    cut below it, and a note says so. Cuts of ranges and words are moved to the next admitted cut below, or above
    where there is none, and counted. `rule` names in errors what refuses a cut.
    """
    last = length - 1
    if last < 0:
        raise UsageError("the prompt is empty; give at least one token")
    values: set[int] = set()
    notes: list[str] = []
    snapped = 0
    for term in _terms(spec, "cut", CUT_FORMS, ("grid", "all")):
        if term.kind == "number":
            cut = _position(term.parts[0], window)
            if cut == length:
                cut = _snap(last, last, admits, rule)
                notes.append(f"cut {length} is the whole prompt; {cut} is used: the last token must be computed")
            elif not 0 <= cut <= last:
                raise UsageError(f"cut {term.text} is out of range: this prompt has cuts 0..{last}")
            elif not admits(cut):
                near = _snap(cut, last, admits, rule)
                raise UsageError(f"cut {term.text} is not admitted by {rule}; the nearest that is: {near}")
            values.add(cut)
            continue
        made = _made_by_tool(term, last, window, notes)
        if not made:
            raise UsageError(f"cuts {term.text!r} name no position of this prompt: its cuts are 0..{last}")
        moved = [_snap(cut, last, admits, rule) for cut in made]
        snapped += sum(a != b for a, b in zip(made, moved, strict=True))
        values.update(moved)
    return Cuts(tuple(sorted(values)), snapped, tuple(notes))


def check_cuts(spec: str) -> str:
    """`spec` itself if it reads as cuts, whatever the prompt; else UsageError."""
    _terms(spec, "cut", CUT_FORMS, ("grid", "all"))
    return spec


def parse_replay(spec: str, *, window: int, layers: int) -> tuple[int, ...]:
    """Replay lengths in tokens, ascending and distinct; `exact` is layers·(window - 1) + 1."""
    values: set[int] = set()
    for term in _terms(spec, "replay length", REPLAY_FORMS, ("exact",)):
        if term.kind == "exact":
            values.add(layers * (window - 1) + 1)
        elif term.kind == "range":
            if not term.parts[1]:
                raise UsageError(f"replay range {term.text!r} has no end; write start:stop:step")
            start, stop, step = _bounds(term, window, 0)
            if len(range(start, stop, step)) > _MOST_LENGTHS:
                raise UsageError(
                    f"replay range {term.text!r} holds more than {_MOST_LENGTHS} lengths; take a larger step"
                )
            values.update(range(start, stop, step))
        else:
            middle = _position(term.parts[0], window)
            around = (-1, 0, 1) if term.kind == "around" else (0,)
            values.update(middle + step for step in around)
    if not values or min(values) < 1:
        raise UsageError(f"replay length {spec!r} must name lengths of at least 1")
    return tuple(sorted(values))


def check_replay(spec: str) -> str:
    """`spec` itself if it reads as replay lengths, whatever the model; else UsageError."""
    _terms(spec, "replay length", REPLAY_FORMS, ("exact",))
    return spec


def parse_suffix(text: str) -> int | None:
    """Number of suffix tokens to run, or None for all."""
    return None if text.strip() == "all" else parse_count(text, "suffix", least=1, also="all")


def parse_count(text: str, what: str, *, least: int = 0, also: str = "") -> int:
    """A whole number from `least` to 2^63 - 1; `also` names another word that the caller takes."""
    text = text.strip()
    shown = text if len(text) <= 24 else f"{text[:20]}…"
    number = text.lstrip("0") or text[:1]
    digits = re.fullmatch(r"[0-9]+", text)
    # By its length first: int() refuses thousands of digits.
    if digits and (len(number) > 19 or int(number) > _MOST):
        raise UsageError(f"{what} {shown!r} is too large; it may be at most {_MOST}")
    if not digits or int(number) < least:
        wanted = f"of at least {least}{f' or {also}' if also else ''}, in digits"
        raise UsageError(f"{what} {shown!r} must be a whole number {wanted}")
    return int(number)


def parse_threshold(text: str) -> float:
    """A positive number that an error can be held against."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise UsageError(f"threshold {text!r} must be a number above 0, at most 1e9")
    return value


def parse_device(text: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N`; whether it exists is for torch to say."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise UsageError(f"unknown device {text!r}; valid: auto, cpu, cuda, cuda:N")
    return text


def parse_devices(text: str) -> tuple[str, ...]:
    """`cpu`, `cuda` or `cuda:N`, with commas between them."""
    names = tuple(parse_device(name) for name in text.split(","))
    if "auto" in names:
        raise UsageError(f"--devices {text}: auto is one device; name each, as cuda:0,cuda:1")
    return names


def parse_dtype(text: str) -> str:
    """`fp64`, `fp32` or `bf16`; long names are taken too."""
    if text not in DTYPES:
        raise UsageError(f"unknown dtype {text!r}; valid: fp64, fp32, bf16")
    return DTYPES[text]


def parse_bytes(text: str) -> int:
    """Bytes: `4096`, `512M`, `1.5GiB` (powers of 1024) or `4GB` (powers of 1000)."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise UsageError(f"size {text!r} is not a number of bytes; write 4096, 512M, 1.5GiB or 4GB")
    if len(text) > 40:
        raise UsageError(f"size '{text[:20]}…' is too large; it may be at most 40 characters, as 512M or 4GB")
    base = 1000 if (found["kind"] or "").upper() == "B" else 1024
    return int(float(found["number"]) * base ** " KMGT".index(found["unit"].upper() or " "))


def parse_tolerance(text: str, metrics: Collection[str]) -> Tolerance:
    """`layers.*.window_kv=rel_l2<=1e-3` as a Tolerance; the limit is finite and not negative."""
    found = _TOLERANCE.fullmatch(text.strip())
    try:
        limit = float(found["limit"]) if found else -1.0
    except ValueError:
        limit = -1.0
    if not found or not 0 <= limit < float("inf"):
        raise UsageError(
            f"tolerance {text!r} cannot be read; write POINTS=METRIC<=NUMBER, as layers.*.hidden=rel_l2<=1e-3"
        )
    return Tolerance(found["glob"], choose("metric", found["metric"], metrics), limit)


def _terms(spec: str, what: str, forms: str, words: Sequence[str]) -> list[_Term]:
    """The parts of `spec` between commas, each of a known form."""
    return [_term(part.strip(), what, forms, words) for part in spec.split(",")]


def _term(text: str, what: str, forms: str, words: Sequence[str]) -> _Term:
    if text in words:
        return _Term(text, text)
    if text.startswith("around:") and _POSITION.fullmatch(text[7:]):
        return _Term(text, "around", (text[7:],))
    if _POSITION.fullmatch(text):
        return _Term(text, "number", (text,))
    parts = text.split(":")
    if len(parts) in (2, 3) and all(not part or _POSITION.fullmatch(part) for part in parts):
        return _Term(text, "range", (*parts, "")[:3])
    shown = f"{what} {text!r} is not a number" if text else f"an empty {what}"
    raise UsageError(f"{shown}; give {forms}")


def _position(text: str, window: int) -> int:
    """`128`, `W`, `2W` or `W+1` as a number."""
    found = _POSITION.fullmatch(text)
    assert found, text  # every term was matched when it was split
    digits = found["number"] or found["times"] or "1"
    if len(digits) > 12 or len(found["offset"] or "") > 12:
        raise UsageError(f"{text[:20]}… is far too large; give positions in the prompt, as 128, W or 2W")
    return int(digits) if found["number"] else int(digits) * window + int(found["offset"] or 0)


def _bounds(term: _Term, window: int, stop: int) -> tuple[int, int, int]:
    """Start, stop (not included) and step of a range; an open end is `stop`."""
    values = [
        _position(part, window) if part else default for part, default in zip(term.parts, (0, stop, 1), strict=True)
    ]
    if values[2] < 1:
        raise UsageError(f"range {term.text!r} has step {values[2]}; the step is at least 1")
    return max(values[0], 0), values[1], values[2]


def _made_by_tool(term: _Term, last: int, window: int, notes: list[str]) -> list[int]:
    """The cuts in [0, last] that a range or a word stands for, ascending."""
    if term.kind == "range":
        start, stop, step = _bounds(term, window, last + 1)
        if stop > last + 1:
            notes.append(f"range {term.text} ends at {last}, the last cut of this prompt")
        return list(range(start, min(stop, last + 1), step))
    if term.kind == "all":
        return list(range(last + 1))
    if term.kind == "around":
        marks = [_position(term.parts[0], window)]
    else:
        marks = [0, window, (last + 1) // 2, last]
    near = {mark + step for mark in marks for step in (-1, 0, 1)}
    return sorted(cut for cut in near if 0 <= cut <= last)


def _snap(cut: int, last: int, admits: Callable[[int], bool], rule: str) -> int:
    """The largest admitted cut up to `cut`, or the smallest above it."""
    for near in itertools.chain(range(cut, -1, -1), range(cut + 1, last + 1)):
        if admits(near):
            return near
    raise UsageError(f"{rule} admits no cut of a prompt with {last + 1} tokens")
