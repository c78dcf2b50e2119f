"""A real browser for tests: a page that remembers every complaint, and the few gestures that tests share."""

import re
from collections.abc import Iterator

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()  # fmt: skip
CARD = "getComputedStyle(document.querySelector('.rs-card')).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 27, 31)"
WITHIN = "document.documentElement.scrollWidth <= window.innerWidth"


def started(chromium: str) -> Iterator[Browser]:
    """A browser for the tests of a module."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


class Watched:
    """A page that remembers every complaint and every request to another host."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport=options.pop("viewport", {"width": 1366, "height": 900}), **options)
        self.page = self.context.new_page()
        # Generous: a shared machine may be many times slower, and what never comes fails all the same.
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)
        self.visits = 0
        self.page.on("framenavigated", self._navigated)

    def _request(self, request) -> None:
        if not re.match(r"(http://127\.0\.0\.1|http://localhost|file:|data:|blob:)", request.url):
            self.complaints.append(f"asked {request.url}")

    def _navigated(self, frame) -> None:
        self.visits += frame == self.page.main_frame

    def open(self, address: str) -> Page:
        self.page.goto(address)
        return self.page

    def close(self) -> None:
        """Raises AssertionError with what the page complained of."""
        self.context.close()
        # A page that is left gives up its streams, and says so: once for each that was left.
        for given_up in ("signal is aborted", "Connection errored out"):
            for complaint in [c for c in self.complaints if given_up in c][: self.visits]:
                self.complaints.remove(complaint)
        assert not self.complaints, self.complaints


def drawn(page: Page, place: str) -> Page:
    """Waits for the figure of a place."""
    page.wait_for_selector(f"#{place} .main-svg")
    return page


def heading(page: Page, place: str) -> str:
    return page.locator(f"#{place} h2").inner_text()


def wait_title(page: Page, place: str, words: str) -> None:
    """Waits until the heading of a place holds some words."""
    page.wait_for_function(
        "([place, words]) => (document.querySelector(`#${place} h2`) || {textContent: ''}).textContent.includes(words)",
        arg=[place, words],
    )


def wait_text(page: Page, place: str, words: str) -> None:
    """Waits until a place says some words."""
    page.wait_for_function(
        "([place, words]) => (document.querySelector(place) || {textContent: ''}).textContent.includes(words)",
        arg=[place, words],
    )


def choose(page: Page, menu: str, words: str) -> None:
    """Picks an option of a menu."""
    page.locator(f"#rs-{menu} input").click()
    page.get_by_role("option", name=words, exact=True).click()


def open_tab(page: Page, title: str) -> None:
    page.get_by_role("tab", name=title, exact=True).click()


def click_cell(page: Page, place: str, across: float, up: float) -> str:
    """Clicks a cell of a map, at shares of its width and height, and returns what the pointer was told there."""
    area = page.locator(f"#{place} .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    at = box["x"] + box["width"] * across, box["y"] + box["height"] * (1 - up)
    # Plotly clicks the cell that was hovered last.
    page.mouse.move(*at)
    hover = page.wait_for_selector(f"#{place} .hovertext")
    said = hover.text_content() if hover else ""
    page.mouse.click(*at)
    return said or ""
