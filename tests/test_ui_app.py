"""What the page does for each act of a visitor, who may open it, and what programs can ask of it. No browser."""

import json
import time

import gradio as gr
import httpx
import numpy as np
import pytest
from gradio_client import Client
from plotly.graph_objects import Figure

from replayscope.inspector import cli
from replayscope.inspector.errors import UsageError
from replayscope.traces import RunInfo, Table, Tokens, TraceWriter
from replayscope.traces.schema import bucket_names
from replayscope.ui import app, controls
from replayscope.ui.access import is_local, users
from replayscope.ui.library import Library
from replayscope.ui.port import FIRST_PORT
from replayscope.ui.session import Session
from tests.conftest import LOOPS
from tests.synthetic import synthetic_trace
from tests.visitor import CUTS, PARTS, Visitor

pytestmark = LOOPS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("traces")
    synthetic_trace(root / "a.h5", n_tokens=64, window=8, layers=4, cuts=CUTS)
    synthetic_trace(root / "b.h5", n_tokens=48, window=8, layers=3, cuts=(24, 30))
    return root


def test_every_part_has_a_name_of_its_own():
    page = app.build(".")
    page.close()
    names = []
    with gr.Blocks():
        for tab in app.TABS:
            names += list(tab.place())
    assert len(names) == len(set(names))
    assert not set(names) & {"header", "nav", "note", *controls.MENUS, *controls.SLIDERS}


def test_a_page_opens_and_only_what_changes_is_sent_again(root):
    visitor = Visitor(root)
    assert visitor.choice.cut == 40 and visitor.wanted == "a.h5"
    assert {"header", "trace", "arm", "cut", "overview_cut", "overview_position"} <= set(visitor.new)
    assert json.loads(visitor.new["header"])["address"].startswith("?tab=overview&trace=a.h5&arm=encoder")
    moved = visitor.do(cut=5)
    assert visitor.choice.cut == 50 and visitor.choice.position == 50
    assert set(moved) == {"header", "cut", "position", "overview_position"}, "the map by cut stays as it is"
    assert set(visitor.do()) == set(), "nothing that is there already is sent"


def test_clicks_choose_cut_position_layer_and_replay_length(root):
    visitor = Visitor(root, "?tab=cut&trace=a.h5")
    visitor.do({"axis": "cut", "at": 24, "row": 2})
    assert (visitor.choice.cut, visitor.choice.layer, visitor.choice.position) == (24, 2, 24)
    visitor.do({"axis": "position", "at": 20, "row": 1})
    assert (visitor.choice.position, visitor.choice.layer) == (20, 1)
    visitor.do({"axis": "replay", "at": 8})
    assert visitor.choice.arm == "encoder"
    visitor.do({"axis": "layer", "row": 3})
    assert visitor.choice.layer == 3
    for odd in ({"axis": "cut", "at": "x"}, {"axis": "trace", "at": 1}, {"axis": "cut", "at": float("nan")}, {"at": 5}):
        before = visitor.choice
        visitor.do(odd)
        assert visitor.choice == before


def test_another_trace_clears_the_other_tabs_and_a_bad_one_everything(root):
    visitor = Visitor(root)
    visitor.do(nav="cut")
    assert visitor.seen.tab == "cut" and visitor.wanted == "" and "cut_map" in visitor.new
    changed = visitor.do(trace="b.h5")
    assert visitor.choice.cut == 30 and changed["overview_cut"] == "" and changed["story"] == ""
    gone = visitor.do(trace="../c.h5")
    assert gone["cut_map"] == gone["cut_cell"] == gone["header"] == "" and "no such trace" in gone["note"]
    assert str(root) not in json.dumps([str(value) for value in gone.values()])
    back = visitor.do(trace="a.h5")
    assert back["note"] == "" and "cut_map" in back
    assert "no such trace as &#x27;x&#x27;" in visitor.do(other="x")["note"], "the second trace is named, not the first"
    visitor.do(other="", nav=["cut"])
    assert visitor.seen.tab == "cut", "what is no tab changes none"


