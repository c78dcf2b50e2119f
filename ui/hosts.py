"""Whom the page answers to: requests that name this server, and no others.

A web site whose name its owner lets point to 127.0.0.1 (DNS rebinding) is, to a browser, allowed to read whatever it
gets from there. What gives it away is the Host header, which holds the site's name; an address in its place cannot have
been rebound. A site that only sends a request, without reading the answer, is given away by its Origin.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from replayscope.inspector.errors import UsageError

_NAME = re.compile(rb"[A-Za-z0-9._-]{1,253}")
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+?)\.?(:[0-9]{1,5})?")


def named(host: str, more: Iterable[str] = ()) -> frozenset[str]:
    """What a request may call a server that listens on `host`: this machine, that host, and the names in `more`.

    One that listens on all addresses (`0.0.0.0`, `::`) goes by its machine's name and by every address, written `*`.
    Raises UsageError for a name that is none.
    """
    for name in more:
        if not _NAME.fullmatch(name.encode("ascii", "replace")):
            raise UsageError(f"--allow-host {name!r} is no host name; give one without http:// and port")
    names = {"localhost", host.lower(), *(name.lower() for name in more)}
    address = _address(host)
    return frozenset(names | {"*", socket.gethostname().lower()} if address and address.is_unspecified else names)


class OwnHosts:
    """ASGI middleware that answers 403 to a request, or closes a websocket, of another host or from another site."""

    def __init__(self, app: ASGIApp, names: frozenset[str]):
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not (reason := self.refusal(scope["headers"])):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await PlainTextResponse(f"{reason}\n", status_code=403)(scope, receive, send)

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Why a request with these headers gets no answer, in one line; empty if it gets one."""
        given = [(name.lower(), value) for name, value in headers]
        hosts = [value for name, value in given if name == b"host"]
        if len(hosts) != 1 or not self._own(hosts[0]):
            return "this page does not answer to that host name; start it with --allow-host NAME if it is its own"
        for origin in (value for name, value in given if name == b"origin"):
            if not self._own(_network_part(origin)):
                return "this page takes no requests from other sites"
        return ""

    def _own(self, host: bytes) -> bool:
        found = _HOST.fullmatch(host)
        if not found:
            return False
        name = found[1].decode().strip("[]").lower()
        address = _address(name)
        known = name in self.names
        return known if address is None else known or address.is_loopback or "*" in self.names


def _network_part(origin: bytes) -> bytes:
    try:
        return urlsplit(origin.decode("ascii")).netloc.encode()
    except ValueError:
        return b""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
