"""The standard streams as a shell may hand them over: closed, on a full disk, or read by nobody any more."""

import contextlib
import errno
import os
import sys
from typing import TextIO

from replayscope.inspector.errors import UsageError

# What stands in for a closed stream, opened the wrong way round: reading and writing fail as they do on a closed one.
# Of standard error nobody needs to know that.
_INSTEAD = (("stdin", os.O_WRONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w"))


def open_closed() -> None:
    """Open what is closed of the standard streams. The next file would get its number otherwise, and whatever prints to
    that number, from C too, would write into a trace."""
    for number, (name, flags, mode) in enumerate(_INSTEAD):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, and so this one.
            os.set_inheritable(os.open(os.devnull, flags), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def put(text: str) -> None:
    """Write a text and the end of its line to standard output, at once. A reader that has gone (`| head`) is no error.

    Raises UsageError where it cannot be written.
    """
    try:
        if text:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget(sys.stdout)
    except OSError as error:
        _forget(sys.stdout)
        raise UsageError(f"cannot write to standard output: {reason(error)}; send it elsewhere") from error


def reason(error: OSError) -> str:
    """Why a standard stream cannot be read or written, for a user who may have closed it."""
    return "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)


def say(text: str) -> None:
    """Write a text and the end of its line to standard error; where that fails there is nobody left to tell."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _forget(sys.stderr)


def _forget(stream: TextIO) -> None:
    """What is still buffered goes nowhere, so that the interpreter does not complain when it closes the stream."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
