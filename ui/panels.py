"""Several maps under one title: each keeps its axes, its colour bar and its marks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from replayscope.ui.grid import MAX_CELLS, Chart, MapChart
from replayscope.ui.heading import heading
from replayscope.ui.heatmap import draw
from replayscope.ui.theme import LIGHT, escape, template

GAP = 72  # pixels between two panels: an axis title below the upper one, a name and marks above the lower one


def draw_panels(chart: Chart, panels: dict[str, MapChart]) -> go.Figure:
    """One figure with the maps one below the other, each under its name; `chart` has title, sentence and notes.

    The maps share the number of cells that a figure may have; what was merged is said once.
    """
    drawn = {name: draw(one, cells=MAX_CELLS // len(panels)) for name, one in panels.items()}
    said = dict.fromkeys(note for part in drawn.values() for note in _meta(part)["notes"])
    chart = replace(chart, notes=(*chart.notes, *said))
    heights = [max(64, min(420, 18 * max(one.grid.shape[0], 1))) for one in panels.values()]
    total = sum(heights) + GAP * (len(heights) - 1)
    figure = go.Figure(layout={"template": template()})
    top, key = 1.0, []
    for i, ((name, part), height) in enumerate(zip(drawn.items(), heights, strict=True)):
        bottom = top - height / total
        n = "" if i == 0 else str(i + 1)
        _add(figure, part, n, (max(0.0, bottom), top), {entry for entry in key if isinstance(entry, str)}, name, total)
        key += [entry for entry in _meta(part)["key"] if entry not in key]
        top = bottom - GAP / total
    first: Any = next(iter(drawn.values()))
    heading(figure, chart, total + 170, key, _meta(first)["columns"])
    meta: Any = figure.layout["meta"]
    pooled = any(_meta(part)["pooled"] for part in drawn.values())
    figure.update_layout(meta=meta | {"pooled": pooled, "cut": _meta(first)["cut"]})
    return figure


def _meta(figure: go.Figure) -> dict:
    meta: Any = figure.layout["meta"]
    return meta


def _add(
    figure: go.Figure, part: go.Figure, n: str, domain: tuple[float, float], seen: set[str], name: str, total: float
) -> None:
    """Moves what a map draws onto axes of its own, which lie in `domain` of the height."""
    layout: Any = part.layout
    for trace in part.data:
        moved: Any = trace
        moved.update(xaxis=f"x{n}", yaxis=f"y{n}")
        if moved.type == "heatmap" and moved.showscale is not False:
            moved.colorbar.update(y=domain[0], yanchor="bottom", len=domain[1] - domain[0], lenmode="fraction")
        if moved.name in seen:
            moved.showlegend = False
        figure.add_trace(moved)
    for shape in layout.shapes:
        figure.add_shape(_moved(shape.to_plotly_json(), n))
    for note in layout.annotations:
        figure.add_annotation(_moved(note.to_plotly_json(), n))
    marked = [note.x for note in layout.annotations if note.yref == "paper" and note.y == 1 and note.xref != "paper"]
    left = not marked or min(marked) > 0.4 * layout.xaxis.range[1]
    figure.add_annotation(
        text=f"<b>{escape(name)}</b>", x=0 if left else 1, xref="paper", xanchor="left" if left else "right",
        y=domain[1], yref="paper", yanchor="bottom", yshift=2, xshift=-3 if left else 3, showarrow=False,
        font={"size": 13, "color": LIGHT.ink},
    )  # fmt: skip
    figure.update_layout({
        f"xaxis{n}": layout.xaxis.to_plotly_json() | {"anchor": f"y{n}"},
        f"yaxis{n}": layout.yaxis.to_plotly_json() | {"anchor": f"x{n}", "domain": list(domain)},
        "barmode": "overlay", "bargap": 0,
        "legend": {"itemclick": False, "itemdoubleclick": False, "itemsizing": "trace", "y": -56 / total},
    })  # fmt: skip


def _moved(item: dict, n: str) -> dict:
    """A shape or annotation with its references on the axes numbered `n`; `paper` becomes the panel itself."""
    for axis in ("x", "y"):
        reference = item.get(f"{axis}ref", axis)
        item[f"{axis}ref"] = f"{axis}{n} domain" if reference == "paper" else f"{axis}{n}"
    return item
