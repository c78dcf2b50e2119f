"""What a reader may choose of a trace: menus that fit it, a choice mended to be one of them, the address of a view.

Knows nothing of Gradio.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qs, urlencode

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import METRICS, metrics_of
from replayscope.traces import TraceReader
from replayscope.traces.schema import REGIONS, RunInfo
from replayscope.ui.series import Series, pick, series
from replayscope.ui.words import POINT_WORDS, REGION_WORDS, metric_words

Options = list[tuple[str, str]]
_LONGEST = 300  # characters of a value in an address
_REFERENCES = {"full": "the full prefill", "oracle": "its oracle"}


@dataclass(frozen=True)
class Choice:
    """What a reader has chosen; plain strings and numbers, all of which may come from a browser.

    cut, layer, position, head: -1 for none chosen yet. other, other_arm: the second trace and arm of a comparison; an
    empty `other` is the same trace. results, contract: of a judgement; empty are the newest
    results, and the contract that their runs began with.
    """

    trace: str
    arm: str = ""
    reference: str = "full"
    point: str = "window_kv"
    region: str = "window"
    metric: str = "rel_l2"
    cut: int = -1
    layer: int = -1
    position: int = -1
    head: int = -1
    other: str = ""
    other_arm: str = ""
    results: str = ""
    contract: str = ""


@dataclass(frozen=True)
class Menus:
    """Options as (words, value) that fit together, the choice mended to be one of them, and what the sliders reach.

    cuts: of the arm, in order. has_cut: whether the arm depends on it. layers: of the hook point. first, stop: the
    positions of the chosen run.
    """

    choice: Choice
    arms: Options
    references: Options
    points: Options
    regions: Options
    metrics: Options
    other_arms: Options
    cuts: list[int]
    has_cut: bool
    layers: int
    first: int
    stop: int


def menus(trace: TraceReader, asked: Choice, other: TraceReader | None = None) -> Menus:
    """What can be chosen, and `asked` with everything the trace does not have replaced by what it has.

    other: the trace of `asked.other`, if it is another one. Raises UsageError if a trace holds no comparison at all.
    """
    found, references = _comparisons(trace)
    arm = asked.arm if asked.arm in [one.label for one in found] else found[0].label
    reference = asked.reference if asked.reference in references else references[0]
    points = trace.points(reference)
    point = _one(asked.point, points, "window_kv")
    table = trace.table(reference, point)
    metrics = metrics_of(table)
    regions = [r for r in REGIONS if r in table.buckets]
    one = pick(trace, arm)
    cut = one.cuts[_opening(one)] if asked.cut < 0 else min(one.cuts, key=lambda c: abs(c - asked.cut))
    run, layers = one.at(cut), table.arrays["n"].shape[1]
    layer = layers - 1 if asked.layer < 0 else min(asked.layer, layers - 1)
    position = min(cut, run.stop - 1) if asked.position < 0 else asked.position
    others = [o.label for o in (found if other is None else _comparisons(other)[0])]
    usual = arm if other is not None else next((label for label in others if label != arm), others[0])
    choice = replace(
        asked, arm=arm, reference=reference, point=point, region=_one(asked.region, regions, "window"),
        metric=_one(asked.metric, metrics, "rel_l2"), cut=cut, layer=layer,
        head=max(asked.head, 0),
        position=min(max(position, run.start), max(run.stop - 1, run.start)),
        other_arm=_one(asked.other_arm, others, usual),
    )  # fmt: skip
    return Menus(
        choice,
        [(one.label, one.label) for one in found],
        [(_REFERENCES[r], r) for r in references],
        [(POINT_WORDS[p], p) for p in points],
        [(REGION_WORDS[r], r) for r in regions],
        [(f"{metric_words(m)}{f', {METRICS[m].unit}' if METRICS[m].unit else ''}", m) for m in metrics],
        [(label, label) for label in others],
        one.cuts,
        one.has_cut,
        layers,
        run.start,
        max(run.stop, run.start + 1),
    )


def _comparisons(trace: TraceReader) -> tuple[list[Series], list[str]]:
    """The arms of a trace, and what they were compared with. Raises UsageError without either."""
    found = series(trace.runs)
    references = [r for r in _REFERENCES if r in trace.references()]
    if not found or not references:
        raise UsageError(f"{trace.path.name} holds no comparison: record it with full and at least one other arm")
    return found, references


def _one(asked: str, there: list[str], usual: str) -> str:
    return asked if asked in there else usual if usual in there else there[0]


def _opening(one: Series) -> int:
    """Index of the cut an arm opens at: the middle one behind the first window."""
    behind = [i for i, run in enumerate(one.runs) if run.start > 0] or list(range(len(one.runs)))
    return behind[len(behind) // 2]


def chosen_run(trace: TraceReader, c: Choice) -> RunInfo:
    """The run that a choice looks at."""
    return pick(trace, c.arm).at(c.cut)


def arm_of_length(trace: TraceReader, arm: str, replay: int) -> str | None:
    """The label of the same arm with another replay length, None without one."""
    one = pick(trace, arm)
    same = [s for s in series(trace.runs) if (s.arm, s.semantics, s.replay) == (one.arm, one.semantics, replay)]
    return same[0].label if same else None


def address(tab: str, c: Choice) -> str:
    """A view as the query of an address: `?tab=cut&trace=…`; what is not chosen is left out."""
    chosen = {name: value for name, value in asdict(c).items() if value not in ("", -1)}
    return "?" + urlencode({"tab": tab, **chosen})


def from_address(query: str) -> tuple[str, Choice]:
    """The tab and the choice that an address asks for; whatever it does not say or says wrongly is left open."""
    given = {name: values[-1][:_LONGEST] for name, values in parse_qs(str(query).lstrip("?")).items()}
    chosen: dict[str, Any] = {"trace": ""}
    for field in fields(Choice):
        value = given.get(field.name, "")
        if field.type == "int":
            chosen[field.name] = int(value) if value.isascii() and value.isdigit() and len(value) < 16 else -1
        elif value:
            chosen[field.name] = value
    return given.get("tab", ""), Choice(**chosen)
