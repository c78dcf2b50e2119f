"""The page, the report and an exported figure in a real browser: what a reader sees, clicks and never hears of."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import h5py
import pytest

from replayscope.ui.export import export
from replayscope.ui.report import report
from tests import judging
from tests.browsing import (
    CARD,
    DARK,
    LIGHT,
    WITHIN,
    Watched,
    choose,
    click_cell,
    drawn,
    heading,
    open_tab,
    wait_text,
    wait_title,
)
from tests.synthetic import synthetic_trace

CUTS = (4, 8, 9, 24, 40, 50, 63)
MENUS = ("arm", "reference", "point", "region", "metric")

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

    page = app.build(root, root / "a.h5")
    yield app.launch(page)
    page.close()


def shown(page) -> dict[str, str]:
    """What the address says that the page shows."""
    return {key: values[0] for key, values in parse_qs(urlparse(page.url).query).items()}


def test_open_move_the_slider_click_a_cell(watched, url):
    page = drawn(watched.open(url), "rs-position-map")
    assert "changes the window KV from layer 1 on: median" in heading(page, "rs-cut-map")
    assert "Encoder replay at cut 40" in heading(page, "rs-position-map")
    page.wait_for_selector(".rs-verdict")
    assert "a.h5 · synthetic · N 64 · W 8 · paper" in page.locator(".rs-header").inner_text()
    assert page.locator("#rs-cut-map .rs-key span").count() >= 2
    assert page.evaluate(WITHIN), "nothing overflows sideways"
    assert shown(page)["trace"] == "a.h5" and shown(page)["cut"] == "40" and shown(page)["tab"] == "overview"

    slider = page.locator("#rs-cut input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    wait_title(page, "rs-position-map", "at cut 50")
    wait_text(page, "#rs-cut", "cut H = 50")
    marked = "document.querySelector('#rs-cut-map .rs-plot').layout.shapes.filter((s) => s.type === 'rect')"
    assert set(page.evaluate(f"{marked}.map((s) => s.x0)")) == {4.5}, "the chosen column and its cell are outlined"
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    wait_title(page, "rs-position-map", "at cut 4:")
    time.sleep(0.5)
    assert "at cut 4:" in heading(page, "rs-position-map"), "the last move is the one that stays"

    hover = click_cell(page, "rs-cut-map", 5.5 / 7, 0.6)
    assert "H 50" in hover and "layer 2" in hover and "floor" in hover and "n 8" in hover
    wait_title(page, "rs-position-map", "at cut 50")
    page.wait_for_function("document.querySelector('#rs-cut input[type=range]').value === '5'")
    assert shown(page)["cut"] == "50" and shown(page)["layer"] == "2"


def test_every_tab_follows_the_choice_and_the_address(watched, url):
    page = watched.open(f"{url}?tab=cut&trace=a.h5&arm=hit&point=hidden&cut=24&layer=1&position=30")
    drawn(page, "rs-cut-large")
    assert "hit with its window kept" in heading(page, "rs-cut-large") and "hidden" in heading(page, "rs-cut-large")
    assert heading(page, "rs-cut-cell") == "H 24 · layer 1" and page.title() == "a.h5 · ReplayScope"
    choose(page, "arm", "encoder")
    wait_title(page, "rs-cut-large", "Encoder replay")
    click_cell(page, "rs-cut-large", 4.5 / 7, 0.9)
    wait_title(page, "rs-cut-cell", "H 40 · layer 3")

    open_tab(page, "Position × layer")
    drawn(page, "rs-position-large")
    click_cell(page, "rs-position-large", 0.5, 0.4)
    wait_title(page, "rs-position-cell", "layer 1")
    assert int(shown(page)["position"]) in range(40, 60) and shown(page)["tab"] == "position"

    open_tab(page, "Replay length")
    wait_text(page, "#rs-replay-hint", "one replay length")
    drawn(page, "rs-reach")

    open_tab(page, "Logits")
    drawn(page, "rs-logits-suffix")
    wait_text(page, "#rs-top", "record it with --hooks")
    page.locator("#rs-cut input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    wait_title(page, "rs-logits-suffix", "at cut 24")
    page.locator("#rs-strip [data-position='30']").click()
    wait_title(page, "rs-top", "What follows position 30")
    page.wait_for_selector("#rs-strip .chosen[data-position='30']")

    open_tab(page, "Tensor")
    drawn(page, "rs-tensor-rows")
    assert "position 30" in heading(page, "rs-tensor-layers")

    open_tab(page, "Compare")
    choose(page, "other_arm", "oracle:encoder")
    wait_title(page, "rs-second", "oracle:encoder")
    drawn(page, "rs-difference")
    assert shown(page)["other_arm"] == "oracle:encoder"

    address = page.url
    page.reload()
    wait_title(page, "rs-second", "oracle:encoder")
    assert page.url == address, "an address that is opened again shows the same view"


def test_a_judgement_its_figures_and_another_contract(watched, tmp_path):
    from replayscope.ui import app

    made = judging.results(judging.contract(), lambda group, run, i: judging.good(group, run, i) | (
        {"exact": i >= 10} if run == "both/paper/task" else {}
    ))  # fmt: skip
    judging.write(tmp_path / "r.jsonl", made)
    (tmp_path / "strict.toml").write_text(judging.CONTRACT.replace("at_most = 0.1", "at_most = 0.001"))
    served = app.build(tmp_path)
    try:
        page = watched.open(f"{app.launch(served)}?tab=judge")
        wait_text(page, "#rs-judge-story", "Accept decoder replay only")
        drawn(page, "rs-judge-drop")
        drawn(page, "rs-judge-kl")
        assert "2 cells of 14 drop by more than the budget" in heading(page, "rs-judge-drop")
        assert page.locator("#rs-judge-details .rs-command").first.inner_text().startswith("replayscope judge run")
        assert page.evaluate(WITHIN) and shown(page) == {**shown(page), "tab": "judge", "results": "r.jsonl"}
        choose(page, "contract", "strict.toml")
        wait_text(page, "#rs-judge-story", "it may know their outcome")
        assert shown(page)["contract"] == "strict.toml"
        page.set_viewport_size({"width": 400, "height": 900})
        assert page.evaluate(WITHIN)
    finally:
        served.close()


def test_menus_fit_the_trace_and_redraw(watched, url):
    page = drawn(watched.open(url), "rs-position-map")
    choose(page, "arm", "broken:floor@2")
    wait_title(page, "rs-cut-map", "planted fault floor@2")
    choose(page, "reference", "its oracle")
    wait_text(page, "#rs-cut-map p", "against its oracle")
    choose(page, "point", "logits")
    wait_text(page, "#rs-cut-map p", "of the logits")
    choose(page, "metric", "KL(reference‖arm), nats")
    page.wait_for_function("document.querySelector('#rs-cut-map p').textContent.startsWith('KL(reference‖arm)')")
    choose(page, "trace", "b.h5")
    wait_title(page, "rs-position-map", "at cut 30")
    wait_text(page, ".rs-header", "b.h5")


def test_a_slow_verdict_of_another_trace_is_dropped(watched, url, monkeypatch):
    from replayscope.ui import tab_overview

    told = tab_overview.described

    def slow(library, name):
        time.sleep(2 if name == "a.h5" else 0)
        return told(library, name)

    monkeypatch.setattr(tab_overview, "described", slow)
    page = drawn(watched.open(f"{url}?trace=a.h5"), "rs-position-map")
    choose(page, "trace", "b.h5")
    wait_title(page, "rs-position-map", "at cut 30")
    page.wait_for_selector(".rs-verdict")
    first = page.locator("#rs-story").inner_html()
    time.sleep(2.5)
    assert page.locator("#rs-story").inner_html() == first and "b.h5" in page.locator(".rs-header").inner_text()


def test_dark_narrow_and_two_visitors(browser, url):
    dark = Watched(browser, color_scheme="dark", viewport={"width": 400, "height": 900})
    page = drawn(dark.open(url), "rs-position-map")
    assert page.evaluate(CARD) == DARK
    paper = "document.querySelector('#rs-cut-map .rs-plot')._fullLayout.paper_bgcolor"
    assert page.evaluate(paper) == "#161b1f"
    first, second = (page.locator(f"#rs-{name}-map").bounding_box() for name in ("cut", "position"))
    assert second["y"] >= first["y"] + first["height"] - 1, "one below the other"
    for title in ("Cut × layer", "Logits", "Run", "Export", "Overview"):
        open_tab(page, title)
        page.wait_for_function("!document.body.classList.contains('rs-waiting')")
        assert page.evaluate(WITHIN), f"{title} overflows sideways"
    page.get_by_role("button", name="light", exact=True).click()
    page.wait_for_function(f"{CARD} === '{LIGHT}'")
    page.wait_for_function(f"{paper} === '#ffffff'")

    wide = Watched(browser, viewport={"width": 1920, "height": 1000})
    other = drawn(wide.open(url), "rs-position-map")
    choose(page, "arm", "hit")
    wait_title(page, "rs-cut-map", "A hit with its window kept")
    choose(other, "point", "hidden state")
    wait_title(other, "rs-cut-map", "hidden state")
    assert "Encoder replay" in heading(other, "rs-cut-map"), "two visitors do not see each other's choices"
    assert other.evaluate(WITHIN)
    dark.close()
    wide.close()


def nothing_but_one_line(page, name: str, root: Path) -> str:
    """Waits until only the line about a trace is left, and checks that nothing of another one is."""
    wait_text(page, "#rs-note", name)
    page.wait_for_function("[...document.querySelectorAll('.rs-figure')].every((figure) => figure.hidden)")
    assert page.locator(".rs-figure .main-svg").count() == 0, "no figure waits behind the page"
    assert set(page.locator(".rs-figure h2, .rs-figure p").all_text_contents()) == {""}
    page.wait_for_function("document.querySelectorAll('table, .rs-verdict, .rs-tiles, dl').length === 0")
    assert page.locator(".rs-header .mono").inner_text() == ""
    for name_ in ("cut", "layer", "position"):
        assert not page.locator(f"#rs-{name_}").is_visible()
    for menu in MENUS:
        assert page.locator(f"#rs-{menu} input").input_value() == ""
    said = page.locator("#rs-note .rs-empty").inner_text()
    content = page.content()
    assert str(root) not in content and "Traceback" not in content and page.locator(".toast-body").count() == 0
    assert "\n" not in said.strip()
    return said


def test_a_file_that_cannot_be_shown_leaves_one_line_and_nothing_else(watched, url, root, capfd):
    (root / "foreign.h5").write_bytes(b"no trace at all")
    with h5py.File(root / "other.h5", "w") as file:
        file["fields"] = [1, 2, 3]
    for name in ("shapes.h5", "gone.h5"):
        shutil.copy(root / "a.h5", root / name)
    with h5py.File(root / "shapes.h5", "r+") as file:
        for array in ("n", "diff2"):
            values = file["divergence/full/window_kv"][array][()]
            del file["divergence/full/window_kv"][array]
            file["divergence/full/window_kv"][array] = values[:-1]
    reasons = {"foreign.h5": "HDF5", "other.h5": "not a ReplayScope trace", "shapes.h5": "/divergence/full/window_kv"}
    try:
        page = drawn(watched.open(f"{url}?trace=b.h5"), "rs-position-map")
        for name, why in reasons.items():
            page.wait_for_selector(".rs-verdict")
            choose(page, "trace", name)
            assert why in nothing_but_one_line(page, name, root)
            assert page.locator("#rs-trace input").input_value() == name
            choose(page, "trace", "b.h5")
            wait_title(page, "rs-position-map", "at cut 30")
            drawn(page, "rs-cut-map")
        choose(page, "trace", "gone.h5")
        wait_text(page, ".rs-header", "gone.h5")
        (root / "gone.h5").unlink()
        click_cell(page, "rs-cut-map", 5.5 / 7, 0.5)
        assert "not there any more" in nothing_but_one_line(page, "gone.h5", root)
        assert page.locator("#rs-trace input").input_value() == "", "what is gone is not chosen"
    finally:
        for name in (*reasons, "gone.h5"):
            (root / name).unlink(missing_ok=True)
    assert "Traceback" not in capfd.readouterr().err


def test_a_verdict_that_cannot_be_told_leaves_the_maps(watched, url, root, capfd):
    shutil.copy(root / "a.h5", root / "verdict.h5")
    with h5py.File(root / "verdict.h5", "r+") as file:
        del file["divergence/oracle/final/ref2"]
    try:
        page = drawn(watched.open(f"{url}?trace=verdict.h5"), "rs-position-map")
        wait_text(page, "#rs-story", "/divergence/oracle/final")
        assert str(root) not in page.content() and page.locator("#rs-cut-map .main-svg").count() > 0
    finally:
        (root / "verdict.h5").unlink()
    assert "Traceback" not in capfd.readouterr().err


def test_the_report_is_drawn_offline_and_printed_light(watched, root, tmp_path):
    out = report(root / "a.h5", tmp_path / "r.html")
    page = watched.open(out.as_uri())
    page.wait_for_selector("body[data-drawn]")
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
    text = page.evaluate("document.querySelector('.rs-plot').data[0].text[3][4]")
    value = first[said["columns"].index("value")]
    assert f"<br>{value:.3g}, n " in text and "must be exact" not in text
    assert page.locator(".modebar-btn").count() == 0, "no button of Plotly's own, one of which uploads the figure"
