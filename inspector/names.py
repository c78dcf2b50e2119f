"""Names that a user types against names that exist: the nearest is suggested, all are listed."""

import difflib
from collections.abc import Collection

from replayscope.inspector.errors import UsageError

_LONGEST = 60  # characters of a name in a message; a file of a stranger may hold one of megabytes


def nearest(name: str, valid: Collection[str]) -> str | None:
    """The valid name that `name` was most likely meant to be, or None."""
    near = difflib.get_close_matches(name, valid, n=1) if len(name) <= _LONGEST else []
    return near[0] if near else None


def short(name: str) -> str:
    """A name as a message holds it: cut off where it is longer than any that was meant."""
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}… ({len(name):,} characters)"


def unknown(what: str, name: str, valid: Collection[str], shown: str = "") -> UsageError:
    """The error for a name that is not valid: the nearest valid name if one is near, then all (or `shown`)."""
    near = nearest(name, valid)
    guess = f"did you mean {near!r}? " if near else ""
    return UsageError(f"unknown {what} {short(name)!r}; {guess}valid: {shown or ', '.join(valid)}")


def choose(what: str, name: str, valid: Collection[str]) -> str:
    """`name` if it is one of `valid`; else UsageError."""
    if name not in valid:
        raise unknown(what, name, valid)
    return name


def counted(count: int, noun: str) -> str:
    """A number and its noun: 1 cell, 2 cells."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
