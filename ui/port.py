"""Where the page can listen: a named port, or the next free one."""

from __future__ import annotations

import errno
import os
import socket

from replayscope.inspector.errors import UsageError

FIRST_PORT, LAST_PORT = 7860, 7959


def free_port(host: str, port: int | None) -> int:
    """The named port, or the first free one. Raises UsageError that tells a bad host from a port that is taken."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host!r} has no address; give one of this machine, such as 127.0.0.1") from None
    family, _, _, _, address = found[0]
    for at in range(FIRST_PORT, LAST_PORT + 1) if port is None else [port]:
        number = _refusal(family, (address[0], at, *address[2:]))
        if number == 0:
            return at
        if number in (errno.EACCES, errno.EPERM):
            raise UsageError(f"port {at} may not be opened by this user; name a --port from 1024 on")
        if number != errno.EADDRINUSE:
            raise UsageError(
                f"--host {host!r} is no address of this machine ({os.strerror(number)}); give one, such as 127.0.0.1"
            )
    if port is not None:
        raise UsageError(f"port {port} is taken; name another --port, or none for the next free one")
    raise UsageError(f"no free port from {FIRST_PORT} to {LAST_PORT} on {host}; name one with --port")


def _refusal(family: int, address: tuple) -> int:
    """The error number of listening at an address, 0 if it can be done."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0