def test_two_visitors_share_nothing(root):
    one, two = Visitor(root), Visitor(root)
    one.do(arm="hit")
    two.do(point="hidden")
    assert (one.choice.arm, one.choice.point) == ("hit", "window_kv")
    assert (two.choice.arm, two.choice.point) == ("encoder", "hidden")


def test_a_verdict_names_its_trace(root):
    visitor = Visitor(root)
    story, tables = visitor.act.describe("a.h5")
    assert json.loads(story)["trace"] == json.loads(tables)["trace"] == "a.h5"
    assert visitor.act.describe("") == [gr.skip(), gr.skip()]
    story, tables = visitor.act.describe("gone.h5")
    assert "not there any more" in json.loads(story)["html"] and tables == ""


def test_users_are_read_and_never_repeated(tmp_path):
    assert users(None) is None and users("ann:p:w") == [("ann", "p:w")]
    (tmp_path / "users").write_text("ann:one\n\nbob:two\n")
    assert users(f"@{tmp_path / 'users'}") == [("ann", "one"), ("bob", "two")]
    (tmp_path / "marked").write_text("ann:one\n", encoding="utf-8-sig")
    assert users(f"@{tmp_path / 'marked'}") == [("ann", "one")], "a byte order mark is no part of a name"
    for bad in ("secret", "secret:", ":secret", f"@{tmp_path / 'none'}", f"@{tmp_path}"):
        with pytest.raises(UsageError) as error:
            users(bad)
        assert "secret" not in str(error.value) and "--auth" in str(error.value)
    assert is_local("127.0.0.1") and is_local("::1") and is_local("localhost") and not is_local("0.0.0.0")


def test_serve_names_the_address_picks_a_free_port_and_warns(root, capsys, monkeypatch):
    seen = {}
    monkeypatch.setattr(app, "_wait", lambda: None)
    monkeypatch.setattr(app, "launch", lambda page, host, port, browser, auth, _: seen.update(auth=auth) or "http://x/")
    app.serve(root=root, auth="ann:pw")
    assert seen["auth"] == [("ann", "pw")] and "http://x/" in capsys.readouterr().err
    app.serve(root=root, host="0.0.0.0")
    assert "--auth" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no folder"):
        app.serve(root=root / "none")
    synthetic_trace(root.parent / "c.h5", n_tokens=48, window=8, layers=3, cuts=(24,))
    with pytest.raises(UsageError, match="not under"):
        app.build(root, root.parent / "c.h5")


def test_ui_as_json_tells_the_address_before_it_waits(root, capsys, monkeypatch):
    told = []

    def wait():
        told.append(capsys.readouterr())
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_wait", wait)
    monkeypatch.setattr(app, "launch", lambda *_: "http://x/")
    assert cli.main(["ui", "--root", str(root), "--json"]) == 130
    assert json.loads(told[0].out) == {"address": "http://x/", "root": str(root.resolve())}
    assert capsys.readouterr().out == "", "one document"
    assert cli.main(["ui", "--root", str(root)]) == 130
    assert told[1].out == "" and "http://x/" in told[1].err


def test_programs_get_traces_numbers_and_figures(root):
    page = app.build(root)
    try:
        url = app.launch(page)
        assert int(url.rsplit(":")[-1].strip("/")) >= FIRST_PORT
        client = Client(url, verbose=False)
        assert sorted(client.predict(api_name="/list_traces")) == ["a.h5", "b.h5"]
        found = client.predict("a.h5", arm="encoder", api_name="/divergence_map")
        assert found["cuts"] == list(CUTS) and found["layers"] == ["0", "1", "2", "3"]
        assert found["value"][0][4] < 1e-9 < found["value"][3][4] and found["class"][3][4] in ("design", "flip")
        figure = Figure(client.predict("a.h5", "position-layer", cut=24, api_name="/figure"))
        assert figure.layout.meta["cut"] == 24
        for wrong in ({"arm": "encodr"}, {"metric": "kl"}, {"point": "x"}, {"region": "x"}):
            with pytest.raises(Exception, match=r"unknown|valid|no .* named|did you mean"):
                client.predict("a.h5", **wrong, api_name="/divergence_map")
        with pytest.raises(Exception, match="no such trace") as error:
            client.predict("../../etc/passwd", api_name="/divergence_map")
        assert str(root) not in str(error.value)
        named = client.view_api(return_format="dict")["named_endpoints"]
        assert set(named) == {"/list_traces", "/divergence_map", "/figure"}, "the page's own events are not offered"
    finally:
        page.close()


