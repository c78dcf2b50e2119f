"""The figures of docs/findings.md, in the house's look."""

from collections import defaultdict
from typing import Any

import numpy as np
import plotly.graph_objects as go

from replayscope.model import tasks
from replayscope.model.train_recipe import RUNGS, Recipe
from replayscope.ui.curves import Curve, CurveChart, draw_curves
from replayscope.ui.theme import LIGHT

Record = dict[str, Any]


def figures(findings: list[Record]) -> dict[str, go.Figure]:
    """name → figure; one curve per model, and for each model one on what its windows carry."""
    return {f"carried-{f['model']}": carried(f) for f in findings} | {
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


def carried(finding: Record) -> go.Figure:
    """Share of a relay's answers that are right, by distance, one curve per replay length."""
    W, by_replay = finding["window"], defaultdict[int | None, list[Record]](list)
    # `full`, which has no replay length, comes last, on top of the others.
    for r in sorted(finding["carried"], key=lambda r: r["arm"] == "full"):
        if r["arm"] in ("full", "encoder"):
            by_replay[r["replay"]].append(r)
    colours = (*LIGHT.magnitude[:0:-1][: len(by_replay) - 1], LIGHT.ink)
    curves = []
    for (replay, found), colour in zip(by_replay.items(), colours, strict=True):
        label = "full" if replay is None else f"R = {replay // W if replay > W else ''}W"
        gaps, share = np.array([r["gap"] for r in found], float), np.array([r["kept"] / r["asked"] for r in found])
        hover = [f"{label}, {r['gap']} tokens: {r['kept']} of {r['asked']}" for r in found]
        dash = "dash" if replay is None else "solid"
        curves.append(Curve(label, gaps, share, hover, colour, 2.5, dash, marks=True))
    places = sorted({r["gap"] for r in finding["carried"]})
    return draw_curves(
        CurveChart(
            title=f"{finding['model']}: which numbers outlive a replay of R tokens",
            sentence=f"share of right answers of {finding['carried'][0]['asked']} per distance; W = {W}",
            curves=tuple(curves),
            axis="tokens from the number to the cut",
            label="right answers",
            log=False,
            span=(places[0], places[-1]),
            ticks=tuple((float(p), str(p)) for p in places),
            limits=((tasks.TASKS["relay"].chance, "a guess"),),
        ),
        height=380,
    )


def curve(points: list[Record]) -> go.Figure:
    """What each task has climbed to, by tokens of training, from the curve in a model's header.

    A rung that is solved counts 1, the present one its running share of right answers; the ladder's length is 1.
    """
    recipe = Recipe()
    tokens = np.array([p["tokens"] / 1e6 for p in points])
    names = [k.removesuffix(".rung") for k in points[0] if k.endswith(".rung")]
    curves = []
    for i, name in enumerate(names):
        height = np.array([p[f"{name}.rung"] + p[f"{name}.right"] for p in points]) / len(recipe.ladder(name))
        hover = [f"{name}: {h:.2f}" for h in height]
        # More tasks than colours: the second time round a colour is dashed.
        again, colour = divmod(i, len(LIGHT.arms))
        curves.append(Curve(name, tokens, height, hover, LIGHT.arms[colour], dash="dash" if again else "solid"))
    steps = [f"{rung.length}" + (" hard" if rung.level > 1 else "") for rung in RUNGS]
    return draw_curves(
        CurveChart(
            title="Every task climbs from short and dense to long and sparse",
            sentence="share of the ladder climbed; its rungs: " + ", ".join(steps) + "; a relay has others",
            curves=tuple(curves),
            axis="tokens, millions",
            label="ladder climbed",
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
