"""What programs are told of arguments that are wrong, and what no visitor can leave on the disk of the server."""

import gradio as gr
import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from replayscope.ui import app, figures
from tests.conftest import LOOPS
from tests.synthetic import synthetic_trace
from tests.visitor import CUTS

pytestmark = LOOPS
SIX = ["a.h5", "", "window_kv", "rel_l2", "window", "full"]
FILE = {"path": "http://127.0.0.1:9/x", "meta": {"_type": "gradio.FileData"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where Gradio would keep what it is sent."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("traces")
    synthetic_trace(root / "a.h5", n_tokens=64, window=8, layers=2, cuts=CUTS)
    synthetic_trace(root / "many.h5", n_tokens=64, window=8, layers=2, cuts=range(30, 60))
    return root


def serving(root, files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(files))
        page = app.build(root)
        yield app.launch(page)
        page.close()


@pytest.fixture(scope="module")
def url(root, files):
    yield from serving(root, files)


@pytest.fixture(scope="module")
def client(url):
    return Client(url, verbose=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cut": 31}, "unknown cut 31 of encoder; valid: 4, 8, 9, 24, 40, 50, 63$"),
        ({"cut": -2}, "unknown cut -2 of encoder"),
        ({"cut": 31, "name": "position-layer"}, "unknown cut 31 of encoder"),
        ({"cut": "24"}, "^cut must be a whole number, not '24'"),
        ({"cut": 24.5}, "^cut must be a whole number, not 24.5"),
        ({"cut": True}, "^cut must be a whole number, not True"),
        ({"name": "cut-layr"}, "unknown figure 'cut-layr'; did you mean 'cut-layer'"),
        ({"name": 5}, "^name must be text, not 5"),
        ({"arm": ["encoder"]}, "^arm must be text, not"),
        ({"arm": "encodr"}, "unknown arm 'encodr'; did you mean 'encoder'"),
        ({"arm": "x" * 5_000_000}, "unknown arm 'xxx"),
        ({"point": "x"}, "unknown point 'x'"),
        ({"metric": "x"}, "unknown metric 'x'|unknown metric .* 'x'"),
        ({"region": "x"}, "unknown region 'x'"),
        ({"reference": "x"}, "unknown reference 'x'"),
        ({"cut": 24, "name": "cut-layer"}, "figure cut-layer has no cut to choose; leave it out"),
        ({"region": "window", "name": "position-layer"}, "figure position-layer has no region to choose"),
        ({"arm": "encoder", "name": "logits-kl"}, "figure logits-kl has no arm to choose"),
    ],
)
def test_a_wrong_argument_of_a_figure_is_named_with_what_there_is(client, given, says):
    with pytest.raises(Exception, match=says) as error:
        client.predict("a.h5", **given, api_name="/figure")
    said = str(error.value)
    assert "no answer can be made" not in said and len(said) < 400 and "\n" not in said


@pytest.mark.parametrize("what", ["trace", "arm", "point", "metric", "region", "reference"])
def test_a_wrong_argument_of_the_numbers_is_not_blamed_on_the_trace(client, what):
    for value in (5, None, ["x"]):
        with pytest.raises(Exception, match=f"^{what} must be text, not "):
            client.predict(**{"trace": "a.h5", what: value}, api_name="/divergence_map")
    if what in ("point", "metric", "region"):
        with pytest.raises(Exception, match=f"{what} is empty; name one"):
            client.predict("a.h5", **{what: ""}, api_name="/divergence_map")


def test_of_many_cuts_the_first_are_listed(client):
    with pytest.raises(Exception, match=r"unknown cut 7 of encoder; valid: 30, 31, .*, 49 and 10 more, up to 59$"):
        client.predict("many.h5", "position-layer", cut=7, api_name="/figure")


def test_every_figure_that_the_trace_has_is_drawn_without_more_than_its_name(client):
    """A figure's own metric and hook point stand where none is named. What is refused is not recorded."""
    for name in figures.FIGURES:
        try:
            assert client.predict("a.h5", name, api_name="/figure")["data"], name
        except AppError as error:
            assert "record" in str(error), (name, error)
    assert client.predict("a.h5", "logits-kl", metric="js", api_name="/figure")["data"]


def called(url, name, data):
    """The answer to values as raw JSON, which no client has checked or filled in."""
    asked = httpx.post(f"{url}gradio_api/call/{name}", json={"data": data})
    return httpx.get(f"{url}gradio_api/call/{name}/{asked.json()['event_id']}", timeout=30).text


def test_values_that_were_left_out_are_named(url):
    assert "divergence_map takes 6 values, trace, arm, point, " in called(url, "divergence_map", ["a.h5"])
    assert "event: complete" in called(url, "divergence_map", SIX)


WRITES = (
    ("POST", "upload", {"files": {"files": ("x.txt", b"hello")}}),
    ("POST", "upload/", {"files": {"files": ("x.txt", b"hello")}}),
    ("POST", "process_recording", {"files": {"video": ("x.mp4", b"hello")}}),
    ("GET", "deep_link", {"params": {"session_hash": "x"}}),
    ("GET", "file=http://127.0.0.1:9/x", {}),
)


def sent(url):
    """Status of each request that would leave a file, or fetch one."""
    return [httpx.request(how, f"{url}gradio_api/{path}", timeout=30, **more).status_code for how, path, more in WRITES]


def kept(files):
    return [path for path in files.rglob("*") if path.is_file()]


def test_no_visitor_leaves_a_file_on_the_server_or_has_it_fetch_one(url, files):
    assert sent(url) == [403] * len(WRITES)
    for value in (FILE, [FILE], {"x": [FILE]}, FILE | {"meta": 5}, deep(100)):
        assert "this page takes no files" in called(url, "divergence_map", [value, *SIX[1:]])
    assert kept(files) == []


def deep(levels):
    return [deep(levels - 1)] if levels else FILE


def test_without_the_check_files_would_be_kept_and_addresses_asked(root, tmp_path, monkeypatch):
    """The twin: what refuses them is the check."""
    asked = []

    async def fetch(address, **_):
        asked.append(address)
        return str(tmp_path)

    monkeypatch.setattr("gradio.processing_utils.async_ssrf_protected_download", fetch)
    monkeypatch.setattr("replayscope.ui.uploads._asks_for_file", lambda path: False)
    monkeypatch.setattr(app, "Blocks", gr.Blocks)
    (tmp_path / "kept").mkdir()
    for url in serving(root, tmp_path / "kept"):
        assert sent(url)[:2] == [200, 307] and len(kept(tmp_path / "kept")) >= 1
        called(url, "divergence_map", [FILE, *SIX[1:]])
        assert asked == [FILE["path"]]
