"""Which runs of a trace belong in one figure: one arm, one semantics, one replay length, its cuts in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose
from replayscope.traces import TraceReader
from replayscope.traces.schema import RunInfo
from replayscope.ui.theme import count

# The order in which arms are offered and drawn; the first one that is there opens the page.
_ORDER = ("encoder", "both", "decoder", "exact", "hit", "repeat", "rechunk", "full")
NOISE_ARMS = ("repeat", "rechunk", "hit")
Design = Literal["fixed", "after", "mixed"]


@dataclass(frozen=True)
class Series:
    """Runs of one arm that differ in the cut only.

    label: the arm, with replay length and semantics where the trace holds more than one of them. runs: by cut.
    """

    label: str
    arm: str
    semantics: str
    replay: int | None
    runs: tuple[RunInfo, ...]

    @property
    def cuts(self) -> list[int]:
        """H of every run; an arm without a cut has one run, and its column is its start."""
        return [run.start if run.cut is None else run.cut for run in self.runs]

    @property
    def has_cut(self) -> bool:
        """Whether the arm depends on the cut."""
        return any(run.cut is not None for run in self.runs)

    @property
    def design(self) -> Design:
        """`fixed`: every cut runs to the same last position. `after`: the same number of rows after each cut."""
        stops = {run.stop for run in self.runs}
        if len(stops) == 1:
            return "fixed"
        after = [run.stop - cut for run, cut in zip(self.runs, self.cuts, strict=True)]
        # The last cuts may reach the end of the text before their suffix is complete.
        whole = [a for a, run in zip(after, self.runs, strict=True) if run.stop < max(stops)]
        return "after" if len(set(whole)) == 1 and max(after) == whole[0] else "mixed"

    @property
    def suffix(self) -> int | None:
        """Rows run from H on under the `after` design; None if the suffix is all that follows."""
        if self.design == "fixed":
            return None
        return max(run.stop - cut for run, cut in zip(self.runs, self.cuts, strict=True))

    def at(self, cut: int) -> RunInfo:
        """The run at a cut, or the nearest one."""
        return min(self.runs, key=lambda run: abs((run.cut or 0) - cut))


def series(runs: Sequence[RunInfo]) -> list[Series]:
    """Every arm of a trace but the reference itself, in order: replay arms, noise arms, oracles, broken arms."""
    groups: dict[tuple[str, str, int | None], list[RunInfo]] = {}
    for run in runs:
        if run.arm != "full":
            groups.setdefault((run.arm, run.semantics, run.replay), []).append(run)
    lengths: dict[str, set[int | None]] = {}
    for arm, _, replay in groups:
        lengths.setdefault(arm, set()).add(replay)
    many_semantics = len({semantics for _, semantics, _ in groups}) > 1
    found = []
    for (arm, semantics, replay), runs_of_arm in groups.items():
        # A noise run stands for itself and, looked at from a cut, for that cut; the second is the series.
        members = [run for run in runs_of_arm if run.cut is not None] or runs_of_arm
        label = arm
        if len(lengths[arm]) > 1 and replay is not None:
            label += f", replay {count(replay)}"
        if many_semantics:
            label += f", {semantics}"
        ordered = sorted(members, key=lambda run: (-1 if run.cut is None else run.cut, run.index))
        found.append(Series(label, arm, semantics, replay, tuple(ordered)))
    return sorted(found, key=_place)


def pick(trace: TraceReader, label: str | None = None) -> Series:
    """The series of a label, or the first one. Raises UsageError with the labels that are there, or without any."""
    found = series(trace.runs)
    if not found:
        raise UsageError(f"{trace.path}: /runs holds no arm but full; record at least one other arm")
    labels = [one.label for one in found]
    if label is None:
        return found[0]
    return found[labels.index(choose("arm", label, labels))]


def run_of(trace: TraceReader, run: int | None = None, arm: str | None = None) -> RunInfo:
    """A run by its index, or else the middle cut of an arm among those whose replay does not start at 0.

    Raises UsageError for a run that is not there.
    """
    if run is None:
        one = pick(trace, arm)
        behind = [info for info in one.runs if info.start > 0] or one.runs
        return behind[len(behind) // 2]
    if not 0 <= run < len(trace.runs):
        raise UsageError(f"no run {run}; the runs of this trace are 0 to {len(trace.runs) - 1}")
    return trace.runs[run]


def series_of(trace: TraceReader, info: RunInfo) -> Series:
    """The series that a run belongs to; `full` and the like stand alone."""
    alone = Series(info.arm, info.arm, info.semantics, info.replay, (info,))
    return next((one for one in series(trace.runs) if info in one.runs), alone)


def _place(one: Series) -> tuple[int, str, str, int]:
    bare = one.arm.split(":")[0]
    known = (*_ORDER, "oracle", "broken")
    return known.index(bare) if bare in known else len(known), one.arm, one.semantics, one.replay or 0
