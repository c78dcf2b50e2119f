"""One function for each command: checks what can be checked at once, then loads and calls its use case.

Every import of torch, numpy or a picture library is inside the function that needs it.
"""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from inspect import signature
from pathlib import Path

from replayscope.inspector import checks
from replayscope.inspector.errors import UsageError
from replayscope.inspector.listing import TOPICS, models
from replayscope.inspector.names import choose, unknown
from replayscope.inspector.options import FORMATS, DemoOptions, ImportOptions, Result, RunOptions
from replayscope.inspector.points import split_globs
from replayscope.inspector.prompts import Prompt
from replayscope.inspector.specs import parse_count, parse_replay, parse_tolerance
from replayscope.model.hf_config import is_hf

__all__ = ["TOPICS", "compare", "demo", "import_", "ledger", "list_", "plot", "record", "report", "show", "sweep", "ui"]


def demo(options: Namespace) -> Result:
    """The main job on the embedded model and texts."""
    checks.named(options.out)
    checks.folder_of(options.out)
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"{options.out} is not a folder; give another -o")
    if not options.force and options.out.is_dir() and any(options.out.iterdir()):
        raise UsageError(
            f"folder {options.out} is not empty; add --force to replace what demo wrote, or give another -o"
        )
    from replayscope.inspector import demo as use_case

    done = use_case.demo(DemoOptions(out=options.out, **_common(options)))
    from replayscope.ui import report as page

    drawn = page.report(done.json["traces"], options.out / "report.html", force=True)
    lines = ["", *done.json["traces"], str(drawn)]
    return replace(done, text="\n".join([done.text, *lines]), json={**done.json, "report": str(drawn)})


def record(options: Namespace) -> Result:
    """Run some arms over one prompt and keep states and divergence."""
    asked = _run_options(options)
    from replayscope.inspector import usecases

    return usecases.record(asked)


def sweep(options: Namespace) -> Result:
    """Run arms at many cuts and replay lengths and keep their divergence."""
    asked = _run_options(options)
    from replayscope.inspector import usecases

    return usecases.sweep(asked)


def compare(options: Namespace) -> Result:
    """Set two traces against each other."""
    checks.trace(options.first)
    checks.trace(options.second)
    from replayscope.inspector import compare as use_case
    from replayscope.inspector.metrics import METRICS

    tolerances = [parse_tolerance(text, METRICS) for text in options.tol]
    if options.floor is not None:
        checks.trace(options.floor)
    return use_case.compare(
        options.first,
        options.second,
        tolerances=tolerances,
        cross_arm=options.cross_arm,
        floor=options.floor,
        stop_at_first=options.stop_at_first,
    )


def import_(options: Namespace) -> Result:
    """An engine's own states as a trace."""
    checks.output(options.out, options.force)
    if options.out.suffix != ".h5":
        raise UsageError(f"{options.out}: a trace's name ends in .h5")
    choose("format", options.format, FORMATS)
    if (options.model is None) == (options.against is None):
        raise UsageError("give either --model with --prompt, or --against, whose config and prompt are taken")
    if options.against is not None:
        checks.trace(options.against)
        if options.prompt is not None:
            raise UsageError("--prompt is that of --against; leave it out")
    checks.apart(options.out, [options.against, options.source, options.map, _file_of(options.prompt)])
    for name in ("engine", "engine_version", "engine_commit"):
        value = getattr(options, name)
        if not value.strip() or not value.isprintable():
            raise UsageError(f"--{name.replace('_', '-')} is empty or cannot be printed; say who computed the states")
    asked = ImportOptions(
        source=options.source,
        format=options.format,
        map=options.map,
        engine=options.engine,
        engine_version=options.engine_version,
        engine_commit=options.engine_commit,
        out=options.out,
        model=options.model or "",
        prompt=options.prompt,
        against=options.against,
        arm=checks.arm(options.arm),
        cut=None if options.cut is None else parse_count(options.cut, "--cut"),
        replay=None if options.replay is None else parse_count(options.replay, "--replay", least=1),
        semantics=checks.semantics(options.semantics),
        steps=None if options.steps is None else checks.steps(options.steps),
        force=options.force,
    )
    from replayscope.inspector import importing

    return importing.import_trace(asked)


