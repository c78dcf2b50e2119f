"""Run: a sweep from the browser, with its cost beforehand, its progress, and a way to stop it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from gradio.components import Component

from replayscope.inspector.engines import ENGINES
from replayscope.inspector.errors import UsageError
from replayscope.inspector.samples import SAMPLES
from replayscope.ui.form import OWN_TEXT, PRECISIONS, Form, asking, command, free_name, model_names
from replayscope.ui.jobs import Job, Jobs
from replayscope.ui.library import Library
from replayscope.ui.parts import Tab, card, html
from replayscope.ui.theme import escape, plural

_FIELDS = (
    "model", "sample", "text", "tokens", "cuts", "replay", "suffix", "semantics", "precision", "audit", "rows", "name",
)  # fmt: skip
_HEADS = {
    "waiting": "Waiting", "running": "Running", "done": "Done", "failed": "Could not run", "cancelled": "Cancelled",
}  # fmt: skip
_KEEP = "(id) => { sessionStorage.setItem('replayscope-job', id); }"
_KEPT = "() => sessionStorage.getItem('replayscope-job') || ''"


def place() -> dict[str, Component]:
    """The form, and what is said of the run beside it."""
    texts = [*((f"{name}: {sample.source.split(',')[0]}", name) for name, sample in SAMPLES.items()), OWN_TEXT]
    with gr.Row(elem_classes="rs-beside"):
        with gr.Column(elem_classes="rs-card rs-form"):
            with gr.Row():
                model = gr.Dropdown([], label="model", elem_id="rs-run-model")
                sample = gr.Dropdown(texts, value="prose", label="text", elem_id="rs-run-sample")
                tokens = gr.Textbox("512", label="tokens, empty for all", elem_id="rs-run-tokens")
            text = gr.Textbox(
                "", label="own text, or token ids as ids:1,2,3", lines=5, max_lines=12, visible=False,
                elem_id="rs-run-text",
            )  # fmt: skip
            with gr.Row():
                cuts = gr.Textbox("grid", label="cuts: 128,256 · a:b:step · grid · all", elem_id="rs-run-cuts")
                replay = gr.Textbox("W", label="replay lengths: W · 2W · exact")
                suffix = gr.Textbox("64", label="suffix rows, or all")
            with gr.Row():
                semantics = gr.Dropdown(list(ENGINES), value=["paper"], multiselect=True, label="semantics")
                precision = gr.Dropdown(list(PRECISIONS), value="fp32", label="precision")
                name = gr.Textbox("", label="name of the trace", elem_id="rs-run-name")
            with gr.Row():
                audit = gr.Checkbox(False, label="audit: choices frozen from full, so that a bug is a bug")
                rows = gr.Checkbox(False, label="keep every row")
            with gr.Row(elem_classes="rs-buttons"):
                run = gr.Button("Run", variant="primary", elem_id="rs-run-go")
                ask = gr.Button("What would it cost?", elem_id="rs-run-ask")
                cancel = gr.Button("Cancel", interactive=False, elem_id="rs-run-cancel")
        progress = html("rs-run-progress")
    fields = (model, sample, text, tokens, cuts, replay, suffix, semantics, precision, audit, rows, name)
    named = {f"run_{field}": part for field, part in zip(_FIELDS, fields, strict=True)}
    return {**named, "run_go": run, "run_ask": ask, "run_cancel": cancel, "run_progress": progress}


def wire(blocks: gr.Blocks, parts: dict[str, Any], traces: Component, library: Library, jobs: Jobs) -> None:
    """The events of the tab. The job is the visitor's own; only how many wait is said of others.

    Its id, which nobody can guess, is kept by the window that started it: a reload shows the job again, the address,
    which may be mailed, does not hold it.
    """
    mine, clock = gr.Textbox(visible=False), gr.Timer(0.5, active=False)
    form = [parts[f"run_{field}"] for field in _FIELDS]
    shown = [mine, clock, parts["run_progress"], parts["run_cancel"], parts["run_name"], traces]
    quiet: dict[str, Any] = {
        "show_progress": "hidden",
        "api_visibility": "private",
        "concurrency_limit": 4,
        "preprocess": False,
    }

    def opened(id_: object) -> list:
        values = _shown(library, jobs, str(id_ or ""))
        return [_models(library), *values[:4], free_name(library.root)]

    def start(asks: bool, before: str, *typed: Any) -> list:
        if (asked := jobs.get(before)) and asked.asks:
            jobs.cancel(before)  # whoever starts a run does not wait for its cost
        try:
            one = command(Form(**dict(zip(_FIELDS, typed, strict=True))), library.root)
            one = asking(one) if asks else one
            return _shown(library, jobs, jobs.submit(one.words, one.out, one.text))
        except UsageError as error:
            said = card("Not started", "", f'<p class="rs-said">{escape(library.public(error, ""))}</p>')
            return ["", gr.Timer(active=False), said, gr.Button(interactive=False), gr.skip(), gr.skip()]

    def stop(id_: str) -> list:
        jobs.cancel(id_)
        return _shown(library, jobs, id_)

    for button, asks in (("run_go", False), ("run_ask", True)):
        started = parts[button].click(partial(start, asks), [mine, *form], shown, **quiet)
        started.then(None, mine, None, js=_KEEP)
    parts["run_cancel"].click(stop, mine, shown, **quiet)
    clock.tick(lambda id_: _shown(library, jobs, id_), mine, shown, **quiet)
    parts["run_sample"].input(
        lambda sample: gr.Textbox(visible=sample == OWN_TEXT), parts["run_sample"], parts["run_text"], **quiet
    )
    blocks.load(
        opened, mine, [parts["run_model"], *shown[:4], parts["run_name"]], js=_KEPT, **quiet,
    )  # fmt: skip


def _models(library: Library) -> Any:
    names = model_names(library.root)
    return gr.Dropdown(names, value=names[0] if names else None)


def _shown(library: Library, jobs: Jobs, id_: str) -> list:
    """The parts that follow a job; with the end of one the list of traces is a new one."""
    job = jobs.get(id_)
    if job is None:
        return ["", gr.Timer(active=False), idle(jobs.busy()), gr.Button(interactive=False), gr.skip(), gr.skip()]
    job = replace(job, said=library.public(UsageError(job.said), ""))
    ended = job.phase == "done" and not job.asks
    name = free_name(library.root) if ended else gr.skip()
    traces = gr.Dropdown([(n, n) for n in library.names()]) if ended else gr.skip()
    return [id_, gr.Timer(active=not job.over), told(job), gr.Button(interactive=not job.over), name, traces]


def idle(busy: int) -> str:
    """What stands beside the form before anything was started; HTML."""
    others = f" {plural(busy, 'run')} of other windows wait or run; yours will follow." if busy else ""
    return card("Nothing runs", f"A run starts here and its trace joins the list.{others}", "")


def told(job: Job) -> str:
    """Where a run stands; HTML."""
    share = job.done / job.total if job.total else 0.0
    head = "The cost" if job.asks and job.phase == "done" else _HEADS[job.phase]
    lines = [f'<p class="mono">{escape(job.out)}</p>']
    if job.estimate:
        lines.append(f'<p class="rs-said">{escape(job.estimate)}</p>')
    if job.phase == "waiting":
        lines.append(f'<p class="rs-said">{plural(job.ahead, "run")} before this one</p>' if job.ahead else "")
    if job.phase == "running" and not job.asks:
        doing = f"{job.done} of {job.total} · {escape(job.doing)}" if job.total else "reading the model"
        lines.append(f'<div class="rs-progress"><i style="width:{100 * share:.1f}%"></i></div><p>{doing}</p>')
    if job.said:
        lines.append(f'<p class="rs-said">{escape(job.said)}</p>')
    if job.phase == "done" and not job.asks:
        address = escape("?" + urlencode({"trace": job.out}))
        lines.append(f'<p class="rs-said"><a href="{address}">Open {escape(job.out)}</a></p>')
    return card(head, "", "".join(lines), "rs-job")


TAB = Tab("run", "Run", (), place, own=("run_progress",))
