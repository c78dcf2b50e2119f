"""The page, the report and an exported figure in a real browser: what a reader sees, clicks and never hears of."""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from replayscope.inspector.errors import UsageError
from replayscope.ui.export import export
from replayscope.ui.report import report
from tests.synthetic import synthetic_trace

CUTS = (4, 8, 9, 24, 40, 50, 63)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()  # fmt: skip
CARD = "getComputedStyle(document.querySelector('.rs-card')).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 27, 31)"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("traces") / ".hidden"
    root.mkdir()
    synthetic_trace(root / "a.h5", n_tokens=64, window=8, layers=4, cuts=CUTS)
    synthetic_trace(root / "b.h5", n_tokens=48, window=8, layers=3, cuts=(24, 30))
    return root


@pytest.fixture(scope="module")
def url(root) -> Iterator[str]:
    from replayscope.ui import app

    blocks = app.build(root, root / "a.h5")
    yield app.launch(blocks)
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def browser(chromium):
    sync_api = pytest.importorskip("playwright.sync_api", reason="browser tests need the package playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


class Watched:
    """A page that remembers every complaint and every request to another host."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport=options.pop("viewport", {"width": 1366, "height": 900}), **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)

    def _request(self, request) -> None:
        if not re.match(r"(http://127\.0\.0\.1|http://localhost|file:|data:|blob:)", request.url):
            self.complaints.append(f"asked {request.url}")

    def open(self, address: str):
        self.page.goto(address)
        return self.page


@pytest.fixture
def watched(browser) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    made.context.close()
    assert made.complaints == []


def ready(page, path: str = "#rs-position-map"):
    page.wait_for_selector(f"{path} .main-svg")
    return page


def heading(page, place: str) -> str:
    return page.locator(f"#{place} h2").inner_text()


def wait_title(page, place: str, words: str) -> None:
    page.wait_for_function(
        "([place, words]) => document.querySelector(`#${place} h2`).textContent.includes(words)", arg=[place, words]
    )


def choose(page, menu: str, words: str) -> None:
    page.locator(f"#rs-{menu} input").click()
    page.get_by_role("option", name=words, exact=True).click()


def test_the_page_opens_with_the_picture(watched, url):
    page = ready(watched.open(url))
    assert "changes the window KV from layer 1 on: median" in heading(page, "rs-cut-map")
    assert "Encoder replay at cut 40" in heading(page, "rs-position-map")
    page.wait_for_selector(".rs-verdict")
    ready(page, "#rs-logits")
    assert "a.h5 · synthetic · N 64 · W 8 · paper" in page.locator(".rs-header").inner_text()
    assert "identical" not in page.locator("footer").all_inner_texts()
    assert page.locator("#rs-cut-map .rs-key span").count() >= 2
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing overflows sideways"


def test_the_slider_moves_the_cut(watched, url):
    page = ready(watched.open(url))
    slider = page.locator("#rs-cut input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    wait_title(page, "rs-position-map", "at cut 50")
    assert "cut H = 50" in page.locator("#rs-cut").inner_text()
    marked = "document.querySelector('#rs-cut-map .rs-plot').layout.shapes.at(-1).x0"
    assert page.evaluate(marked) == 4.5, "the chosen column is outlined"
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    wait_title(page, "rs-position-map", "at cut 4:")
    time.sleep(0.5)
    assert "at cut 4:" in heading(page, "rs-position-map"), "the last move is the one that stays"


def test_menus_fit_the_trace_and_redraw(watched, url):
    page = ready(watched.open(url))
    choose(page, "arm", "broken:floor@2")
    wait_title(page, "rs-cut-map", "planted fault floor@2")
    choose(page, "compared", "its oracle")
    wait_title(page, "rs-cut-map", "floor@2")
    choose(page, "hook", "logits")
    page.wait_for_function("document.querySelector('#rs-cut-map p').textContent.includes('of the logits')")
    choose(page, "metric", "KL(reference‖arm), nats")
    page.wait_for_function("document.querySelector('#rs-cut-map p').textContent.startsWith('KL(reference‖arm)')")
    choose(page, "trace", "b.h5")
    wait_title(page, "rs-position-map", "at cut 30")
    page.wait_for_function("document.querySelector('.rs-header').textContent.includes('b.h5')")


def test_a_click_on_a_cell_selects_its_cut(watched, url):
    page = ready(watched.open(url))
    box = page.locator("#rs-cut-map .nsewdrag").first.bounding_box()
    at = box["x"] + box["width"] * 5.5 / 7, box["y"] + box["height"] / 2
    page.mouse.move(*at)
    page.wait_for_selector("#rs-cut-map .hovertext")
    hover = page.locator("#rs-cut-map .hovertext").text_content()
    assert "H 50" in hover and "relative L2" in hover and "floor" in hover and "8 rows" in hover
    page.mouse.click(*at)
    wait_title(page, "rs-position-map", "at cut 50")
    page.wait_for_function("document.querySelector('#rs-cut input[type=range]').value === '5'")


def test_dark_follows_the_system_and_the_button(browser, url):
    watched = Watched(browser, color_scheme="dark")
    page = ready(watched.open(url))
    assert page.evaluate(CARD) == DARK
    paper = "document.querySelector('#rs-cut-map .rs-plot')._fullLayout.paper_bgcolor"
    assert page.evaluate(paper) == "#161b1f"
    page.get_by_role("button", name="light", exact=True).click()
    page.wait_for_function(f"{CARD} === '{LIGHT}'")
    page.wait_for_function(f"{paper} === '#ffffff'")
    watched.context.close()
    assert watched.complaints == []


def test_a_narrow_window_stacks_and_does_not_overflow(browser, url):
    watched = Watched(browser, viewport={"width": 420, "height": 900})
    page = ready(watched.open(url))
    first, second = (page.locator(f"#rs-{name}-map").bounding_box() for name in ("cut", "position"))
    assert second["y"] >= first["y"] + first["height"] - 1
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    watched.context.close()
    assert watched.complaints == []


def test_two_visitors_do_not_see_each_others_choices(browser, url):
    one, two = Watched(browser), Watched(browser)
    first, second = ready(one.open(url)), ready(two.open(url))
    choose(first, "arm", "hit")
    wait_title(first, "rs-cut-map", "A hit with its window kept")
    choose(second, "hook", "hidden state")
    wait_title(second, "rs-cut-map", "hidden state")
    assert "Encoder replay" in heading(second, "rs-cut-map")
    for watched in (one, two):
        watched.context.close()
        assert watched.complaints == []


def nothing_but_one_line(page, name: str, root: Path) -> str:
    """Waits until only the line about a trace is left, and checks that nothing of another one is."""
    page.wait_for_function(
        "name => (document.querySelector('#rs-summary .rs-empty') || {}).textContent?.includes(name)", arg=name
    )
    page.wait_for_function("[...document.querySelectorAll('.rs-figure')].every((figure) => figure.hidden)")
    assert page.locator(".rs-figure .main-svg").count() == 0, "no figure waits behind the page"
    assert page.locator(".rs-figure h2, .rs-figure p").all_text_contents() == [""] * 6
    assert page.locator("table").count() == 0 and page.locator(".rs-verdict, .rs-tiles, dl").count() == 0
    assert page.locator(".rs-header .mono").inner_text() == ""
    assert not page.locator("#rs-cut").is_visible()
    for menu in ("arm", "compared", "hook", "region", "metric"):
        assert page.locator(f"#rs-{menu} input").input_value() == ""
    said = page.locator("#rs-summary .rs-empty").inner_text()
    content = page.content()
    assert str(root) not in content and "Traceback" not in content and page.locator(".toast-body").count() == 0
    assert "\n" not in said.strip()
    return said


def test_a_file_that_cannot_be_shown_leaves_one_line_and_nothing_else(watched, url, root, capfd):
    (root / "foreign.h5").write_bytes(b"no trace at all")
    with h5py.File(root / "other.h5", "w") as file:
        file["fields"] = [1, 2, 3]
    for name in ("shapes.h5", "verdict.h5"):
        shutil.copy(root / "a.h5", root / name)
    with h5py.File(root / "shapes.h5", "r+") as file:
        for array in ("n", "diff2"):
            values = file["divergence/full/window_kv"][array][()]
            del file["divergence/full/window_kv"][array]
            file["divergence/full/window_kv"][array] = values[:-1]
    with h5py.File(root / "verdict.h5", "r+") as file:
        del file["divergence/oracle/final/ref2"]
    reasons = {"foreign.h5": "HDF5", "other.h5": "not a ReplayScope trace", "shapes.h5": "/divergence/full/window_kv",
               "verdict.h5": "/divergence/oracle/final"}  # fmt: skip
    try:
        page = ready(watched.open(url))
        for name, why in reasons.items():
            page.wait_for_selector(".rs-verdict")
            ready(page, "#rs-logits")
            choose(page, "trace", name)
            assert why in nothing_but_one_line(page, name, root)
            assert page.locator("#rs-trace input").input_value() == name
            choose(page, "trace", "b.h5")
            wait_title(page, "rs-position-map", "at cut 30")
            ready(page, "#rs-cut-map")
    finally:
        for name in reasons:
            (root / name).unlink(missing_ok=True)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("event", ["menu", "slider", "click"])
def test_a_file_that_is_deleted_while_it_is_open(watched, url, root, capfd, event):
    shutil.copy(root / "a.h5", root / "gone.h5")
    page = ready(watched.open(url))
    choose(page, "trace", "gone.h5")
    page.wait_for_function("document.querySelector('.rs-header').textContent.includes('gone.h5')")
    page.wait_for_selector(".rs-verdict")
    ready(page, "#rs-logits")
    (root / "gone.h5").unlink()
    if event == "menu":
        choose(page, "hook", "hidden state")
    elif event == "slider":
        page.locator("#rs-cut input[type=range]").focus()
        page.keyboard.press("ArrowRight")
    else:
        box = page.locator("#rs-cut-map .nsewdrag").first.bounding_box()
        page.mouse.click(box["x"] + box["width"] * 5.5 / 7, box["y"] + box["height"] / 2)
    assert "not there any more" in nothing_but_one_line(page, "gone.h5", root)
    assert page.locator("#rs-trace input").input_value() == "", "what is gone is not chosen"
    choose(page, "trace", "b.h5")
    wait_title(page, "rs-position-map", "at cut 30")
    ready(page, "#rs-logits")
    assert "Traceback" not in capfd.readouterr().err


def test_an_empty_folder_says_what_to_do(browser, tmp_path):
    from replayscope.ui import app

    blocks = app.build(tmp_path)
    watched = Watched(browser)
    try:
        page = watched.open(app.launch(blocks))
        page.wait_for_selector("#rs-summary .rs-empty")
        assert "replayscope sweep" in page.locator("#rs-summary").inner_text()
    finally:
        watched.context.close()
        blocks.close(verbose=False)
    assert watched.complaints == []


def test_a_port_that_is_taken(root):
    from replayscope.ui import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as error:
            app.launch(app.build(root), port=port)
        assert f"port {port} is taken" in str(error.value) and error.value.exit_code == 2


def test_a_trace_outside_the_root_is_refused(root, tmp_path):
    from replayscope.ui import app

    synthetic_trace(tmp_path / "c.h5", n_tokens=48, window=8, layers=3, cuts=(24,))
    with pytest.raises(UsageError, match="not under"):
        app.build(root, tmp_path / "c.h5")
    with pytest.raises(UsageError, match="no folder"):
        app.serve(root=tmp_path / "none")


def test_serve_prints_where_and_picks_the_next_free_port(root, capsys, monkeypatch, url):
    from replayscope.ui import app

    done = threading.Event()
    monkeypatch.setattr(app, "_wait", done.set)
    app.serve(root=root)
    said = capsys.readouterr().err
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)", said)[1])
    assert done.is_set() and port >= app.FIRST_PORT and f":{port}/" not in url


def test_the_report_is_drawn_offline_and_printed_light(watched, root, tmp_path):
    out = report(root / "a.h5", tmp_path / "r.html")
    page = watched.open(out.as_uri())
    page.wait_for_selector("body[data-drawn='5']")
    assert page.locator(".main-svg").count() >= 5 and page.locator(".rs-key span").count() >= 5
    page.get_by_role("button", name="dark").click()
    page.wait_for_function(f"{CARD} === '{DARK}'")
    page.emulate_media(media="print")
    assert page.evaluate(CARD) == LIGHT
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000


def test_an_exported_figure_shows_the_planted_numbers(watched, root, tmp_path):
    (out,) = export(root / "a.h5", "cut-layer", "rel_l2", tmp_path / "a.html")
    (numbers,) = export(root / "a.h5", "cut-layer", "rel_l2", tmp_path / "a.json")
    page = watched.open(out.as_uri())
    page.wait_for_selector("body[data-drawn='1']")
    said = json.loads(numbers.read_text())
    first = next(row for row in said["rows"] if row[0] == 40 and row[1] == 3)
    shown = page.evaluate("document.querySelector('.rs-plot').data[0].text[3][4]")
    assert f"<b>{first[2]:.3g}</b>" in shown and "must be exact" not in shown