def show(options: Namespace) -> Result:
    """What a trace holds."""
    checks.trace(options.trace)
    from replayscope.inspector import summary

    return summary.show(options.trace, verify=options.verify, verbose=options.verbosity > 0)


def plot(options: Namespace) -> Result:
    """Draw figures of a trace into a file, or all of them into a folder."""
    checks.trace(options.trace)
    if options.other is not None:
        checks.trace(options.other)
        if options.figure != "compare":
            raise UsageError(f"{options.other}: a second trace is for --figure compare; leave it out")
    if options.figure == "all" and not options.out.suffix:
        checks.named(options.out)
        checks.folder_of(options.out)
    else:
        checks.output(options.out, options.force)
    from replayscope.inspector.metrics import METRICS
    from replayscope.ui import export

    if options.metric is not None:
        choose("metric", options.metric, METRICS)
    settings = _figure_settings(options)
    traces = [options.trace] if options.other is None else [options.trace, options.other]
    written = export.export(
        traces, options.figure, options.metric, options.out, force=options.force, dark=options.dark, **settings
    )
    return _written(written)


_SETTINGS = (
    "point", "region", "arm", "run", "reference", "other_arm", "layer", "head", "position", "threshold",
)  # fmt: skip


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _figure_settings(options: Namespace) -> dict:
    """What of --point, --region, --arm and the like was given, under the names that the figure has for it."""
    from replayscope.inspector.points import POINTS
    from replayscope.ui.figures import FIGURES

    figure = choose("figure", options.figure, [*FIGURES, "all"])
    given = {name: getattr(options, name) for name in _SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return {}
    if figure == "all":
        raise UsageError(f"{_flag(next(iter(given)))} is for one figure; name it with --figure")
    if "point" in given:
        choose("hook point", given["point"], list(POINTS))
    if "reference" in given:
        choose("reference", given["reference"], ["full", "oracle"])
    for name in ("run", "layer", "head", "position"):
        if name in given:
            given[name] = parse_count(given[name], f"--{name}")
    taken = signature(FIGURES[figure]).parameters
    renamed = {}
    for name, value in given.items():
        own = "bucket" if name == "region" else "arms" if name == "arm" and "arms" in taken else name
        if own not in taken:
            raise UsageError(f"figure {figure} has no {_flag(name)}; leave it out")
        renamed[own] = [value] if own == "arms" else value
    return renamed


def report(options: Namespace) -> Result:
    """Write the whole report of one or more traces as one HTML file."""
    for path in options.traces:
        checks.trace(path)
    checks.output(options.out, options.force)
    if options.out.suffix.lower() != ".html":
        raise UsageError(f"{options.out}: a report's name ends in .html")
    from replayscope.ui import report as page

    return _written([page.report(options.traces, options.out, force=options.force)])


def ui(options: Namespace) -> Result:
    """Serve the browser page until it is interrupted. Its result, the address, is told when the page can be opened."""
    if options.trace:
        checks.trace(options.trace)
    root = options.root or (options.trace.parent if options.trace else Path("."))
    if not root.is_dir():
        raise UsageError(f"no folder {root}; give --root an existing one")
    if options.trace and not options.trace.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{options.trace} is not under --root {root}; traces are opened only there")
    port = None if options.port is None else checks.port(options.port)
    from replayscope.traces.reader import TraceReader

    if options.trace:
        TraceReader(options.trace)  # refused before the page is loaded, which takes seconds
    from replayscope.ui import app

    app.serve(
        options.trace, root=root, host=options.host, port=port, auth=options.auth, allowed=options.allow_host,
        ready=lambda address: options.tell(Result("", {"address": address, "root": root.resolve()})),
    )  # fmt: skip
    raise AssertionError("the page is served until it is interrupted")


def ledger(options: Namespace) -> Result:
    """What a config costs to cache, to replay and to store, with formulas."""
    from replayscope.inspector import ledger as book
    from replayscope.inspector.cache_sizes import cache_of, load_config

    config = load_config(options.model)
    names = ("tokens", "contexts", "persistent", "global_hours", "window_minutes", "host_share", "host_memory")
    typed = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if typed.get("host_share", 0) > 100:
        raise UsageError(f"--host-share {typed['host_share']} is more than all of it; give 1 to 100 percent")
    if options.replay is not None:
        cache = cache_of(config)
        typed["replay"] = parse_replay(options.replay, window=cache.window, layers=cache.layers)
    figures = book.ledger(config, book.Inputs(**typed, given=frozenset(typed)))
    return Result(book.table(figures), {"model": options.model, "figures": book.as_json(figures)})


def list_(options: Namespace) -> Result:
    """What can be named."""
    rows = TOPICS[choose("topic", options.topic, list(TOPICS))]()
    if not rows:
        return Result(f"no {options.topic}", {options.topic: []})
    shown = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown)
    return Result("\n".join(line.rstrip() for line in lines), {options.topic: rows})


