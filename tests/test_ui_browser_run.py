"""In a real browser: a sweep from the form with its cost, its progress and its end, a cancelled one, and exports."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browsing import Watched, choose, drawn, open_tab, wait_text, wait_title
from tests.synthetic import synthetic_trace

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("traces") / ".hidden"
    root.mkdir()
    return root


@pytest.fixture(scope="module")
def url(root) -> Iterator[str]:
    from replayscope.ui import app

    page = app.build(root)
    yield app.launch(page)
    page.close()


def test_a_sweep_from_an_empty_folder_to_its_verdict_and_one_that_is_cancelled(browser, watched, url, root):
    """Through reloads, which show a visitor's own run again and nobody else's."""
    page = watched.open(url)
    wait_text(page, "#rs-note", "No traces here yet")
    open_tab(page, "Run")
    wait_text(page, "#rs-run-progress", "Nothing runs")
    page.locator("#rs-run-tokens textarea").fill("lots")
    page.locator("#rs-run-go").click()
    wait_text(page, "#rs-run-progress", "tokens 'lots'")
    page.locator("#rs-run-tokens textarea").fill("48")
    page.locator("#rs-run-ask").click()
    wait_text(page, "#rs-run-progress", "The cost")
    assert "MB" in page.locator("#rs-run-progress").inner_text() and list(root.iterdir()) == []

    page.locator("#rs-run-go").click()
    page.wait_for_selector(".rs-progress")
    wait_text(page, "#rs-run-progress", "Open run-1.h5")
    page.reload()
    drawn(page, "rs-cut-map")  # until then the page opens at the tab of its address
    open_tab(page, "Run")
    wait_text(page, "#rs-run-progress", "Open run-1.h5")
    assert page.locator("#rs-run-name textarea, #rs-run-name input").first.input_value() == "run-2"
    page.get_by_role("link", name="Open run-1.h5").click()
    wait_title(page, "rs-cut-map", "Encoder replay")
    page.wait_for_selector(".rs-verdict")

    open_tab(page, "Run")
    page.locator("#rs-run-tokens textarea").fill("2000")
    page.locator("#rs-run-cuts textarea").fill("all")
    page.locator("#rs-run-go").click()
    page.wait_for_selector(".rs-progress")
    open_tab(page, "Cut × layer")
    drawn(page, "rs-cut-large")
    page.reload()
    drawn(page, "rs-cut-large")
    open_tab(page, "Run")
    page.wait_for_selector(".rs-progress")
    stranger = Watched(browser)
    other = drawn(stranger.open(url), "rs-cut-map")
    open_tab(other, "Run")
    wait_text(other, "#rs-run-progress", "1 run of other windows")
    assert (
        other.locator("#rs-run-cancel").is_disabled() and "run-2" not in other.locator("#rs-run-progress").inner_text()
    )
    stranger.close()
    page.locator("#rs-run-cancel").click()
    wait_text(page, "#rs-run-progress", "Cancelled")
    assert [path.name for path in root.iterdir()] == ["run-1.h5"]


def saved(page, name: str, kind: str, folder: Path) -> bytes:
    """Makes a file on the tab Export and saves it."""
    choose(page, "export-figure", name)
    choose(page, "export-format", kind)
    page.locator("#rs-export-make").click()
    ending = f"{name}.{kind}"
    wait_text(page, "#rs-export-file", ending)
    with page.expect_download() as download:
        page.locator("#rs-export-file").click()
    assert download.value.suggested_filename.endswith(ending)
    target = folder / ending
    download.value.save_as(target)
    return target.read_bytes()


def test_every_format_is_exported_and_can_be_read(watched, url, root, tmp_path):
    synthetic_trace(root / "a.h5", n_tokens=64, window=8, layers=4, cuts=(4, 8, 24, 40))
    page = watched.open(f"{url}?tab=export&trace=a.h5&cut=24")
    page.wait_for_selector(".rs-address")
    numbers = json.loads(saved(page, "cut-layer", "json", tmp_path))
    rows = list(csv.reader(io.StringIO(saved(page, "cut-layer", "csv", tmp_path).decode())))
    assert len(rows) == 1 + len(numbers["rows"]) and rows[0] == numbers["columns"]
    assert saved(page, "position-layer", "png", tmp_path).startswith(b"\x89PNG")
    assert b"<svg" in saved(page, "position-layer", "svg", tmp_path)[:400]
    assert saved(page, "position-layer", "pdf", tmp_path).startswith(b"%PDF")
    assert b"<!doctype html>" in saved(page, "report", "html", tmp_path)[:40]
    choose(page, "export-format", "csv")
    page.locator("#rs-export-make").click()
    wait_text(page, "#rs-export-said", "the report is one html file")
    assert str(root) not in page.content()
    report = watched.open((tmp_path / "report.html").as_uri())
    report.wait_for_selector("body[data-drawn]")