def test_browsing_stays_quick_while_a_verdict_is_worked_out(root, monkeypatch):
    """One visitor's slow work must not keep another waiting."""
    import threading

    from replayscope.ui import tab_overview

    visitor, release = Visitor(root), threading.Event()
    monkeypatch.setattr(tab_overview, "described", lambda library, name: release.wait(20) and {})
    slow = threading.Thread(target=visitor.act.describe, args=("a.h5",))
    slow.start()
    began = time.monotonic()
    visitor.do(cut=1)
    assert time.monotonic() - began < 2 and slow.is_alive()
    release.set()
    slow.join()


def test_a_large_map_opens_and_moves_quickly(tmp_path):
    """Of 40 layers and 256 cuts, in time of the processor, which other programs do not lengthen: the server's part of
    1.5 s from opening to the first figure and of 0.3 s from a slider to the new one; the rest is the browser's."""
    cuts = range(0, 2048, 8)
    runs = [RunInfo(i, "encoder", "paper", cut, 128, max(0, cut - 128), 2048, 2048, 128) for i, cut in enumerate(cuts)]
    buckets = bucket_names(2048)
    sums = np.random.default_rng(0).uniform(1, 2, (len(runs), 40, len(buckets)))
    arrays = {name: sums * (i + 1) for i, name in enumerate(("elements", "diff2", "ref2", "arm2", "dot"))}
    counts = {"n": np.ones(sums.shape, np.int64), "nonfinite": np.zeros(sums.shape, np.int64)}
    with TraceWriter(tmp_path / "large.h5") as out:
        out.header(config={}, provenance={}, tokens=Tokens(np.arange(2048), [str(i) for i in range(2048)]))
        out.runs(runs)
        out.table("full", "window_kv", Table("state", buckets, counts | arrays))
    act = Session(Library(tmp_path), "", app.TABS, PARTS)
    began = time.process_time()
    seen, _, *values = act.start("?trace=large.h5")
    opened = time.process_time() - began
    assert opened < 0.75 and len(values[PARTS.index("overview_cut")]) < 2_000_000
    given = {name: getattr(seen.choice, name) for name in (*controls.MENUS, *controls.SLIDERS)}
    took = []
    for column in (40, 90, 200):
        began = time.process_time()
        seen, _, *values = act.draw(seen, "overview", **{**given, "cut": column}, event=gr.EventData(None, None))
        took.append(time.process_time() - began)
        assert seen.choice.cut == column * 8 and values[PARTS.index("overview_cut")] == gr.skip()
    assert min(took) < 0.15, took


def test_without_a_password_nothing_is_answered(root):
    page = app.build(root)
    try:
        url = app.launch(page, auth=[("ann", "secret")])
        for path in ("config", "gradio_api/info", "gradio_api/queue/join"):
            assert httpx.request("POST" if "queue" in path else "GET", url + path).status_code in (401, 422)
        assert "a.h5" not in httpx.get(url).text
        with httpx.Client() as visitor:
            assert visitor.post(url + "login", data={"username": "ann", "password": "wrong"}).status_code == 400
            assert visitor.post(url + "login", data={"username": "ann", "password": "secret"}).status_code == 200
            assert visitor.get(url + "config").status_code == 200
    finally:
        page.close()