def _common(options: Namespace) -> dict:
    """The fields of options.Common."""
    if options.device and options.devices:
        raise UsageError("--device and --devices both say where to run; give one of them")
    names = ("devices", "dtype", "impl", "seed", "max_bytes", "force", "verbosity")
    return {"device": options.device or "auto"} | {name: getattr(options, name) for name in names}


def _run_options(options: Namespace) -> RunOptions:
    """The options of record and sweep, checked as far as no model is needed."""
    checks.output(options.out, options.force)
    if options.out.suffix != ".h5":
        raise UsageError(f"{options.out}: a trace's name ends in .h5")
    checks.apart(options.out, [_file_of(options.prompt)])
    if options.audit and options.dtype == "bf16":
        raise UsageError("--audit needs fp64 or fp32: in bf16 rounding hides what it looks for")
    model = options.model
    if model not in models() and not Path(model).is_dir() and not is_hf(model):
        forms = "a folder with a checkpoint, or a Hugging Face id (owner/name)"
        raise unknown("model", model, list(models()), shown=f"{', '.join(models())}, {forms}")
    if (options.chat or options.quantize) and not is_hf(model):
        raise UsageError(f"--{'chat' if options.chat else 'quantize'} is for Hugging Face models; {model} is none")
    return RunOptions(
        model=model,
        prompt=options.prompt,
        out=options.out,
        arms=tuple(checks.arm(name) for name in checks.names(options.arms, "arm")),
        cuts=options.cuts,
        replay=options.replay,
        suffix=options.suffix,
        hooks=tuple(glob for text in options.hooks for glob in split_globs(text)),
        semantics=tuple(checks.semantics(name) for name in checks.names(options.semantics, "semantics")),
        chunks=options.chunks,
        budget=options.budget,
        block=options.block,
        rows=options.rows,
        audit=options.audit,
        rounding=options.rounding,
        topk=options.topk,
        experts=options.experts,
        reproducible=options.reproducible,
        tokens=options.tokens,
        forced=options.forced,
        layers_only=options.layers_only,
        stream=options.stream,
        compression=options.compression,
        chat=options.chat,
        quantize=options.quantize,
        store_dtype=options.store_dtype,
        resume=options.resume,
        **_common(options),
    )


def _file_of(prompt: Prompt | None) -> str | None:
    return prompt.value if prompt is not None and prompt.kind == "file" else None


def _written(paths: Iterable[Path]) -> Result:
    names = [str(path) for path in paths]
    return Result("\n".join(names), {"written": names})
