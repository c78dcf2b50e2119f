"""Where the page listens: a host that is none of this machine's, a port that is taken, and the next free one."""

import errno
import os
import socket
import time

import pytest

from replayscope.inspector.errors import UsageError
from replayscope.ui import port as listen


def refused(host: str, port: int | None = None) -> str:
    began = time.monotonic()
    with pytest.raises(UsageError) as error:
        listen.free_port(host, port)
    assert time.monotonic() - began < 5 and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("port", [None, 7870])
def test_a_name_without_an_address_is_asked_once(monkeypatch, port):
    asked = []

    def unknown(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said = refused("nope.invalid", port)
    assert "nope.invalid" in said and "no address" in said and "taken" not in said and "free" not in said
    assert asked == ["nope.invalid"]


@pytest.mark.parametrize("host", ["a..b", "", "999.1.1.1"])
def test_a_host_that_can_be_none(host):
    said = refused(host)
    assert "--host" in said and "taken" not in said


@pytest.mark.parametrize("port", [None, 7870])
def test_an_address_of_another_machine_is_no_port_that_is_taken(port):
    # Kept for documentation, so that no machine has it.
    said = refused("192.0.2.1", port)
    assert "192.0.2.1" in said and "no address of this machine" in said and "taken" not in said


def test_a_port_that_is_taken_is_named_and_the_search_goes_past_it(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("127.0.0.1", port)
        assert f"port {port} is taken" in said and "address" not in said
        monkeypatch.setattr(listen, "FIRST_PORT", port)
        monkeypatch.setattr(listen, "LAST_PORT", port)
        assert "no free port" in refused("127.0.0.1")
        monkeypatch.setattr(listen, "LAST_PORT", port + 20)
        assert port < listen.free_port("127.0.0.1", None) <= port + 20


def test_a_port_that_is_not_allowed_is_said(monkeypatch):
    monkeypatch.setattr(listen, "_refusal", lambda *_: errno.EACCES)
    assert "port 80 may not be opened" in refused("127.0.0.1", 80)


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="needs IPv6")
def test_an_address_of_the_sixth_version():
    assert listen.free_port("::1", None) >= listen.FIRST_PORT
