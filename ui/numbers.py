"""The numbers of a figure as a long table, in CSV and JSON. The same chart gives the same bytes."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np

from replayscope.ui.compare import CompareChart
from replayscope.ui.curves import CurveChart
from replayscope.ui.grid import Chart, MapChart
from replayscope.ui.lines import LineChart
from replayscope.ui.tensor import TensorChart


def columns(one: Chart) -> tuple[list[str], list[list]]:
    """The numbers of a chart as a long table: names, and one row per cell or point; NaN where there is no number."""
    if isinstance(one, TensorChart | CompareChart):
        tables = {name: _map_columns(panel) for name, panel in one.panels.items()}
        names = next(iter(tables.values()))[0]
        return ["panel", *names], [[panel, *row] for panel, (_, rows) in tables.items() for row in rows]
    if isinstance(one, MapChart):
        return _map_columns(one)
    if isinstance(one, CurveChart):
        return list(one.names), one.rows
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
    alone = one.column in ("H", "channel")
    place = ["cut" if one.column == "H" else one.column] if alone else [f"{one.column}_first", f"{one.column}_last"]
    kind = ["layer_kind"] if one.row == "layer" else []
    names = [*place, one.row, *kind, "value", "rows", "floor", "class", "must_be_exact"]
    rows = []
    for c, (a, b) in enumerate(zip(grid.start, grid.stop, strict=True)):
        where = [int(a)] if alone else [int(a), int(b) - 1]
        for r, label in enumerate(grid.rows):
            plain = label.replace(",", "")
            said = [one.kinds[r] if one.kinds else ""] if kind else []
            rows.append([
                *where, int(plain) if plain.isdecimal() else label, *said, float(grid.value[r, c]), int(grid.n[r, c]),
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
