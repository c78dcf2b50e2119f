"""Titles say what is seen. Each is computed from the numbers of its figure."""

from __future__ import annotations

import numpy as np

from replayscope.inspector.metrics import METRICS
from replayscope.traces.schema import RunInfo
from replayscope.ui.cells import DIFFERS
from replayscope.ui.grid import ABSENT, BUG, IDENTICAL, NOISE, Grid
from replayscope.ui.lines import Line
from replayscope.ui.series import Series
from replayscope.ui.theme import count, number, plural
from replayscope.ui.words import POINT_WORDS, arm_words


def cut_title(one: Series, point: str, metric_name: str, grid: Grid, reference: str) -> str:
    """Where an arm changes a point, and how much: the median of the cells above the noise, and the largest."""
    who, what, unit = arm_words(one.arm), POINT_WORDS[point], METRICS[metric_name].unit
    differs = np.isin(grid.kind, DIFFERS)
    if one.design == "mixed":
        return f"{who}: the suffixes of these cuts differ, so they stand side by side but do not compare"
    if bug := _first_bug(grid):
        column, row = bug
        cells = plural(int((grid.kind == BUG).sum()), "cell")
        seen = f"breaks the {what} in {cells}, first at cut {count(grid.start[column])}, layer {grid.rows[row]}"
        return _accuse(one.arm, f"{who} {seen}")
    if not grid.value.size or (grid.kind == ABSENT).all():
        return f"{who} computes no {what} here"
    if not differs.any():
        noise = grid.value[grid.kind == NOISE]
        if not noise.size:
            return f"{who} leaves the {what} identical at every cut and layer"
        return f"{who} changes the {what} by rounding noise only, at most {number(float(np.fmax.reduce(noise)))}"
    values = grid.value[differs]
    finite = values[np.isfinite(values)]
    first = int(np.flatnonzero(differs.any(axis=1))[0])
    where = "" if len(grid.rows) == 1 else " in every layer" if first == 0 else f" from layer {grid.rows[first]} on"
    if not finite.size:
        return f"{who} makes the {what} not finite{where}"
    digits = 2 if METRICS[metric_name].scale == "log" else 3
    said = f"median {number(float(np.median(finite)), digits)}{f' {unit}' if unit else ''}"
    subject = who if reference == "full" else f"{who}, against its oracle,"
    return f"{subject} changes the {what}{where}: {said}, at most {number(float(values.max()), digits)}"


def position_title(info: RunInfo, point: str, grid: Grid) -> str:
    """In how many layers one run differs, and where most."""
    what = POINT_WORDS[point]
    head = f"{arm_words(info.arm)}" + ("" if info.cut is None else f" at cut {count(info.cut)}")
    if bug := _first_bug(grid):
        column, row = bug
        return _accuse(
            info.arm, f"{head} goes wrong first at position {count(grid.start[column])}, layer {grid.rows[row]}"
        )
    if not grid.value.size or (grid.kind == ABSENT).all():
        return f"{head} computes no {what}"
    size = np.where(np.isin(grid.kind, DIFFERS), np.nan_to_num(grid.value, nan=-1.0), -1.0)
    if (size < 0).all():
        same = np.isin(grid.kind, (IDENTICAL, ABSENT)).all()
        return f"{head}: the {what} is {'identical' if same else 'equal up to noise'} at every position"
    row, column = (int(i) for i in np.unravel_index(size.argmax(), grid.shape))
    first, last = int(grid.start[column]), int(grid.stop[column]) - 1
    where = f"position {count(first)}" if first == last else f"positions {count(first)} to {count(last)}"
    layers = f"{(size >= 0).any(axis=1).sum()} of {plural(len(grid.rows), 'layer')}"
    worst = number(float(grid.value[row, column]))
    return f"{head}: the {what} differs in {layers}, most at {where}, layer {grid.rows[row]}: {worst}"


def reach_title(one: Series, point: str, grid: Grid) -> str:
    """How large the difference is at the replay start, and how large where it is last seen above the noise."""
    who, what = arm_words(one.arm), POINT_WORDS[point]
    size = np.where(np.isin(grid.kind, DIFFERS), np.nan_to_num(grid.value, nan=0.0), 0.0)
    if not (size > 0).any():
        return f"{who} leaves no trace in the {what} behind the replay start"
    seen = np.flatnonzero((size > 0).any(axis=0))
    first, last = float(size[:, seen[0]].max()), float(size[:, seen[-1]].max())
    far = plural(int(grid.stop[seen[-1]]) - 1, "token")
    if len(seen) == 1:
        return f"{who} changes the {what} by {number(first)}, and no further than {far} behind the replay start"
    return (
        f"{who}: the difference in the {what} goes from {number(first)} at the replay start to {number(last)}, {far} on"
    )


def _first_bug(grid: Grid) -> tuple[int, int] | None:
    """(column, row) of the leftmost, lowest bug."""
    at = np.argwhere((grid.kind == BUG).T)
    return (int(at[0][0]), int(at[0][1])) if len(at) else None


def _accuse(arm: str, seen: str) -> str:
    """A planted fault that is found is good news; anything else is named a bug at once."""
    return seen if arm.startswith("broken:") else f"Bug: {seen[0].lower()}{seen[1:]}"


def logits_title(lines: tuple[Line, ...], cuts: list[int], unit: str) -> str:
    """How far the first arm moves the logits, and how often the most likely token changes."""
    loud = [line for line in lines if not line.quiet and not np.isnan(line.mean).all()]
    if not loud:
        return "No logits were compared for these arms"
    head = loud[0]
    who = arm_words(head.label.split(",")[0])
    if np.nanmax(head.mean) == 0:
        return f"{who} leaves the next-token distribution as it is at every cut"
    worst = int(np.nanargmax(head.mean))
    flips, rows = int(np.nansum(head.flips)), int(np.nansum(head.n))
    changed = head.mean[np.isfinite(head.mean) & (head.mean > 0)]
    said = f"{number(float(np.median(changed)))} {unit}" if changed.size else "inf"
    where = f" (median of cuts), {number(float(head.mean[worst]))} at cut {count(cuts[worst])}"
    shift = f"{who} moves the next-token distribution by {said}{'' if head.everywhere else where}"
    return f"{shift}; {plural(flips, 'top-1 flip')} in {plural(rows, 'row')}"
