"""How quickly the page follows its slider, in a real browser: `python benchmarks/slider.py [--moves 15]`.

Writes a trace of 40 layers x 256 cuts, serves it from a process of its own, moves the slider of the cut by key and
waits until the figure of the new cut has been painted; then 20 quick moves, of which the last must be the one that
stays. Prints JSON lines: the machine, each tab with median, range, what the time is spent on and the load, and the
quick moves. Seconds of the processor, over all threads, do not depend on the load; seconds of the clock do. Needs
Playwright, a Chromium and Linux.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import environment
from playwright.sync_api import Page, sync_playwright

from replayscope.traces import RunInfo, Table, Tokens, TraceWriter
from replayscope.traces.schema import bucket_names

LAYERS, CUTS, COLUMNS, STEP, FIRST = 40, 256, 256, 8, 512
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
# Tab, and the figure that a move of the cut draws anew.
TABS = {"overview": "rs-position-map", "position": "rs-position-large"}

# Times of one move, in milliseconds from the slider's event: its request leaves, its answer has come and the page
# begins to draw, the figure is drawn, and the frame after that is on the screen.
WATCH = """(id) => {
  const root = document.getElementById(id), own = { moved: 0 };
  window.rsMove = own;
  const since = (name) => { if (own.moved && !(name in own)) own[name] = performance.now() - own.moved; };
  document.addEventListener('input', (event) => {
    if (!event.target.matches('#rs-cut input[type=range]')) return;
    for (const name of Object.keys(own)) delete own[name];
    own.moved = performance.now();
  }, true);
  const { fetch } = window;
  window.fetch = (url, ...more) => {
    if (String(url.url || url).includes('queue/join')) since('asked');
    return fetch(url, ...more);
  };
  const { place } = window.replayscope;
  window.replayscope.place = (at, value) => {
    const here = root.contains(at);
    if (here) { since('answered'); own.characters = (value || '').length; }
    const drawing = place(at, value);
    if (here) Promise.resolve(drawing).then(() => {
      since('drawn');
      requestAnimationFrame(() => setTimeout(() => since('painted'), 0));
    });
    return drawing;
  };
}"""
STAGES = ("asked", "answered", "drawn", "painted")


def write(path: Path) -> None:
    """One arm at 256 cuts, each run over 256 positions of which every row is kept, in 40 layers: both maps have
    40 x 256 cells."""
    window, draw = COLUMNS // 2, np.random.default_rng(0)
    cuts = range(window, window + CUTS * STEP, STEP)
    tokens = cuts[-1] + window
    runs = [
        RunInfo(i, "encoder", "paper", cut, window, cut - window, cut + window, tokens, window)
        for i, cut in enumerate(cuts)
    ]
    buckets = bucket_names(COLUMNS)
    shape = (len(runs), LAYERS, len(buckets))
    arrays = {name: draw.uniform(1, 2, shape) for name in ("elements", "diff2", "ref2", "arm2", "dot")}
    counts = {"n": np.full(shape, COLUMNS), "nonfinite": np.zeros(shape, np.int64)}
    offsets = np.arange(0, (len(runs) + 1) * COLUMNS, COLUMNS)
    position = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    rows: dict[str, np.ndarray] = {name: draw.uniform(1, 2, (LAYERS, len(position))) for name in ("diff2", "ref2")}
    rows |= {name: np.ones((LAYERS, len(position)), np.int64) for name in ("n", "elements")}
    with TraceWriter(path) as out:
        out.header(config={}, provenance={}, tokens=Tokens(np.arange(tokens), [str(i) for i in range(tokens)]))
        out.runs(runs)
        out.table("full", "window_kv", Table("state", buckets, counts | arrays))
        out.rows("full", "window_kv", offsets, position, rows | {"nonfinite": np.zeros_like(rows["n"])})


def serve(root: Path, told: Connection) -> None:
    """Serves the folder until the other side says stop."""
    from replayscope.ui import app

    page = app.build(root)
    try:
        told.send(app.launch(page))
        told.recv()
    finally:
        page.close()


def processor(server: int) -> tuple[float, float]:
    """Processor seconds that the server and the browser have taken so far: what other programs do not lengthen."""
    spent, parents, names = {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            at = int(folder.name)
            parents[at], names[at] = int(fields[1]), name
            spent[at] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def within(pid: int, root: int) -> bool:
        while pid > 1 and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    browser = [pid for pid in spent if "chrom" in names[pid] and within(pid, os.getpid())]
    return sum(spent[pid] for pid in spent if within(pid, server)), sum(spent[pid] for pid in browser)


def moves(page: Page, url: str, tab: str, count: int, server: int) -> dict[str, Any]:
    """Single moves of the slider on one tab, each after the one before has been painted."""
    page.goto(f"{url}?tab={tab}&cut={FIRST}")
    page.wait_for_selector(f"#{TABS[tab]} .main-svg")
    page.wait_for_timeout(1000)
    page.evaluate(WATCH, TABS[tab])
    page.locator("#rs-cut input[type=range]").focus()
    seen: list[dict[str, float]] = []
    before = processor(server)
    for _ in range(count):
        page.keyboard.press("ArrowRight")
        page.wait_for_function("window.rsMove.moved && window.rsMove.painted !== undefined", polling=50)
        seen.append(page.evaluate("({ ...window.rsMove })"))
    taken = [(now - then) / count for now, then in zip(processor(server), before, strict=True)]
    whole = [one["painted"] / 1000 for one in seen]
    last = dict(zip(STAGES, (None, *STAGES), strict=False))
    spent = {
        f"until_{name}_s": statistics.median((one[name] - (one[past] if past else 0)) / 1000 for one in seen)
        for name, past in last.items()
    }
    return {
        "tab": tab, "moves": count, "median_s": statistics.median(whole), "range_s": [min(whole), max(whole)],
        **spent, "processor_s": dict(zip(("server", "browser"), taken, strict=True)),
        "characters": seen[-1]["characters"], "load": os.getloadavg(),
    }  # fmt: skip


def quick(page: Page, url: str, count: int = 20) -> dict[str, Any]:
    """Many moves at once: which cut the slider, its label and the figure show when all is quiet."""
    page.goto(f"{url}?tab=overview&cut={FIRST}")
    page.wait_for_selector("#rs-position-map .main-svg")
    slider = page.locator("#rs-cut input[type=range]")
    slider.focus()
    began = time.perf_counter()
    for _ in range(count):
        page.keyboard.press("ArrowRight")
    pressed = time.perf_counter() - began
    cut = FIRST + count * STEP
    words = f"at cut {cut:,}"
    page.wait_for_function(
        "(words) => document.querySelector('#rs-position-map h2').textContent.includes(words)", arg=words
    )
    settled = time.perf_counter() - began
    page.wait_for_timeout(2000)
    title = page.locator("#rs-position-map h2").inner_text()
    label = page.locator("#rs-cut").inner_text()
    return {
        "quick_moves": count, "pressed_s": pressed, "settled_s": settled,
        "last_stays": words in title and f"cut H = {cut:,}" in label,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=15)
    options = parser.parse_args(arguments)
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"no browser found ({', '.join(BROWSERS)})", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="slider-") as folder:
        write(Path(folder) / "large.h5")
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(Path(folder), theirs))
        server.start()
        try:
            url = ours.recv()
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
                context = chromium.new_context(viewport={"width": 1366, "height": 900})
                context.set_default_timeout(600_000)
                page = context.new_page()
                machine = environment(torch.device("cpu")) | {"layers": LAYERS, "cuts": CUTS}
                print(json.dumps(machine | {"load": os.getloadavg()}), flush=True)
                for tab in TABS:
                    print(json.dumps(moves(page, url, tab, options.moves, server.pid or 0)), flush=True)
                found = quick(page, url)
                print(json.dumps(found | {"load": os.getloadavg()}), flush=True)
                chromium.close()
        finally:
            ours.send("stop")
            server.join(20)
            server.kill()
    return 0 if found["last_stays"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
