"""Whom the page answers to: raw requests with Host headers of this machine, and of a name that was rebound to it."""

import asyncio
import http.client
import json
from urllib.parse import urlsplit

import pytest

from replayscope.inspector.errors import UsageError
from replayscope.ui import app
from replayscope.ui.hosts import OwnHosts, named
from tests.conftest import LOOPS
from tests.synthetic import synthetic_trace

pytestmark = LOOPS
EVIL = ("evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.7",
        "127.0.0.1@evil.example", "2130706433", "", None)  # fmt: skip
OWN = ("127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "localhost.", "[::1]:{port}", "127.0.0.1")
JOIN = json.dumps({"data": [], "fn_index": 0, "session_hash": "s"})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("traces")
    synthetic_trace(root / "secret.h5", n_tokens=48, window=8, layers=2, cuts=(24,))
    return root


@pytest.fixture(scope="module")
def port(root):
    page = app.build(root)
    yield urlsplit(app.launch(page, allowed=("replay.example",))).port or 0
    page.close()


def ask(port: int, host: str | None, path: str = "/", method: str = "GET", body: str = "", **headers: str):
    """Status and text of a raw request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host is not None:
            connection.putheader("Host", host.format(port=port))
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            connection.putheader(name.replace("_", "-"), value.format(port=port))
        connection.endheaders(body.encode())
        answer = connection.getresponse()
        return answer.status, answer.read(4096).decode("utf-8", "replace")
    finally:
        connection.close()


PATHS = (
    ("/", "GET"), ("/config", "GET"), ("/gradio_api/info", "GET"), ("/replayscope/plotly.min.js", "GET"),
    ("/gradio_api/call/list_traces", "POST"), ("/gradio_api/queue/join", "POST"),
    ("/gradio_api/queue/data?session_hash=s", "GET"), ("/gradio_api/heartbeat/s", "GET"),
)  # fmt: skip


@pytest.mark.parametrize("host", EVIL)
def test_another_host_gets_nothing(port, host):
    """Of the page, the API, the queue and its stream. The twin is the next test."""
    for path, method in PATHS:
        # Without the header the server itself refuses with 400 and closes at once: a body that it has not read by then
        # would make it reset the connection, which can overtake the answer.
        status, text = ask(port, host, path, method, JOIN if method == "POST" and host is not None else "")
        assert status == (400 if host is None else 403), path
        assert "secret" not in text and "gradio" not in text and len(text) < 200


def test_this_machine_by_each_of_its_names_is_answered(port):
    for host in (*OWN, "replay.example", "Replay.Example:443"):
        assert ask(port, host, "/config")[0] == 200, host
    for path, method in PATHS[:6]:
        assert ask(port, "localhost", path, method, JOIN if method == "POST" else "")[0] in (200, 422, 500), path
    status, text = ask(port, "localhost", "/gradio_api/call/list_traces", "POST", '{"data": []}')
    assert status == 200 and "event_id" in text


def test_a_request_of_another_site_is_refused(port):
    body = '{"data": []}'
    for origin in ("http://evil.example", "null", "http://evil.example:{port}", "http://127.0.0.1.evil.example", "x"):
        assert ask(port, "127.0.0.1:{port}", "/gradio_api/call/list_traces", "POST", body, Origin=origin)[0] == 403
    for origin in ("http://127.0.0.1:{port}", "http://localhost:{port}", "https://replay.example"):
        assert ask(port, "127.0.0.1:{port}", "/gradio_api/call/list_traces", "POST", body, Origin=origin)[0] == 200


def test_without_the_check_the_page_would_be_read(root, monkeypatch):
    """The twin: the same requests reach a page that lets everybody in, so what refuses them is the check."""

    class Open:
        def __init__(self, inner, names):
            self.inner = inner

        async def __call__(self, scope, receive, send):
            await self.inner(scope, receive, send)

    monkeypatch.setattr(app, "OwnHosts", Open)
    page = app.build(root)
    try:
        port = urlsplit(app.launch(page)).port or 0
        assert ask(port, "evil.example", "/config")[0] == 200
    finally:
        page.close()


def websocket(names: frozenset[str], host: bytes) -> list[dict]:
    """What a websocket of a host is sent."""
    sent: list[dict] = []

    async def inner(scope, receive, send):
        await send({"type": "websocket.accept"})

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "headers": [(b"host", host)]}
    asyncio.run(OwnHosts(inner, names)(scope, receive, send))
    return sent


def test_a_websocket_of_another_host_is_closed():
    assert websocket(named("127.0.0.1"), b"evil.example") == [{"type": "websocket.close", "code": 1008}]
    assert websocket(named("127.0.0.1"), b"127.0.0.1:7860") == [{"type": "websocket.accept"}]


def test_what_a_server_is_called_follows_from_where_it_listens():
    def answers(names, *headers):
        return not OwnHosts(lambda *_: None, names).refusal([(b"Host", value) for value in headers])  # type: ignore[arg-type]

    here, lan, all_ = named("127.0.0.1"), named("192.168.1.5"), named("0.0.0.0")
    assert answers(here, b"127.0.0.1") and not answers(here, b"192.168.1.5")
    assert answers(lan, b"192.168.1.5:80") and not answers(lan, b"192.168.1.6") and not answers(lan, b"evil.example")
    assert answers(all_, b"192.168.1.6") and answers(all_, b"[fe80::1]:80") and not answers(all_, b"evil.example")
    assert answers(named("Box.example"), b"box.example") and not answers(here, b"127.0.0.1", b"evil.example")
    assert not answers(here, b"[::1") and not answers(here, b"localhost:x") and not answers(here, b"*")
    for bad in ("http://x", "*", "", "a b", "ä.example"):
        with pytest.raises(UsageError, match="--allow-host"):
            named("127.0.0.1", [bad])
