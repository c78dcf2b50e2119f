"""Export: a figure of the present view, its numbers, or the whole report, as a file."""

from __future__ import annotations

import shutil
import tempfile
import time
from inspect import signature
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component

from replayscope.inspector.errors import ReplayScopeError, UsageError
from replayscope.inspector.names import choose
from replayscope.inspector.summary import size
from replayscope.ui.checked import told
from replayscope.ui.export import FORMATS, export
from replayscope.ui.figures import FIGURES
from replayscope.ui.library import Library
from replayscope.ui.parts import Content, Tab, card, html
from replayscope.ui.report import report
from replayscope.ui.theme import escape
from replayscope.ui.view import Choice, address, chosen_run

REPORT = "report"
_KEPT = 120.0  # seconds that a file is kept for a download; by then the page server has a copy of its own


def place() -> dict[str, Component]:
    """What to export and how, the file, and the address of the view."""
    with gr.Row(elem_classes="rs-beside"):
        with gr.Column(elem_classes="rs-card rs-form"):
            with gr.Row():
                figure = gr.Dropdown([*FIGURES, REPORT], value="cut-layer", label="figure", elem_id="rs-export-figure")
                format_ = gr.Dropdown(list(FORMATS), value="html", label="format", elem_id="rs-export-format")
            with gr.Row():
                dark = gr.Checkbox(False, label="images on a dark ground")
            with gr.Row(elem_classes="rs-buttons"):
                make = gr.Button("Make the file", variant="primary", elem_id="rs-export-make")
                file = gr.DownloadButton("Save", visible=False, elem_id="rs-export-file")
            said = html("rs-export-said")
        view = html("rs-export-view")
    return {
        "export_figure": figure, "export_format": format_, "export_dark": dark, "export_make": make,
        "export_file": file, "export_said": said, "export_view": view,
    }  # fmt: skip


def content(library: Library, c: Choice) -> Content:
    """The address of the view, to be mailed."""
    query = escape(address("cut", c))
    body = f'<p class="mono rs-address">{query}</p><p class="rs-said"><a href="{query}">Open this view</a></p>'
    return {"export_view": card("This view", "its address holds trace, arm, cut, layer, position and metric", body)}


def write(library: Library, c: Choice, name: str, kind: str, dark: bool, folder: Path) -> Path:
    """One file of the present view in `folder`. Raises UsageError or TraceError with the reason."""
    choose("figure", name, [*FIGURES, REPORT])
    choose("format", kind, list(FORMATS))
    trace = library.open(c.trace)
    stem = trace.path.stem
    if name == REPORT:
        if kind != "html":
            raise UsageError("the report is one html file; choose html, or print it from the browser")
        return report(trace.path, folder / f"{stem}-report.html")
    taken = signature(FIGURES[name]).parameters
    view = {"point": c.point, "bucket": c.region, "arm": c.arm, "reference": c.reference, "layer": c.layer,
            "position": c.position, "run": chosen_run(trace, c).index}  # fmt: skip
    options = {key: value for key, value in view.items() if key in taken}
    out = folder / f"{stem}-{name}.{kind}"
    try:
        return export(trace.path, name, c.metric, out, dark=dark, **options)[0]
    except UsageError:
        # A figure that is not for the metric or the hook point of the view has its own.
        options.pop("point", None)
        return export(trace.path, name, None, out, dark=dark, **options)[0]


def wire(parts: dict[str, Any], seen: gr.State, library: Library, folder: Path) -> None:
    """The event of the tab; files are made in `folder`."""

    def make(seen: Any, name: str, kind: str, dark: bool) -> list:
        _tidy(folder)
        try:
            with told(seen.choice.trace, "file"):
                here = Path(tempfile.mkdtemp(dir=folder))
                file = write(library, seen.choice, str(name), str(kind), dark is True, here)
        except ReplayScopeError as error:
            said = f'<p class="rs-said">{escape(library.public(error, ""))}</p>'
            return [gr.DownloadButton(visible=False), said]
        label = f"Save {file.name}"
        return [gr.DownloadButton(label, value=str(file), visible=True), f"<p>{size(file.stat().st_size)}</p>"]

    parts["export_make"].click(
        make, [seen, parts["export_figure"], parts["export_format"], parts["export_dark"]],
        [parts["export_file"], parts["export_said"]],
        show_progress="hidden", api_visibility="private", concurrency_limit=1, preprocess=False,
    )  # fmt: skip


def _tidy(folder: Path) -> None:
    """Removes files that were fetched long ago."""
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _KEPT:
            shutil.rmtree(old, ignore_errors=True)


TAB = Tab(
    "export",
    "Export",
    ("trace", "arm", "reference", "point", "region", "metric", "cut"),
    place,
    content,
    ("export_said",),
)
