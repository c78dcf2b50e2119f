"""What can go wrong with a request, each told in one line that names the thing and the next step.

ReplayScopeError      exit code 2
└── UsageError        an option, a name or a value that cannot be used as given
"""

import difflib
from collections.abc import Sequence


class ReplayScopeError(Exception):
    """A failure that the user can act on; `str(error)` is one line."""

    exit_code = 2


class UsageError(ReplayScopeError):
    """An option, a name or a value that cannot be used as given."""


def unknown(what: str, name: str, valid: Sequence[str], shown: str = "") -> UsageError:
    """The error for a name that is not valid: the nearest valid name if one is near, then all (or `shown`)."""
    near = difflib.get_close_matches(name, valid, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {what} {name!r}; {guess}valid: {shown or ', '.join(valid)}")


def choose(what: str, name: str, valid: Sequence[str]) -> str:
    """`name` if it is one of `valid`; else UsageError."""
    if name not in valid:
        raise unknown(what, name, valid)
    return name
