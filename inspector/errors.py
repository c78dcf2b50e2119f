"""Errors of the use cases; `replayscope.traces.errors` starts the tree and says what every error must be.

ReplayScopeError
├── UsageError     an option, a name or a value that cannot be used as given
└── CompareError   two traces that cannot be set against each other
"""

from replayscope.traces.errors import ReplayScopeError, system_error

__all__ = ["CompareError", "ReplayScopeError", "UsageError", "system_error"]


class UsageError(ReplayScopeError):
    """An option, a name or a value that cannot be used as given."""


class CompareError(ReplayScopeError):
    """Two traces that cannot be set against each other; names the field that differs."""
