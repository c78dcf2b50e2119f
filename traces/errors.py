"""What can go wrong for a user, as one line each.

    ReplayScopeError            every error that a user can cause and mend; exit code 2
    └── TraceError              a trace that cannot be written or read
        ├── TraceExistsError    the output is there already and `force` was not given
        ├── TraceLockedError    another process holds the file
        ├── TraceFormatError    not a trace, damaged, or not safe to open
        └── TraceVersionError   written by a newer version of the format

The tree starts here because `traces` imports nothing else of the package.
"""

import errno

# What can be done about an error of the system, by its number; the system says what went wrong.
_NEXT = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; check the path",
    errno.EISDIR: "give a file, not a folder",
    errno.EACCES: "give another path, or have its permissions changed",
    errno.EPERM: "give another path, or have its permissions changed",
    errno.EROFS: "give a path on a disk that can be written",
    errno.ENAMETOOLONG: "give a shorter one",
    errno.ELOOP: "its links lead in a circle; give the file itself",
    errno.EEXIST: "give another path",
    errno.ENOTEMPTY: "give another path",
    errno.ENOSPC: "make room, or give a path on another disk",
    errno.EDQUOT: "make room, or give a path on another disk",
    errno.EFBIG: "give a path on a disk that takes files of this size",
    errno.EMFILE: "allow more with ulimit -n",
    errno.ENFILE: "try again when fewer are open",
    errno.EBUSY: "try again when nothing else uses it",
    errno.ETXTBSY: "try again when nothing else uses it",
    errno.EIO: "the disk may be failing; try another one",
    errno.ESTALE: "the network disk has changed; try again",
    errno.ENODEV: "give a plain file",
    errno.ENXIO: "give a plain file",
    errno.ESPIPE: "give a plain file",
}


def system_error(error: OSError) -> str:
    """What the system says, and the next step: `No such file or directory; check the path`. Without a number, which
    other packages leave out, their own words."""
    if error.errno is None:
        return str(error)
    return f"{error.strerror or error}; {_NEXT.get(error.errno, 'try again, or give another path')}"


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
