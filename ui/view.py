"""What the page shows for a choice: menus that fit the trace, and figures as JSON. Knows nothing of Gradio."""

from __future__ import annotations

from dataclasses import dataclass

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import METRICS, metrics_of
from replayscope.traces import TraceReader
from replayscope.traces.schema import REGIONS
from replayscope.ui.figures import cut_layer, logits_by_cut, position_layer
from replayscope.ui.library import Library
from replayscope.ui.page import figure_json
from replayscope.ui.series import Series, pick, series
from replayscope.ui.words import POINT_WORDS, REGION_WORDS, metric_words

Options = list[tuple[str, str]]


@dataclass(frozen=True)
class Choice:
    """What a reader has chosen; plain strings and one number, all of which may come from a browser."""

    trace: str
    arm: str = ""
    reference: str = "full"
    point: str = "window_kv"
    region: str = "window"
    metric: str = "rel_l2"
    cut: int = 0


@dataclass(frozen=True)
class Menus:
    """Options as (words, value) that fit together, the choice mended to be one of them, and the cuts of the arm."""

    choice: Choice
    arms: Options
    references: Options
    points: Options
    regions: Options
    metrics: Options
    cuts: list[int]


def menus(trace: TraceReader, asked: Choice) -> Menus:
    """What can be chosen, and `asked` with everything the trace does not have replaced by what it has.

    Raises UsageError if the trace holds no comparison at all.
    """
    found = series(trace.runs)
    references = [r for r in ("full", "oracle") if r in trace.references()]
    if not found or not references:
        raise UsageError(f"{trace.path.name} holds no comparison: record it with full and at least one other arm")
    arm = asked.arm if asked.arm in [one.label for one in found] else found[0].label
    reference = asked.reference if asked.reference in references else references[0]
    points = trace.points(reference)
    point = _one(asked.point, points, "window_kv")
    table = trace.table(reference, point)
    metrics = metrics_of(table)
    regions = [r for r in REGIONS if r in table.buckets]
    cuts = pick(trace, arm).cuts
    cut = min(cuts, key=lambda c: abs(c - asked.cut)) if asked.arm else cuts[_opening(found[0], cuts)]
    region = _one(asked.region, regions, "window")
    choice = Choice(asked.trace, arm, reference, point, region, _one(asked.metric, metrics, "rel_l2"), cut)
    words = {"full": "the full prefill", "oracle": "its oracle"}
    return Menus(
        choice,
        [(one.label, one.label) for one in found],
        [(words[r], r) for r in references],
        [(POINT_WORDS[p], p) for p in points],
        [(REGION_WORDS[r], r) for r in regions],
        [(f"{metric_words(m)}{f', {METRICS[m].unit}' if METRICS[m].unit else ''}", m) for m in metrics],
        cuts,
    )


def _one(asked: str, there: list[str], usual: str) -> str:
    return asked if asked in there else usual if usual in there else there[0]


def _opening(one: Series, cuts: list[int]) -> int:
    """Index of the cut a trace opens at: the middle one behind the first window."""
    behind = [i for i, run in enumerate(one.runs) if run.start > 0] or list(range(len(cuts)))
    return min(behind[len(behind) // 2], len(cuts) - 1)


def cut_map(library: Library, c: Choice) -> str:
    """The cut × layer figure of a choice, as JSON."""
    what = ("cut", c.arm, c.reference, c.point, c.region, c.metric)
    return library.cached(
        c.trace, what, lambda t: figure_json(cut_layer(t, c.point, c.metric, c.region, c.arm, c.reference))
    )


def position_map(library: Library, c: Choice) -> str:
    """The position × layer figure of the chosen cut, as JSON."""
    run = pick(library.open(c.trace), c.arm).at(c.cut).index
    what = ("position", run, c.reference, c.point, c.metric)
    return library.cached(c.trace, what, lambda t: figure_json(position_layer(t, run, c.point, c.metric, c.reference)))


def logits(library: Library, name: str) -> str:
    """The KL figure of a trace, as JSON; empty if it has no logits."""
    trace = library.open(name)
    if "full" not in trace.references() or "logits" not in trace.points("full"):
        return ""
    return library.cached(name, "logits", lambda t: figure_json(logits_by_cut(t)))


def has_cut(library: Library, c: Choice) -> bool:
    """Whether the chosen arm depends on the cut."""
    return pick(library.open(c.trace), c.arm).has_cut
