"""Who may open the page: names and passwords from the command line or from a file."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from replayscope.inspector.errors import UsageError

Users = list[tuple[str, str]]


def users(text: str | None) -> Users | None:
    """`USER:PASSWORD`, or `@FILE` with one of them a line; None for no question at all.

    Raises UsageError, which never repeats a password.
    """
    if text is None:
        return None
    if not text.startswith("@"):
        return [_user(text, "--auth")]
    try:
        # An editor may have put a byte order mark before it, which is no part of the first name.
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--auth: {text[1:]!r} cannot be read as text; give USER:PASSWORD or @FILE") from error
    found = [_user(line.strip(), f"--auth {text}: line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"--auth {text} names nobody; write USER:PASSWORD on a line of its own")
    return found


def is_local(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _user(text: str, where: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise UsageError(f"{where} is not USER:PASSWORD, neither of them empty")
    return name, password
