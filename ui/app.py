"""The browser page: pick a trace, move the cut, see what it changes. A Gradio app for this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import gradio as gr
from gradio.components import Component
from plotly.offline import get_plotlyjs
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replayscope.inspector.errors import UsageError
from replayscope.ui import (
    api,
    controls,
    skin,
    tab_compare,
    tab_export,
    tab_judge,
    tab_logits,
    tab_maps,
    tab_overview,
    tab_replay,
    tab_run,
    tab_tensor,
)
from replayscope.ui.access import Users, is_local, users
from replayscope.ui.hosts import OwnHosts, named
from replayscope.ui.jobs import Jobs
from replayscope.ui.library import Library
from replayscope.ui.parts import html, when_ready
from replayscope.ui.port import free_port
from replayscope.ui.session import Seen, Session
from replayscope.ui.uploads import Blocks, NoFiles

PLOTLY_URL = "replayscope/plotly.min.js"
TABS = (
    tab_overview.TAB, tab_maps.CUT, tab_maps.POSITION, tab_replay.TAB, tab_logits.TAB, tab_tensor.TAB, tab_compare.TAB,
    tab_judge.TAB, tab_run.TAB, tab_export.TAB,
)  # fmt: skip

_HEADER = """<div class="rs-header"><h1>ReplayScope</h1><span class="mono"></span>
<button type="button">dark</button></div>"""
_SHOWN = when_ready("""
const button = element.querySelector('button');
const label = () => { button.textContent = document.body.classList.contains('dark') ? 'light' : 'dark'; };
button.addEventListener('click', () => { window.replayscope.chooseMode(); label(); });
new MutationObserver(label).observe(document.body, { attributes: true, attributeFilter: ['class'] });
const show = () => {
  const shown = props.value ? JSON.parse(props.value) : {};
  element.querySelector('.mono').textContent = shown.subtitle || '';
  window.replayscope.showing(shown);
};
watch('value', show);
show();
label();
""")
_NAV = when_ready("""
window.replayscope.navigate(element, (tab) => { props.value = tab; trigger('select', { tab }); });
const open = () => { if (props.value) window.replayscope.openTab(props.value); };
watch('value', open);
open();
""")
# The mark follows the slider at once; whatever else changes follows when it arrives.
_FOLLOW = "(column) => window.replayscope.follow(column)"


@dataclass(frozen=True)
class Page:
    """The page over one folder, and what it must leave tidy: the runs that it started, the files that it made."""

    blocks: gr.Blocks
    jobs: Jobs
    files: Path

    def close(self) -> None:
        """Stop serving, stop the runs, remove the files."""
        self.blocks.close(verbose=False)
        self.jobs.close()
        shutil.rmtree(self.files, ignore_errors=True)


def build(root: str | os.PathLike[str], trace: str | os.PathLike[str] | None = None) -> Page:
    """The page over the traces under `root`, opened at `trace` or at the newest one. Serve it with `launch`."""
    library = Library(root)
    first = _name(library, trace)
    jobs, files = Jobs(library.root), Path(tempfile.mkdtemp(prefix="replayscope-"))
    plain: dict[str, Any] = {"elem_classes": "rs", "apply_default_css": False}
    with Blocks(
        title="ReplayScope", fill_width=True, analytics_enabled=False, delete_cache=(600, 3600)
    ) as blocks:  # fmt: skip
        seen, wanted = gr.State(Seen()), gr.State("")
        address = gr.Textbox(visible=False)
        header = gr.HTML("", html_template=_HEADER, js_on_load=_SHOWN, **plain)
        nav = gr.HTML("", html_template=_tabs(), js_on_load=_NAV, elem_id="rs-nav", **plain)
        chosen = controls.place()
        note = html("rs-note")
        made: dict[str, Component] = {}
        for tab in TABS:
            with gr.Column(elem_id=f"rs-tab-{tab.name}", elem_classes="rs-tab"):
                made |= tab.place()
        own = {part for tab in TABS for part in tab.own}
        shown = {name: part for name, part in made.items() if isinstance(part, gr.HTML) and name not in own}
        parts = {"header": header, "nav": nav, **chosen, "note": note, **shown}
        act = Session(library, first, TABS, list(parts))

        # Without Gradio's own check of choices: an event that left before the menus changed would end in a bare
        # "Error". What a page sends is mended by `view.menus`, and a trace is found by the library or not at all.
        quick: dict[str, Any] = {
            "show_progress": "hidden", "concurrency_limit": 4, "api_visibility": "private", "preprocess": False,
        }  # fmt: skip
        page = [seen, wanted, *parts.values()]
        blocks.load(act.start, address, page, js="() => location.search", **quick)
        # One event for every act: answers come in order, and of many quick acts the last one stays.
        triggers = [control.input for control in chosen.values()] + [part.select for part in (nav, *shown.values())]
        gr.on(triggers, act.draw, [seen, nav, *chosen.values()], page, trigger_mode="always_last", **quick)
        chosen["cut"].input(None, chosen["cut"], None, js=_FOLLOW)
        wanted.change(act.describe, wanted, [made["story"], made["tables"]], trigger_mode="multiple", **quick)
        tab_run.wire(blocks, made, chosen["trace"], library, jobs)
        tab_export.wire(made, seen, library, files)
        api.publish(library)
    return Page(blocks, jobs, files)


def _tabs() -> str:
    buttons = "".join(f'<button role="tab" type="button" data-tab="{tab.name}">{tab.title}</button>' for tab in TABS)
    return f'<div class="rs-nav" role="tablist">{buttons}</div>'


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


def launch(
    page: Page, host: str = "127.0.0.1", port: int | None = None, open_browser: bool = False, auth: Users | None = None,
    allowed: Sequence[str] = (),
) -> str:  # fmt: skip
    """Start serving in the background and return the address. auth: who may open the page, None for everybody.
    allowed: names besides its own that the page answers to.

    Raises UsageError for a host that is no address of this machine and a port that is taken or not allowed.
    """
    names = named(host, allowed)
    chosen = free_port(host, port)
    library = get_plotlyjs().encode()

    async def plotly(_: Request) -> Response:
        return Response(library, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    try:
        _, url, _ = page.blocks.launch(
            server_name=host, server_port=chosen, prevent_thread_lock=True, inbrowser=open_browser, quiet=True,
            auth=auth, max_file_size="1kb", share=False, show_error=False,
            run_history=False, ssr_mode=False, footer_links=[], enable_monitoring=False,
            theme=skin.theme(), head=skin.head(PLOTLY_URL, TABS),
            app_kwargs={
                "routes": [Route(f"/{PLOTLY_URL}", plotly)],
                "middleware": [Middleware(OwnHosts, names=names), Middleware(NoFiles)],
            },
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
    auth: str | None = None,
    allowed: Sequence[str] = (),
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until it is interrupted. Without `root`, the folder of `trace`, or this one.

    auth: `USER:PASSWORD` or `@FILE`. allowed: names besides its own that the page answers to. ready: is called with the
    address once the page answers. Raises UsageError for a folder that is not there, a trace outside it, a host that is
    no address of this machine, a port that is taken, names that are none, or users that cannot be read.
    """
    known = users(auth)
    folder = Path(root) if root is not None else Path(trace).parent if trace is not None else Path(".")
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}; give --root an existing one")
    page = build(folder, trace)
    try:
        url = launch(page, host, port, open_browser, known, allowed)
        if known is None and not is_local(host):
            said = "anyone who reaches this host can read the traces and start runs; add --auth USER:PASSWORD"
            print(f"note: {said}", file=sys.stderr)
        print(f"ReplayScope at {url}  (Ctrl+C stops it)", file=sys.stderr, flush=True)
        ready(url)
        _wait()
    finally:
        page.close()


def _wait() -> None:
    """Until Ctrl+C, which goes on to the caller; Gradio's own way of waiting would swallow it."""
    threading.Event().wait()
