"""Figures as files: html, csv, json, and png, svg, pdf where a browser is there to draw them.

The same trace gives the same bytes of html, csv and json.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.traces.errors import TraceExistsError
from replayscope.ui import page
from replayscope.ui.checked import CheckedReader, told
from replayscope.ui.figures import FIGURES, chart, figure
from replayscope.ui.grid import Chart, MapChart
from replayscope.ui.lines import LineChart
from replayscope.ui.page import facts
from replayscope.ui.theme import recolour

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
    """Write a figure, or `all` of them, and return the files written.

    out: a file whose ending names the format; for `all` also a folder, which gets one html per figure and is made if it
    is not there and its name has no ending. options: point, arm, bucket, run, reference of the figure. Raises
    UsageError for a name, an ending, a missing package or a missing browser, TraceError for a trace that is not sound,
    TraceExistsError for output that exists without `force`; then nothing is written.
    """
    traces: list[TraceReader] = [CheckedReader(path) for path in _paths(trace_paths)]
    choose("figure", figure_name, [*FIGURES, "all"])
    names = list(FIGURES) if figure_name == "all" else [figure_name]
    target = Path(out)
    folder = figure_name == "all" and (target.is_dir() or not target.suffix)
    kind = "html" if folder else _format(target)
    # Of a figure that is not for this metric `all` shows its own; by name it is an error.
    made = {
        _stem(name, trace, traces): _chart(trace, name, metric, figure_name == "all", options)
        for trace in traces
        for name in names
    }
    if folder:
        files = {target / f"{stem}.html": {stem: one} for stem, one in made.items()}
        if target.exists() and not target.is_dir():
            raise UsageError(f"{target} is a file, not a folder; give another -o")
        for file in files:
            _check(file, force)
        target.mkdir(parents=True, exist_ok=True)
        return [_write(file, charts, kind, force, dark) for file, charts in files.items()]
    if len(made) > 1 and kind not in ("html", "json"):
        raise UsageError(f"{kind} holds one figure; name one with --figure, or give a folder, .html or .json for all")
    return [_write(target, made, kind, force, dark)]


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


def _stem(name: str, trace: TraceReader, traces: list[TraceReader]) -> str:
    return name if len(traces) == 1 else f"{trace.path.stem}-{name}"


def _chart(trace: TraceReader, name: str, metric: str | None, lenient: bool, options: dict) -> Chart:
    with told(trace.path, f"figure {name}"):
        if not lenient:
            return chart(trace, name, metric, **options)
        try:
            return chart(trace, name, metric, **options)
        except UsageError:
            return chart(trace, name)


def _write(target: Path, charts: dict[str, Chart], kind: str, force: bool, dark: bool) -> Path:
    """Write whole or not at all: the bytes are complete before the name appears."""
    _check(target, force)
    if not target.parent.is_dir():
        raise UsageError(f"no folder {target.parent} to write {target.name} into; make it first")
    one = next(iter(charts.values()))
    if kind in IMAGES:
        data = _image(one, kind, dark)
    else:
        with told(one.meta["trace"], f"figure as {kind}"):
            data = {"html": _html, "csv": lambda _: table(one), "json": document}[kind](charts).encode()
    write_bytes(target, data)
    return target


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
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _html(charts: dict[str, Chart]) -> str:
    figures = [figure(one) for one in charts.values()]
    first = next(iter(charts.values()))
    body = "\n".join(page.card(i, one) for i, one in enumerate(figures))
    title = first.title if len(charts) == 1 else f"{first.meta['trace']}: {len(charts)} figures"
    return page.document(title, first.meta["trace"], body, figures)


def _image(one: Chart, kind: str, dark: bool) -> bytes:
    package = f"{kind} needs the package kaleido: pip install 'replayscope[export]'"
    # Plotly raises the same RuntimeError for a missing package and for a missing browser.
    if find_spec("kaleido") is None:
        raise UsageError(f"{package}; {_ELSE}")
    with told(one.meta["trace"], f"figure as {kind}"):
        drawn = recolour(figure(one)) if dark else figure(one)
    try:
        return drawn.to_image(format=kind, width=WIDTH, height=facts(drawn)["height"], scale=2)
    except (ImportError, ValueError) as error:
        if "kaleido" not in str(error).lower():
            raise
        raise UsageError(f"{package} (the one that is there cannot be used); {_ELSE}") from error
    except (RuntimeError, OSError) as error:
        raise UsageError(f"{kind} needs Chrome or Chromium, and none could be started; {_ELSE}") from error


def columns(one: Chart) -> tuple[list[str], list[list]]:
    """The numbers of a chart as a long table: names, and one row per cell or point; NaN where there is no number."""
    if isinstance(one, MapChart):
        return _map_columns(one)
    assert isinstance(one, LineChart)
    names = ["arm", "cut", "mean", "largest_row", "last_row", "rows", "top1_flips", "floor"]
    floor = one.floor if one.floor is not None else np.full(len(one.cuts), np.nan)
    rows = [
        [line.label, cut, *(float(v[i]) for v in (line.mean, line.largest, line.last)),
         int(np.nan_to_num(line.n[i])), int(np.nan_to_num(line.flips[i])), float(floor[i])]
        for line in one.lines
        for i, cut in enumerate(one.cuts)
        if np.nan_to_num(line.n[i]) > 0
    ]  # fmt: skip
    return names, rows


def _map_columns(one: MapChart) -> tuple[list[str], list[list]]:
    grid = one.grid
    place = ["cut"] if one.column == "H" else [f"{one.column}_first", f"{one.column}_last"]
    names = [*place, "layer", "value", "rows", "floor", "class", "must_be_exact"]
    rows = []
    for c, (a, b) in enumerate(zip(grid.start, grid.stop, strict=True)):
        where = [int(a)] if one.column == "H" else [int(a), int(b) - 1]
        for r, layer in enumerate(grid.rows):
            rows.append([
                *where, int(layer) if layer.isdecimal() else layer, float(grid.value[r, c]), int(grid.n[r, c]),
                float(grid.floor[r, c]), str(grid.kind[r, c]), bool(grid.exact[r, c]),
            ])  # fmt: skip
    return names, rows


def table(one: Chart) -> str:
    """A chart as CSV, every cell at full resolution; `inf` and `nan` are written as such."""
    names, rows = columns(one)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return out.getvalue()


def document(charts: dict[str, Chart]) -> str:
    """Charts as one strict JSON document, a row a line; infinities are "inf" and "-inf", NaN is null.

    One chart is the document itself; several stand under their names in `figures`.
    """
    texts = {name: _chart_json(name, one) for name, one in charts.items()}
    if len(texts) == 1:
        return next(iter(texts.values())) + "\n"
    return '{"figures": {\n' + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "\n}}\n"


def _chart_json(name: str, one: Chart) -> str:
    names, rows = columns(one)
    head = {
        **one.meta, "figure": name, "title": one.title, "sentence": one.sentence, "notes": list(one.notes),
        "columns": names,
    }  # fmt: skip
    said = json.dumps(head, ensure_ascii=False, allow_nan=False, sort_keys=True)
    lines = ",\n".join(json.dumps([_strict(v) for v in row], ensure_ascii=False, allow_nan=False) for row in rows)
    return f'{said[:-1]},\n"rows": [\n{lines}\n]}}'


def _strict(value: object) -> object:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "inf" if value > 0 else "-inf"
