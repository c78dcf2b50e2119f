"""The browser page: pick a trace, move the cut, see what it changes. A Gradio app for this machine."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import gradio as gr
from plotly.offline import get_plotlyjs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replayscope.inspector.errors import ReplayScopeError, UsageError
from replayscope.inspector.verdict import verdict
from replayscope.traces import TraceReader
from replayscope.ui import skin, story, tables, view
from replayscope.ui.checked import told
from replayscope.ui.library import Library
from replayscope.ui.theme import count, escape
from replayscope.ui.view import Choice

FIRST_PORT, LAST_PORT = 7860, 7959
PLOTLY_URL = "replayscope/plotly.min.js"
_PARTS = (
    "header", "traces", "arm", "reference", "point", "region", "metric", "cut", "at", "cut_map", "position_map",
    "summary", "kl", "details",
)  # fmt: skip

_FIGURE = """<figure class="rs-card rs-figure"><figcaption><h2></h2><p></p></figcaption>
<div class="rs-plot"></div><div class="rs-key"></div></figure>"""
_DRAW = """
const draw = async () => {
  // The scripts of the head may arrive after the first figure.
  while (!(window.Plotly && window.replayscope)) await new Promise((again) => setTimeout(again, 20));
  const root = element.querySelector('.rs-figure');
  root.hidden = !props.value;
  if (!props.value) return window.replayscope.clear(root);
  await window.replayscope.show(root, props.value);
  const cut = window.replayscope.meta(root.querySelector('.rs-plot')).cut;
  for (const plot of document.querySelectorAll('.rs-by-cut .rs-plot')) window.replayscope.mark(plot, cut);
};
element.addEventListener('rs-select', (event) => trigger('select', event.detail));
watch('value', draw);
draw();
"""
_HEADER = """<div class="rs-header"><h1>ReplayScope</h1><span class="mono">${value}</span>
<button type="button">dark</button></div>"""
_MODE = """
const label = () => {
  element.querySelector('button').textContent = document.body.classList.contains('dark') ? 'light' : 'dark';
};
element.addEventListener('click', (event) => {
  if (!event.target.closest('button')) return;
  window.replayscope.setMode(!document.body.classList.contains('dark'));
  label();
});
watch('value', label);
label();
"""
# The mark follows the slider at once; the position map follows when it arrives.
_FOLLOW = """(column) => {
  for (const plot of document.querySelectorAll('.rs-by-cut .rs-plot')) window.replayscope.markColumn(plot, column);
}"""


def build(root: str | os.PathLike[str], trace: str | os.PathLike[str] | None = None) -> gr.Blocks:
    """The page over the traces under `root`, opened at `trace` or at the newest one. Serve it with `launch`."""
    library = Library(root)
    act = _Actions(library, _name(library, trace))
    # Without Gradio's own check of choices: an event that left before the menus changed would end in a bare "Error".
    # What a menu sends is mended by `view.menus`, and a trace is found by the library or not at all.
    quick: dict[str, Any] = {
        "show_progress": "hidden", "trigger_mode": "always_last", "concurrency_limit": 4, "api_visibility": "private",
        "preprocess": False,
    }  # fmt: skip
    plain: dict[str, Any] = {"elem_classes": "rs", "apply_default_css": False}
    with gr.Blocks(title="ReplayScope", fill_width=True, analytics_enabled=False) as blocks:
        # H of the chosen cut: the slider counts columns, and another arm has other columns.
        at = gr.State(0)
        header = gr.HTML("", html_template=_HEADER, js_on_load=_MODE, **plain)
        with gr.Row(elem_classes="rs-controls"):
            trace_menu = gr.Dropdown([], label="trace", min_width=180, scale=2, elem_id="rs-trace")
            names = ("arm", "compared with", "hook point", "region", "metric")
            menus = [gr.Dropdown([], label=name, min_width=140, elem_id=f"rs-{name.split()[0]}") for name in names]
        summary = gr.HTML("", elem_id="rs-summary", **plain)
        cut = gr.Slider(0, 1, 0, step=1, label="cut H", elem_id="rs-cut", buttons=[])
        with gr.Row(elem_classes="rs-maps", equal_height=True):
            cut_map = _figure("rs-cut-map", 17, "rs-by-cut")
            position_map = _figure("rs-position-map", 12)
        kl = _figure("rs-logits", 1, "rs-by-cut")
        details = gr.HTML("", **plain)

        asked = [trace_menu, *menus]
        # Every event may have to clear the whole page: in the order of _PARTS.
        page = [header, trace_menu, *menus, cut, at, cut_map, position_map, summary, kl, details]
        # The map first; the verdict reads every table of the trace.
        blocks.load(act.start, None, page, **quick).then(act.describe, asked[:2], page, **quick)
        trace_menu.input(act.open, trace_menu, page, **quick).then(act.describe, asked[:2], page, **quick)
        for menu in menus:
            menu.input(act.draw, [*asked, at], page, **quick)
        cut.input(None, cut, None, js=_FOLLOW)
        cut.input(act.move, [*asked, cut], page, **quick)
        for figure in (cut_map, kl):
            figure.select(act.click, [*asked, at], page, **quick)
    return blocks


def _figure(elem_id: str, scale: int, extra: str = "") -> gr.HTML:
    """A place for one figure; its value is plotly JSON, empty for none. A click on a cell is its event `select`."""
    return gr.HTML(
        "", html_template=_FIGURE, js_on_load=_DRAW, elem_id=elem_id, elem_classes=["rs", extra],
        apply_default_css=False, scale=scale, min_width=320,
    )  # fmt: skip


class _Actions:
    """What the events do. Holds nothing of a visitor: every choice travels with its event."""

    def __init__(self, library: Library, first: str):
        self.library = library
        self.first = first

    def start(self) -> list:
        """The page as it opens."""
        names = self.library.names()
        if not names:
            return _blank("No traces here yet. Record one with <code>replayscope sweep -o sweep.h5</code>.")
        return self.open(self.first if self.first in names else names[0])

    def open(self, name: str) -> list:
        """Menus and maps of one trace."""

        def opened(trace: TraceReader) -> list:
            head = {"header": story.subtitle(trace), "traces": self._menu(name)}
            # What stood here was said of another trace; `describe` takes longer.
            return self._drawn(trace, Choice(name), **head, summary="", kl="", details="")

        return self._view(name, opened)

    def describe(self, name: str | None, arm: str | None) -> list:
        """Verdict, KL figure and tables of the trace whose maps are drawn; without an arm there are none."""
        if name is None or arm is None:
            return _page()
        return self._view(name, lambda trace: self._described(trace, name))

    def draw(self, name: str, arm: str, reference: str, point: str, region: str, metric: str, at: int) -> list:
        """Menus and maps after a choice in a menu."""
        asked = Choice(name, arm, reference, point, region, metric, at)
        return self._view(name, lambda trace: self._drawn(trace, asked))

    def move(self, name: str, arm: str, reference: str, point: str, region: str, metric: str, column: float) -> list:
        """The position map after the slider moved."""

        def moved(trace: TraceReader) -> list:
            cuts = view.menus(trace, Choice(name, arm)).cuts
            at = int(column) if isinstance(column, int | float) else 0
            cut = cuts[min(max(at, 0), len(cuts) - 1)]
            return self._moved(trace, Choice(name, arm, reference, point, region, metric, cut), moved=True)

        return self._view(name, moved)

    def click(
        self, name: str, arm: str, reference: str, point: str, region: str, metric: str, at: int, event: gr.EventData
    ) -> list:
        """The position map after a click on a cut."""
        column = getattr(event, "column", None)
        cut = int(column) if isinstance(column, int | float) else at
        asked = Choice(name, arm, reference, point, region, metric, cut)
        return self._view(name, lambda trace: self._moved(trace, asked))

    def _view(self, name: str | None, make: Callable[[TraceReader], list]) -> list:
        """What `make` draws of the chosen file; of one that cannot be read or drawn, a blank page with the reason.

        The one place where a file of a stranger becomes a view, and where its faults become one line without a path.
        """
        try:
            with told(name or "", "view"):
                return make(self.library.open(name or ""))
        except ReplayScopeError as error:
            return _blank(escape(self.library.public(error, name or "")), self._menu(name))

    def _menu(self, name: str | None) -> Any:
        """The traces that are there now; one that is gone is not chosen."""
        names = self.library.names()
        return gr.Dropdown([(n, n) for n in names], value=name if name in names else None)

    def _drawn(self, trace: TraceReader, asked: Choice, **more: Any) -> list:
        shown = view.menus(trace, asked)
        c = shown.choice
        return _page(
            **more,
            arm=gr.Dropdown(shown.arms, value=c.arm),
            reference=gr.Dropdown(shown.references, value=c.reference),
            point=gr.Dropdown(shown.points, value=c.point),
            region=gr.Dropdown(shown.regions, value=c.region),
            metric=gr.Dropdown(shown.metrics, value=c.metric),
            cut=_slider(shown.cuts, c.cut, view.has_cut(self.library, c)),
            at=c.cut,
            cut_map=view.cut_map(self.library, c),
            position_map=view.position_map(self.library, c),
        )

    def _described(self, trace: TraceReader, name: str) -> list:
        view.menus(trace, Choice(name))
        return _page(
            summary=self.library.cached(name, "summary", lambda trace: story.overview(trace, verdict(trace))),
            kl=view.logits(self.library, name),
            details=self.library.cached(name, "details", _details),
        )

    def _moved(self, trace: TraceReader, asked: Choice, moved: bool = False) -> list:
        """moved: the slider is where the reader put it and must not be set again under the hand."""
        shown = view.menus(trace, asked)
        label = _cut_label(shown.cuts, shown.choice.cut)
        slider = gr.Slider(label=label) if moved else _slider(shown.cuts, shown.choice.cut, True)
        return _page(cut=slider, at=shown.choice.cut, position_map=view.position_map(self.library, shown.choice))


def _page(**parts: Any) -> list:
    """New values of some parts of the page; the others stay as they are."""
    assert set(parts) <= set(_PARTS)
    return [parts.get(name, gr.skip()) for name in _PARTS]


def _blank(why: str, traces: Any = None) -> list:
    """A page without figures, tables and choices, but for the menu of traces, and one line that says why; HTML."""
    menus = {name: gr.Dropdown([], value=None) for name in ("arm", "reference", "point", "region", "metric")}
    empty = dict.fromkeys(("header", "cut_map", "position_map", "kl", "details"), "")
    traces = gr.Dropdown([], value=None) if traces is None else traces
    return _page(traces=traces, **menus, **empty, cut=gr.Slider(visible=False), at=0, summary=_note(why))


def _slider(cuts: list[int], cut: int, shown: bool) -> Any:
    column = cuts.index(cut) if cut in cuts else 0
    many = len(cuts) > 1
    return gr.Slider(0, max(len(cuts) - 1, 1), column, step=1, label=_cut_label(cuts, cut), visible=shown and many)


def _cut_label(cuts: list[int], cut: int) -> str:
    return f"cut H = {count(cut)}   ({count(cuts.index(cut) + 1)} of {count(len(cuts))})"


def _note(text: str) -> str:
    return f'<div class="rs-empty">{text}</div>'


def _details(trace: TraceReader) -> str:
    parts = (
        ("Arms", "the worst over the cuts of each arm; errors are relative L2 of a row", tables.arms(trace)),
        ("Where runs go wrong first", "planted faults are broken on purpose", tables.faults(verdict(trace))),
        ("Provenance", "what is needed to run it again", tables.provenance(trace)),
    )
    return "".join(
        f'<div class="rs-card"><h2>{title}</h2><p>{sentence}</p>{body}</div>' for title, sentence, body in parts if body
    )


def _name(library: Library, trace: str | os.PathLike[str] | None) -> str:
    """A trace given by path, as its name under the root; empty if none is given. Raises UsageError outside the root."""
    if trace is None:
        return ""
    path = Path(trace).resolve()
    if not path.is_relative_to(library.root):
        raise UsageError(f"{trace} is not under {library.root}; traces are opened only there")
    name = path.relative_to(library.root).as_posix()
    library.open(name)
    return name


def launch(blocks: gr.Blocks, host: str = "127.0.0.1", port: int | None = None, open_browser: bool = False) -> str:
    """Start serving in the background and return the address.

    Raises UsageError for a host that is no address of this machine and a port that is taken or not allowed.
    """
    chosen = _port(host, port)
    library = get_plotlyjs().encode()

    async def plotly(_: Request) -> Response:
        return Response(library, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    try:
        _, url, _ = blocks.launch(
            server_name=host, server_port=chosen, prevent_thread_lock=True, inbrowser=open_browser, quiet=True,
            share=False, show_error=False, run_history=False, ssr_mode=False, footer_links=[], enable_monitoring=False,
            theme=skin.theme(), head=skin.head(PLOTLY_URL),
            app_kwargs={"routes": [Route(f"/{PLOTLY_URL}", plotly)]},
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{chosen}; name another --host or --port") from error
    return url


def serve(
    trace: str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
) -> None:
    """Serve the page until it is interrupted. Without `root`, the folder of `trace`, or this one.

    Raises UsageError for a folder that is not there, a trace outside it, a host that is no address of this machine, or
    a port that is taken.
    """
    folder = Path(root) if root is not None else Path(trace).parent if trace is not None else Path(".")
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}; give --root an existing one")
    blocks = build(folder, trace)
    url = launch(blocks, host, port, open_browser)
    print(f"ReplayScope at {url}  (Ctrl+C stops it)", file=sys.stderr, flush=True)
    try:
        _wait()
    finally:
        blocks.close(verbose=False)


def _wait() -> None:
    """Until Ctrl+C, which goes on to the caller; Gradio's own way of waiting would swallow it."""
    threading.Event().wait()


def _port(host: str, port: int | None) -> int:
    """The named port, or the first free one. Raises UsageError that tells a bad host from a port that is taken."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host!r} has no address; give one of this machine, such as 127.0.0.1") from None
    family, _, _, _, address = found[0]
    for at in range(FIRST_PORT, LAST_PORT + 1) if port is None else [port]:
        number = _refusal(family, (address[0], at, *address[2:]))
        if number == 0:
            return at
        if number in (errno.EACCES, errno.EPERM):
            raise UsageError(f"port {at} may not be opened by this user; name a --port from 1024 on")
        if number != errno.EADDRINUSE:
            raise UsageError(
                f"--host {host!r} is no address of this machine ({os.strerror(number)}); give one, such as 127.0.0.1"
            )
    if port is not None:
        raise UsageError(f"port {port} is taken; name another --port, or none for the next free one")
    raise UsageError(f"no free port from {FIRST_PORT} to {LAST_PORT} on {host}; name one with --port")


def _refusal(family: int, address: tuple) -> int:
    """The error number of listening at an address, 0 if it can be done."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0
