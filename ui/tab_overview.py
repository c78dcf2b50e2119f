"""Overview: the verdict, the two maps, the arms, what went wrong first, provenance and the noise floor."""

from __future__ import annotations

import json

import gradio as gr
from gradio.components import Component

from replayscope.inspector.verdict import verdict
from replayscope.traces import TraceReader
from replayscope.ui import maps, story, tables
from replayscope.ui.library import Library
from replayscope.ui.parts import Content, Tab, card, figure, late
from replayscope.ui.view import Choice


def place() -> dict[str, Component]:
    """The parts; the verdict and the tables come late, as they read every table of the trace."""
    story_ = late("rs-story")
    with gr.Row(elem_classes="rs-maps", equal_height=True):
        parts = {
            "overview_cut": figure("rs-cut-map", "cut"),
            "overview_position": figure("rs-position-map", "position"),
        }
    return {"story": story_, **parts, "tables": late("rs-tables")}


def content(library: Library, c: Choice) -> Content:
    """Both maps of a choice."""
    return {"overview_cut": maps.cut_map(library, c), "overview_position": maps.position_map(library, c)}


def described(library: Library, name: str) -> Content:
    """What is worked out of a whole trace, as JSON that names it."""
    return {
        "story": _late(name, library.cached(name, "story", lambda trace: story.overview(trace, verdict(trace)))),
        "tables": _late(name, library.cached(name, "tables", _tables)),
    }


def _late(name: str, html: str) -> str:
    return json.dumps({"trace": name, "html": html})


def _tables(trace: TraceReader) -> str:
    parts = (
        ("Arms", "the worst over the cuts of each arm; errors are relative L2 of a row", tables.arms(trace)),
        ("Where runs go wrong first", "planted faults are broken on purpose", tables.faults(verdict(trace))),
        ("Noise floor", "the most by which runs that are equal on paper differ", tables.floors(trace)),
        ("Provenance", "what is needed to run it again", tables.provenance(trace)),
    )
    return "".join(card(*part) for part in parts if part[2])


MENUS = ("trace", "arm", "reference", "point", "region", "metric")
TAB = Tab("overview", "Overview", (*MENUS, "cut"), place, content)
