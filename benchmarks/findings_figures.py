"""The figures of docs/findings.md, in the house's look."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from replayscope.ui.curves import Curve, CurveChart, draw_curves
from replayscope.ui.theme import LIGHT

Record = dict[str, Any]


def figures(findings: list[Record]) -> dict[str, go.Figure]:
    """name → figure; one curve per model."""
    return {
        "layers": _chart(
            findings,
            "The rebuilt window is off in every layer but the first",
            "layer",
            "window KV, relative L2",
            lambda f: [(l, m) for l, m in enumerate(f["layers"]["window_kv window"])],
        ),
        "lengths": _chart(
            findings,
            "A longer replay: how fast the window's error falls",
            "replay length R, tokens",
            "window KV of the worst layer, relative L2",
            lambda f: [(r["replay"], r["window"]) for r in f["lengths"]],
        ),
        "distance": _chart(
            findings,
            "Behind the cut the error of an encoder replay fades",
            "tokens behind the cut",
            "KL(full‖encoder), nats",
            lambda f: [(r["from"] + 1, r["kl"]) for r in f["distance"]["encoder"]],
            log_x=True,
        ),
        "decoding": _chart(
            findings,
            "Decoding after a decoder replay",
            "decoded token",
            "KL(full‖decoder), nats",
            lambda f: [(r["from"] + 1, r["kl"]) for r in f["distance"]["decoder"]],
            log_x=True,
        ),
        "hits": _chart(
            findings,
            "One hit or eight: the error at the end is the same",
            "hits with encoder replay",
            "KL over the last eighth, nats",
            lambda f: [(r["hits"], r["kl"]) for r in f["hits"]],
        ),
    }


def curve(points: list[Record], names: tuple[str, ...]) -> go.Figure:
    """Running share of right answers by tokens of training, from the curve in a model's header."""
    tokens = np.array([p["tokens"] / 1e6 for p in points])
    colours = LIGHT.arms[: len(names)]
    curves = tuple(
        Curve(name, tokens, np.array([p[name] for p in points]), [f"{name}: {p[name]:.2f}" for p in points], colour)
        for name, colour in zip(names, colours, strict=True)
    )
    return draw_curves(
        CurveChart(
            title="Retrieval is learned in steps, sums are not",
            sentence="running share of the training's answers that are right; a new lesson halves it",
            curves=curves,
            axis="tokens, millions",
            label="answers right",
            log=False,
            span=(0.0, float(tokens[-1])),
        ),
        height=380,
    )


def _chart(findings: list[Record], title: str, x: str, y: str, points: Any, log_x: bool = False) -> go.Figure:
    colours = (LIGHT.magnitude[5], LIGHT.magnitude[2])
    curves, ticks = [], {}
    for f, colour in zip(findings, colours, strict=False):
        found = [(at, m) for at, m in points(f) if m["n"]]
        place = np.array([np.log2(at) if log_x else at for at, _ in found], float)
        ticks |= dict(zip(place.tolist(), (f"{at:g}" for at, _ in found), strict=True))
        for which, weight, dash in (("median", 2.5, "solid"), ("low", 1.0, "dot"), ("high", 1.0, "dot")):
            values = np.array([m[which] for _, m in found])
            hover = [f"{f['model']}: {v:.3g}" for v in values]
            listed = which == "median"
            curves.append(Curve(f["model"], place, values, hover, colour, weight, dash, marks=listed, listed=listed))
    span = (min(ticks, default=0.0), max(ticks, default=1.0))
    chart = CurveChart(
        title=title,
        sentence="medians over texts and cuts, dotted: 95 % intervals",
        curves=tuple(curves),
        axis=x,
        label=y,
        span=span,
        ticks=tuple(sorted(ticks.items())),
    )
    return draw_curves(chart, height=380)
