"""Raw states of two runs side by side, of which only the rows asked for are read from the file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayscope.inspector.errors import UsageError
from replayscope.traces import TraceReader
from replayscope.traces.schema import RunInfo


class NotRecorded(UsageError):
    """What a figure needs is not in the trace; the message says with which option to record it."""


@dataclass(frozen=True)
class Pair:
    """Rows of one hook point in a run and in what it is held against.

    position: [row] absolute, in tokens (entry numbers for global KV and index keys). arm, ref: [row, head, channel],
    with one head where the point has none; NaN rows where a side has no such row.
    """

    position: np.ndarray
    arm: np.ndarray
    ref: np.ndarray


def other_run(trace: TraceReader, info: RunInfo, reference: str) -> int:
    """The run that a run is compared with under a reference. Raises NotRecorded if the trace has none."""
    if reference == "oracle":
        if info.oracle is None:
            raise NotRecorded(f"{trace.path}: {info.label} has no oracle; record it with --arms oracle:{info.arm}")
        return info.oracle
    for run in trace.runs:
        if run.arm == "full":
            return run.index
    raise NotRecorded(f"{trace.path} has no run full; record it with --arms full,{info.arm}")


def need(trace: TraceReader, runs: tuple[int, ...], name: str) -> None:
    """Raises NotRecorded unless each of the runs stores the hook point."""
    stored = set(trace.states())
    for run in runs:
        if (run, name) not in stored:
            raise NotRecorded(
                f"{trace.path} stores no {name} of {trace.runs[run].label}; record it with --hooks '{name}'"
            )


def heads(trace: TraceReader, run: int, name: str) -> tuple[int, int]:
    """(heads, channels) of a stored state; one head where it has none. No row is read."""
    return _shaped(trace.state(run, name, slice(0, 0)).values).shape[1:]


def rows(trace: TraceReader, run: int, name: str, wanted: np.ndarray) -> np.ndarray:
    """[row, head, channel] at the wanted positions, which must rise; NaN where the run stores no such row."""
    there = trace.positions(run, name)
    at = np.searchsorted(there, wanted)
    found = at < len(there)
    found[found] = there[at[found]] == wanted[found]
    if not found.any():
        empty = heads(trace, run, name)
        return np.full((len(wanted), *empty), np.nan)
    first, last = int(at[found][0]), int(at[found][-1])
    values = _shaped(trace.state(run, name, slice(first, last + 1)).values)
    out = np.full((len(wanted), *values.shape[1:]), np.nan)
    out[found] = values[at[found] - first]
    return out


def pair(trace: TraceReader, run: int, other: int, name: str, wanted: np.ndarray) -> Pair:
    """Both sides at the wanted positions. Raises NotRecorded if a side does not store the hook point at all."""
    need(trace, (run, other), name)
    arm, ref = (rows(trace, index, name, wanted) for index in (run, other))
    if arm.shape != ref.shape:
        raise UsageError(f"{name} has the shape {arm.shape[1:]} in one run and {ref.shape[1:]} in the other")
    return Pair(wanted, arm, ref)


def _shaped(values: np.ndarray) -> np.ndarray:
    """[row, head, channel] float64."""
    values = np.asarray(values, np.float64)
    rows = len(values)
    if values.ndim < 3:
        return values.reshape(rows, 1, values.shape[1] if values.ndim == 2 else 1)
    return values.reshape(rows, int(np.prod(values.shape[1:-1])), values.shape[-1])
