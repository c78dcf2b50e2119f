"""From a trace to lines: how far each arm moves the next-token distribution, by cut."""

from __future__ import annotations

import numpy as np

from replayscope.inspector.classes import region_floor
from replayscope.inspector.metrics import METRICS, metric
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.traces.schema import Table
from replayscope.ui.cells import checked_table
from replayscope.ui.lines import Line, LineChart
from replayscope.ui.series import NOISE_ARMS, Series, series
from replayscope.ui.theme import count
from replayscope.ui.titles import logits_title
from replayscope.ui.words import against, metric_words, suffix_and_design, suffix_words

# Metrics of the logits that a line can show: the mean over the suffix, and the largest row beside it.
LINE_METRICS = {"kl": "kl_max", "kl_rev": "kl_rev_max", "js": "js_max"}


def logits_chart(
    trace: TraceReader, metric_name: str = "kl", arms: list[str] | None = None, reference: str = "full"
) -> LineChart:
    """KL (or its reverse, or JS) of the logits in the suffix, by cut, one line per arm.

    arms: labels of series; None takes every arm but oracles and the planted faults, of the first one's design only.
    """
    choose("metric of this figure", metric_name, LINE_METRICS)
    table = checked_table(trace, reference, "logits", metric_name, "suffix")
    found = series(trace.runs)
    wanted = [s for s in found if arms is None and ":" not in s.arm and s.arm not in ("repeat", "rechunk")]
    for label in arms or ():
        choose("arm", label, [s.label for s in found])
        wanted += [s for s in found if s.label == label]
    head = next((s for s in wanted if s.has_cut), wanted[0] if wanted else None)
    # Arms without a cut have a single run to the end: they belong to either design.
    same = [s for s in wanted if head is None or s.design == head.design or not s.has_cut]
    cuts = sorted({cut for s in same if s.has_cut for cut in s.cuts}) or sorted({c for s in same for c in s.cuts})
    lines = tuple(_line(s, table, metric_name, cuts) for s in same)
    floors = region_floor(trace, "logits", metric_name)[:, 0, table.bucket("suffix")]
    floor = np.array([_at_cut(floors, same, cut) for cut in cuts])
    notes = ["solid: mean over the suffix, dotted: its largest row, ○ the last row"]
    if left := [s.label for s in wanted if s not in same]:
        notes.append(f"of another design and left out: {', '.join(left)}")
    unit = METRICS[metric_name].unit
    about = f"{metric_words(metric_name)} of the logits against {against(reference)}"
    context = [suffix_words(trace, head)] if head else []
    suffix, design = suffix_and_design(trace, head) if head else (None, None)
    return LineChart(
        title=logits_title(lines, cuts, unit),
        sentence=" · ".join([about, *context, f"N {count(len(trace.tokens.ids))}", f"W {count(trace.runs[0].window)}"]),
        notes=tuple(notes),
        meta={
            "trace": trace.path.name, "point": "logits", "metric": metric_name, "unit": unit, "region": "suffix",
            "reference": reference, "design": design, "suffix": suffix,
            "arms": [s.label for s in same], "tokens": len(trace.tokens.ids), "window": trace.runs[0].window,
        },
        cuts=tuple(cuts),
        lines=lines,
        floor=floor,
        label=metric_words(metric_name).split(",")[0],
        unit=unit,
        window=trace.runs[0].window,
    )  # fmt: skip


def _line(one: Series, table: Table, metric_name: str, cuts: list[int]) -> Line:
    suffix, last = table.bucket("suffix"), table.bucket("last")
    mean, top = metric(table, metric_name)[:, 0], metric(table, LINE_METRICS[metric_name])[:, 0]
    columns = {name: np.full(len(cuts), np.nan) for name in ("mean", "largest", "last", "n", "flips")}
    for i, cut in enumerate(cuts):
        matches = [run for run, at in zip(one.runs, one.cuts, strict=True) if at == cut or not one.has_cut]
        if matches:
            run = matches[0].index
            columns["mean"][i], columns["largest"][i] = mean[run, suffix], top[run, suffix]
            columns["last"][i], columns["n"][i] = mean[run, last], table.arrays["n"][run, 0, suffix]
            columns["flips"][i] = table.arrays["flips"][run, 0, suffix]
    return Line(one.label, **columns, quiet=one.arm in NOISE_ARMS, everywhere=not one.has_cut)


def _at_cut(floors: np.ndarray, found: list[Series], cut: int) -> float:
    """The floor at a cut: the largest over the arms that have a run there."""
    at = [floors[run.index] for s in found for run, c in zip(s.runs, s.cuts, strict=True) if c == cut]
    return float(np.fmax.reduce(at)) if at else float("nan")
