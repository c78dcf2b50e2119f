"""From a trace to curves: the logits of one run, token by token along the suffix."""

from __future__ import annotations

import numpy as np

from replayscope.inspector.metrics import METRICS
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.ui.curves import Curve, CurveChart
from replayscope.ui.flips import ROW_METRICS, LogitRows, logit_rows
from replayscope.ui.grid import DESIGN, FLIP, NOISE
from replayscope.ui.heatmap import CLASS_WORDS
from replayscope.ui.series import run_of, series_of
from replayscope.ui.theme import LIGHT, count, number, plural
from replayscope.ui.tokens import flip_words, plain, shown
from replayscope.ui.words import against, arm_words, context, metric_words

MOST_POINTS = 20_000


def suffix_chart(
    trace: TraceReader,
    run: int | None = None,
    metric_name: str = "kl",
    arm: str | None = None,
    reference: str = "full",
) -> CurveChart:
    """x = absolute position, y = KL (or its reverse, JS, or the change of log p) of the logits there, for one run.

    run: index; None takes the middle cut of `arm`. Raises NotRecorded where rows were not kept.
    """
    choose("metric of this figure", metric_name, ROW_METRICS)
    info = run_of(trace, run, arm)
    rows = logit_rows(trace, info, reference)
    value = rows.value[metric_name]
    keep = _peaks(value, [f.position for f in rows.flips], rows.position)
    hover = _hover(trace, rows, metric_name, keep)
    curves = _curves(rows, metric_name, keep, hover)
    at = {int(p): (v, h) for p, v, h in zip(rows.position[keep], value[keep], hover, strict=True)}
    floor, signed = rows.floor.get(metric_name, np.nan), METRICS[metric_name].scale == "signed"
    ends = np.array([rows.position[0], rows.position[-1]]) if len(rows.position) else np.zeros(2)
    shown_of = f"{count(len(keep))} of {count(len(value))} rows, every peak among them"
    marks = [(float(info.cut), f"cut H {count(info.cut)}, then the suffix", True)] if info.cut is not None else []
    return CurveChart(
        title=_title(rows, metric_name),
        sentence=f"{metric_words(metric_name)} of the logits after each token, against {against(reference)} · "
        f"{context(trace, series_of(trace, info), info)} · run {info.index}",
        notes=() if len(keep) == len(value) else (shown_of,),
        meta={
            "trace": trace.path.name, "arm": info.arm, "semantics": info.semantics, "replay": info.replay,
            "cut": info.cut, "run": info.index, "point": "logits", "metric": metric_name,
            "unit": METRICS[metric_name].unit, "reference": reference, "tokens": len(trace.tokens.ids),
            "window": info.window, "floor": None if np.isnan(floor) else float(floor),
        },
        curves=curves,
        axis=f"position in tokens; the run starts at s = {count(info.start)}",
        label=metric_words(metric_name),
        unit=METRICS[metric_name].unit,
        log=not signed,
        span=(float(ends[0]) - 0.5, float(ends[1]) + 0.5),
        ticks=_ticks(int(ends[0]), int(ends[1])),
        marks=tuple(marks),
        floor=None if signed or np.isnan(floor) else (ends + np.array([-0.5, 0.5]), np.full(2, floor)),
        flips=tuple((float(f.position), float(at[f.position][0]), at[f.position][1]) for f in rows.flips),
        names=("position", "token", "text", *rows.value, "floor", "class", "top1_flip", "margin", "within_noise"),
        rows=_table(trace, rows, metric_name),
        columns=tuple(int(p) for p in rows.position[keep]),
    )  # fmt: skip


