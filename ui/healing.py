"""From a trace to curves: how many tokens after the cut an error needs to fall below a threshold, layer by layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from replayscope.inspector.errors import UsageError
from replayscope.inspector.layer_kinds import named
from replayscope.traces import TraceReader
from replayscope.traces.schema import THRESHOLDS, RunInfo, kind_of
from replayscope.ui.cells import checked_table, row_kinds
from replayscope.ui.curves import Curve, CurveChart
from replayscope.ui.series import Series, pick
from replayscope.ui.states import NotRecorded
from replayscope.ui.theme import LIGHT, count, number, plural
from replayscope.ui.words import POINT_WORDS, against, arm_words, context, suffix_and_design

_NEVER = "not in the suffix"
_SIDE_BY_SIDE = 14  # layer kinds that fit on the axis
# Decades above the threshold that are drawn too, the larger errors darker.
DECADES = {2: LIGHT.magnitude[4], 1: LIGHT.magnitude[3], 0: LIGHT.ink, -1: LIGHT.magnitude[2]}


def healing_chart(
    trace: TraceReader,
    point: str = "hidden",
    metric_name: str = "rel_l2",
    arm: str | None = None,
    reference: str = "full",
    threshold: float = 1e-3,
) -> CurveChart:
    """x = layer (the cut, for a point that has one layer), y = tokens after the cut until no row is above a threshold.

    The worst cut of an arm, at the threshold and at its neighbours by decades, and the median cut at the threshold.
    From the last positions that a trace keeps for each decade, so that no rows are needed; `threshold` is moved up to
    the next decade. Raises NotRecorded for an arm without a cut behind the first window, UsageError on unknown names.
    """
    if kind_of(point) == "discrete":
        raise UsageError(f"{point} has no relative L2; take a hook point of states, such as hidden")
    table = checked_table(trace, reference, point, metric_name, "suffix")
    if metric_name != "rel_l2" or "last_at" not in table.arrays:
        raise UsageError("healing is told in the relative L2 of single rows; leave --metric out")
    one = pick(trace, arm)
    runs = [run for run in one.runs if run.cut is not None and run.start > 0]
    if not runs:
        raise NotRecorded(
            f"{trace.path}: no cut of {one.label} lies behind its replay; record later --cuts" if one.has_cut else
            f"{trace.path}: {one.label} has no cut; record an arm that has one, with --arms full,encoder --cuts SPEC"
        )  # fmt: skip
    at = next((k for k, t in enumerate(THRESHOLDS) if t >= threshold * (1 - 1e-9)), len(THRESHOLDS) - 1)
    threshold = THRESHOLDS[at]
    n = np.stack([table.arrays["n"][run.index, :, table.bucket("suffix")] for run in runs])
    distance = np.stack([_after(table.arrays["last_at"][run.index], run) for run in runs])
    distance = np.where(n[:, :, None] > 0, distance, np.nan)  # [run, layer, threshold]
    by_cut = distance.shape[1] == 1
    if by_cut:
        distance = distance.transpose(1, 0, 2)
    across = distance.shape[1]
    cuts = [run.cut or 0 for run in runs]
    texts = [count(c) for c in cuts] if by_cut else [str(layer) for layer in range(across)]
    kinds = row_kinds(trace, across) if not by_cut else ()
    suffix, design = suffix_and_design(trace, one)
    scope = "" if by_cut else f", worst of {plural(len(runs), 'cut')}"
    return CurveChart(
        title=_title(one, point, distance[:, :, at], threshold, by_cut),
        sentence=f"tokens after the cut until no row of the {POINT_WORDS[point]} is above a relative L2{scope}, "
        f"against {against(reference)} · {context(trace, one)}",
        meta={
            "trace": trace.path.name, "arm": one.arm, "semantics": one.semantics, "replay": one.replay,
            "design": design, "suffix": suffix, "point": point, "metric": metric_name, "unit": "tokens",
            "region": "suffix", "reference": reference, "threshold": threshold, "tokens": len(trace.tokens.ids),
            "window": one.runs[0].window,
        },
        curves=_curves(distance, at, texts if by_cut else [named(text, kinds) for text in texts], cuts, by_cut),
        axis="cut H, tokens of cached prefix (one step per cut)" if by_cut else "layer",
        label="tokens after the cut",
        infinite=_NEVER,
        ticks=_ticks(texts, kinds),
        span=(-0.3, max(across, 1) - 0.7),
        limits=((float(one.runs[0].window), f"W = {count(one.runs[0].window)}"),),
        empty="nothing computed here",
        names=("cut", "layer", "layer_kind", "threshold", "tokens_after_cut", "rows"),
        rows=[
            [cuts[r], point if by_cut else layer, kinds[layer] if kinds else "", t, float(d), int(n[r, layer])]
            for r in range(len(runs)) for layer in range(n.shape[1]) for k, t in enumerate(THRESHOLDS)
            for d in (distance[0, r, k] if by_cut else distance[r, layer, k],) if n[r, layer] > 0
        ],
        columns=tuple(cuts) if by_cut else (),
    )  # fmt: skip


def _after(last_at: np.ndarray, run: RunInfo) -> np.ndarray:
    """Tokens from the cut to behind the last row above each threshold: [layer, threshold]; 0 if no row of the suffix
    is, inf if the last row that was run still is."""
    tokens = np.maximum(last_at - (run.cut or 0) + 1, 0).astype(float)
    return np.where(last_at >= run.stop - 1, np.inf, tokens)


def _curves(distance: np.ndarray, at: int, texts: list[str], cuts: list[int], by_cut: bool) -> tuple[Curve, ...]:
    """The worst over the first axis at four decades, and its median at the threshold itself."""
    x = np.arange(distance.shape[1], dtype=float)
    curves = []
    for step, colour in DECADES.items():
        k = at + step
        if not 0 <= k < len(THRESHOLDS):
            continue
        worst = np.fmax.reduce(distance[:, :, k], axis=0)
        hover = []
        for i, text in enumerate(texts):
            far = distance[:, i, k]
            cut = cuts[i] if by_cut else cuts[int(np.nan_to_num(far, nan=-1.0).argmax())]
            where = f"H {text}" if by_cut else f"layer {text}"
            value = float(worst[i])
            said = "not within the suffix" if np.isinf(value) else f"{number(value, 4)} tokens after the cut"
            hover.append(f"<b>{where}</b><br>no row above {number(THRESHOLDS[k])}: <b>{said}</b>"
                         f"{'' if by_cut else f'<br>worst at cut {count(cut)}'}")  # fmt: skip
        curves.append(
            Curve(f"below {number(THRESHOLDS[k])}", x, worst, hover, colour, 1.6 if step else 2.6, marks=not step)
        )
    if len(distance) > 1:
        value = np.array([np.median(column[~np.isnan(column)]) if (~np.isnan(column)).any() else np.nan
                          for column in distance[:, :, at].T])  # fmt: skip
        above = f"no row above {number(THRESHOLDS[at])}"
        hover = [f"<b>layer {text}</b><br>{above}: median cut {number(float(v), 4)} tokens"
                 for text, v in zip(texts, value, strict=True)]  # fmt: skip
        curves.append(Curve(f"below {number(THRESHOLDS[at])}, median cut", x, value, hover, LIGHT.ink, 1.2, "dot"))
    return tuple(curves)


def _title(one: Series, point: str, distance: np.ndarray, threshold: float, by_cut: bool) -> str:
    who, what, limit = arm_words(one.arm), POINT_WORDS[point], number(threshold)
    worst = np.fmax.reduce(distance, axis=0)
    known = worst[~np.isnan(worst)]
    if not known.size:
        return f"{who} computes no {what} in the suffix"
    head = f"{who}: the difference in the {what} is back below {limit}"
    healed = known[np.isfinite(known)]
    noun = "cut" if by_cut else "layer"
    if not healed.size:
        return f"{who}: the difference in the {what} stays above {limit} to the end, at every {noun}"
    most = int(healed.max())
    far = "from the cut on" if most == 0 else f"at most {plural(most, 'token')} after the cut"
    where = "" if len(known) == 1 else f" at every {noun}" if len(healed) == len(known) else (
        f" at {count(len(healed))} of {plural(len(known), noun)}, and stays above it to the end at the others"
    )  # fmt: skip
    return f"{head} {far}{where}"


def _ticks(texts: list[str], kinds: tuple[str, ...]) -> tuple[tuple[float, str], ...]:
    """Places and texts on x; a layer's kind stands below its number where one begins, unless they would touch."""
    begins = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    closest = min((b - a for a, b in pairwise(begins)), default=0)
    if closest * _SIDE_BY_SIDE < len(texts):
        begins = []
    step = max(1, -(-len(texts) // 24))
    shown = {*range(0, len(texts), step), len(texts) - 1, *begins}
    return tuple((float(i), f"{texts[i]}\n{kinds[i]}" if i in begins else texts[i]) for i in sorted(shown))
