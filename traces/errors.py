"""What can go wrong for a user, as one line each.

    ReplayScopeError            every error that a user can cause and mend; exit code 2
    └── TraceError              a trace that cannot be written or read
        ├── TraceExistsError    the output is there already and `force` was not given
        ├── TraceLockedError    another process holds the file
        ├── TraceFormatError    not a trace, damaged, or not safe to open
        └── TraceVersionError   written by a newer version of the format

The tree starts here because `traces` imports nothing else of the package.
"""


class ReplayScopeError(Exception):
    """An error for the user: one line that names the thing and the next step.

    exit_code: what a command line program exits with.
    """

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(" ".join(str(message).split()))


class TraceError(ReplayScopeError):
    """A trace that cannot be written or read."""


class TraceExistsError(TraceError):
    """The output file exists and overwriting was not asked for."""


class TraceLockedError(TraceError):
    """Another process holds the file."""


class TraceFormatError(TraceError):
    """The file is not a trace, is damaged, or would make the reader follow or allocate what it should not."""


class TraceVersionError(TraceError):
    """The file was written under a newer schema than this reader knows."""