def _peaks(value: np.ndarray, flips: list[int], position: np.ndarray) -> np.ndarray:
    """Indices of at most about `MOST_POINTS` rows: the largest of each stretch, flips, and both ends."""
    rows = len(value)
    if rows <= MOST_POINTS:
        return np.arange(rows)
    size = np.nan_to_num(np.abs(value), nan=-1.0)
    edges = range(0, rows, -(-rows // MOST_POINTS))
    best = [a + int(size[a : a + edges.step].argmax()) for a in edges]
    return np.unique(np.array([0, rows - 1, *best, *np.flatnonzero(np.isin(position, flips)).tolist()]))


def _curves(rows: LogitRows, metric_name: str, keep: np.ndarray, hover: list[str]) -> tuple[Curve, ...]:
    """The suffix, and in a quieter colour what was replayed before it."""
    x, y = rows.position[keep].astype(float), rows.value[metric_name][keep]
    cut = rows.info.start if rows.info.cut is None else rows.info.cut
    parts = []
    for label, inside, colour, weight in (
        ("replayed rows", x < cut, LIGHT.arms[-1], 1.5),
        ("suffix" if rows.info.cut is not None else "rows", x >= cut, LIGHT.arms[0], 2.0),
    ):
        if inside.any():
            texts = [h for h, here in zip(hover, inside, strict=True) if here]
            few = int(inside.sum()) <= 64
            parts.append(Curve(label, x[inside], y[inside], texts, colour, weight, marks=few))
    return tuple(parts)


def _hover(trace: TraceReader, rows: LogitRows, metric_name: str, keep: np.ndarray) -> list[str]:
    name, unit = metric_words(metric_name), METRICS[metric_name].unit
    floor = rows.floor.get(metric_name, np.nan)
    known = f" · floor {number(floor)}" if not np.isnan(floor) else " · floor unknown"
    flips = {f.position: f for f in rows.flips}
    texts = []
    for i in keep:
        position = int(rows.position[i])
        flip = f"<br>{flip_words(flips[position])}" if position in flips else ""
        kind = str(rows.kind[i])
        texts.append(
            f"<b>position {count(position)}</b> · after {shown(trace, position)}<br>"
            f"{name} <b>{number(float(rows.value[metric_name][i]), 3)} {unit}</b><br>1 row{known}<br>"
            f"{CLASS_WORDS.get(kind, kind)}{flip}"
        )
    return texts


def _title(rows: LogitRows, metric_name: str) -> str:
    info, unit = rows.info, METRICS[metric_name].unit
    value = np.abs(rows.value[metric_name])
    head = arm_words(info.arm) + ("" if info.cut is None else f" at cut {count(info.cut)}")
    suffix = rows.position >= (info.start if info.cut is None else info.cut)
    inside, position = value[suffix], rows.position[suffix]
    if not inside.size or np.isnan(inside).all():
        return f"{head}: no logits were compared in the suffix"
    if np.nanmax(inside) == 0:
        return f"{head} leaves the next-token distribution as it is"
    worst = int(np.nanargmax(inside))
    peak = f"{number(float(inside[worst]))} {unit}"
    said = f"{metric_words(metric_name)} peaks at {peak}, position {count(position[worst])}"
    differs = np.isin(rows.kind[suffix], (DESIGN, FLIP))
    if (rows.kind[suffix] == NOISE).any() and not differs.any():
        said = f"the logits move by rounding noise only, at most {peak}"
    flips = [f for f in rows.flips if f.position >= position[0]]
    if not flips:
        return f"{head}: {said}; no top-1 flip in {plural(len(inside), 'row')}"
    ties = sum(bool(f.inside) for f in flips)
    tie = f", {'it lies' if ties == len(flips) == 1 else f'{count(ties)} of them'} within the noise" if ties else ""
    return f"{head}: {said}; {plural(len(flips), 'top-1 flip')} in {plural(len(inside), 'row')}{tie}"


def _ticks(first: int, last: int) -> tuple[tuple[float, str], ...]:
    """About eight round numbers between two positions."""
    reach = max(1, last - first)
    power = 10 ** max(0, len(str(reach // 8)) - 1)
    step = next(s * power for s in (1, 2, 5, 10) if s * power * 9 >= reach)
    return tuple((float(p), count(p)) for p in range(-(-first // step) * step, last + 1, step))


def _table(trace: TraceReader, rows: LogitRows, metric_name: str) -> list[list]:
    flips = {f.position: f for f in rows.flips}
    ids, texts = trace.tokens.ids, trace.tokens.texts
    floor = float(rows.floor.get(metric_name, np.nan))
    out = []
    for i, position in enumerate(rows.position.tolist()):
        flip = flips.get(position)
        margin = float("nan") if flip is None or flip.margin is None else flip.margin
        inside = "" if flip is None or flip.inside is None else flip.inside
        known = position < len(ids)
        out.append([
            position, int(ids[position]) if known else "", plain(texts[position]) if known else "",
            *(float(v[i]) for v in rows.value.values()), floor, str(rows.kind[i]), flip is not None, margin, inside,
        ])  # fmt: skip
    return out
