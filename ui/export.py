"""Figures as files: html, csv and json, and png, svg and pdf where a browser or matplotlib is there to draw them.

The same trace gives the same bytes of html, csv and json.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from replayscope.inspector.checks import apart
from replayscope.inspector.errors import UsageError, system_error
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.traces.errors import TraceExistsError
from replayscope.ui import browser, page
from replayscope.ui.checked import CheckedReader, told
from replayscope.ui.figures import FIGURES, chart, figure
from replayscope.ui.grid import Chart
from replayscope.ui.numbers import document, table
from replayscope.ui.page import facts
from replayscope.ui.states import NotRecorded
from replayscope.ui.theme import recolour

log = logging.getLogger(__name__)
FORMATS = ("html", "png", "svg", "pdf", "csv", "json")
IMAGES = ("png", "svg", "pdf")
WIDTH = 1100  # of images, in pixels
_ELSE = "html, csv and json need no browser and no further package"


def export(
    trace_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    figure_name: str,
    metric: str | None,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    dark: bool = False,
    **options,
) -> list[Path]:
    """Write a figure, or `all` that the trace has the parts for, and return the files written.

    out: a file whose ending names the format; for `all` also a folder, which gets one html per figure and is made if it
    is not there and its name has no ending. Two traces and `compare` make one figure. options: point, arm, bucket, run,
    reference and whatever else the figure takes. Raises UsageError for a name, an ending, an image that nothing here
    can draw, output that is one of the traces, and for a figure asked by name that the trace lacks the parts for;
    TraceError for a trace that is not sound, TraceExistsError for output that exists without `force`; then nothing is
    written.
    """
    paths = _paths(trace_paths)
    traces: list[TraceReader] = [CheckedReader(path) for path in paths]
    choose("figure", figure_name, [*FIGURES, "all"])
    target = Path(out)
    apart(target, paths)
    folder = figure_name == "all" and (target.is_dir() or not target.suffix)
    kind = "html" if folder else _format(target)
    several = figure_name == "all" or (len(traces) > 1 and figure_name != "compare")
    if several and kind not in ("html", "json"):
        raise UsageError(f"{kind} holds one figure; name one with --figure, or give a folder, .html or .json for all")
    left: list[str] = []
    if figure_name == "all":
        made, left = _all(traces, metric, options)
    else:
        made = _named(traces, figure_name, metric, options)
    if folder:
        files = {target / f"{stem}.html": {stem: one} for stem, one in made.items()}
        if target.exists() and not target.is_dir():
            raise UsageError(f"{target} is a file, not a folder; give another -o")
        for file in files:
            _check(file, force)
            apart(file, paths)
        target.mkdir(parents=True, exist_ok=True)
    else:
        files = {target: made}
    written = [_write(file, charts, kind, force, dark) for file, charts in files.items()]
    for note in left:
        log.info("%s", note)
    return written


def _format(target: Path) -> str:
    kind = target.suffix[1:].lower()
    if kind not in FORMATS:
        shown = f"no format {target.suffix!r}" if kind else "the name has no ending, which says the format"
        raise UsageError(f"{target.name}: {shown}; valid endings: {', '.join('.' + f for f in FORMATS)}")
    return kind


def _paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    if isinstance(paths, str | os.PathLike):
        return [Path(paths)]
    return [Path(path) for path in paths]


def _named(traces: list[TraceReader], name: str, metric: str | None, options: dict) -> dict[str, Chart]:
    """One figure of each trace, or the comparison of two."""
    if name == "compare" and len(traces) == 2:
        with told(f"{traces[0].path} and {traces[1].path}", "figure compare"):
            return {name: chart(traces[0], name, metric, other=traces[1], **options)}
    made = {}
    for trace in traces:
        with told(trace.path, f"figure {name}"):
            made[_stem(name, trace, traces)] = chart(trace, name, metric, **options)
    return made


def _all(traces: list[TraceReader], metric: str | None, options: dict) -> tuple[dict[str, Chart], list[str]]:
    """Every figure that a trace has the parts for, and why others are left out. One that is not for this metric is
    shown in its own."""
    made, left = {}, []
    for trace in traces:
        for name in FIGURES:
            with told(trace.path, f"figure {name}"):
                try:
                    made[_stem(name, trace, traces)] = _lenient(trace, name, metric, options)
                except NotRecorded as error:
                    left.append(f"figure {name} left out: {error}")
        if not made:
            raise NotRecorded(f"{trace.path}: no figure can be made of this trace; record it with full and another arm")
    return made, left


def _lenient(trace: TraceReader, name: str, metric: str | None, options: dict) -> Chart:
    try:
        return chart(trace, name, metric, **options)
    except NotRecorded:
        raise
    except UsageError:
        return chart(trace, name)


def _stem(name: str, trace: TraceReader, traces: list[TraceReader]) -> str:
    return name if len(traces) == 1 else f"{trace.path.stem}-{name}"


def _write(target: Path, charts: dict[str, Chart], kind: str, force: bool, dark: bool) -> Path:
    """Write whole or not at all: the bytes are complete before the name appears."""
    _check(target, force)
    if not target.parent.is_dir():
        raise UsageError(f"no folder {target.parent} to write {target.name} into; make it first")
    one = next(iter(charts.values()))
    data = image(one, kind, dark) if kind in IMAGES else encoded(charts, kind)
    write_bytes(target, data)
    return target


def encoded(charts: dict[str, Chart], kind: str) -> bytes:
    """Charts by name as html, csv (the first of them) or json."""
    one = next(iter(charts.values()))
    with told(one.meta["trace"], f"figure as {kind}"):
        return {"html": _html, "csv": lambda _: table(one), "json": document}[kind](charts).encode()


def _check(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise TraceExistsError(f"{target} exists; add --force to replace it")


def write_bytes(target: Path, data: bytes) -> None:
    """Replace a file by whole contents; a failure leaves what was there."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {system_error(error)}") from error
    finally:
        part.unlink(missing_ok=True)


def _html(charts: dict[str, Chart]) -> str:
    figures = [figure(one) for one in charts.values()]
    first = next(iter(charts.values()))
    body = "\n".join(page.card(i, one) for i, one in enumerate(figures))
    title = first.title if len(charts) == 1 else f"{first.meta['trace']}: {len(charts)} figures"
    return page.document(title, first.meta["trace"], body, figures)


def image(one: Chart, kind: str, dark: bool = False) -> bytes:
    """A chart as png, svg or pdf: drawn by a browser through kaleido, or else by matplotlib if it is installed.

    Raises UsageError in one line if neither can.
    """
    with told(one.meta["trace"], f"figure as {kind}"):
        shown = recolour(figure(one)) if dark else figure(one)
    # Plotly raises the same RuntimeError for a missing package and for a missing browser.
    reason = "the package kaleido is missing" if find_spec("kaleido") is None else ""
    if not reason:
        try:
            return browser.drawn(shown, kind, WIDTH, facts(shown)["height"])
        except (ImportError, ValueError) as error:
            if "kaleido" not in str(error).lower():
                raise
            reason = "the package kaleido that is there cannot be used"
        except (RuntimeError, OSError):
            reason = "no Chrome or Chromium could be started"
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"{kind} cannot be drawn: {reason}, and matplotlib is not installed "
            f"(pip install 'replayscope[export]', and a browser; or pip install matplotlib); {_ELSE}"
        )
    from replayscope.ui import printed

    log.info("%s drawn by matplotlib: %s", kind, reason)
    with told(one.meta["trace"], f"figure as {kind}"):
        return printed.render(shown, kind, WIDTH, facts(shown)["height"])
