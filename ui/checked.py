"""A trace that a stranger may have written: each part is checked as it is read, and what slips through is one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from replayscope.inspector.errors import ReplayScopeError
from replayscope.traces import TraceReader
from replayscope.traces.errors import TraceFormatError
from replayscope.traces.schema import (
    PER_THRESHOLD,
    POINTS,
    REGIONS,
    SINGLE_POINTS,
    THRESHOLDS,
    RowTable,
    RunInfo,
    Table,
    kind_of,
)

# What numpy, plotly and Python raise on numbers that do not fit each other.
STRANGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError)
# What classes and verdicts read of a table, besides `n`.
_NEEDED = {"state": ("diff2", "ref2", "nonfinite"), "discrete": ("changed", "flips"), "logits": ("kl_sum", "flips")}
_WHOLE = ("index", "start", "stop", "prompt_end", "window", "replayed", "cached", "fresh", "cached_changed")
_OPTIONAL = ("cut", "replay", "oracle")
_LARGEST = 1 << 53  # beyond it a browser's numbers are no integers


@contextmanager
def told(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Whatever goes wrong while `what` is made from a file becomes a TraceFormatError that names both."""
    try:
        yield
    except ReplayScopeError:
        raise
    except STRANGE as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise TraceFormatError(f"{path}: no {what} can be made of it, its parts do not fit ({said})") from error


class CheckedReader(TraceReader):
    """A TraceReader whose runs, config, tables and rows fit each other; else a TraceFormatError names the part."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._sound: Any = None

    @property
    def runs(self) -> list[RunInfo]:
        """All runs; never none."""
        try:
            runs = super().runs
        except TraceFormatError as error:
            # Of a single run the reader says what is wrong, not where.
            raise error if str(self.path) in str(error) else self._wrong("runs", f"cannot be read: {error}") from None
        # The same list comes back until the file changes, and figures ask for it once per cut.
        if runs is not self._sound:
            if not runs:
                raise self._wrong("runs", "is empty: nothing was recorded")
            for i, run in enumerate(runs):
                if reason := _run_fault(run, i, len(runs)):
                    raise self._wrong("runs", f"run {i} {reason}")
            if len(_depths(runs)) > 1:
                raise self._wrong("runs", "gives its runs different numbers of layers")
            self._sound = runs
        return runs

    @property
    def config(self) -> dict[str, Any]:
        """The model's config; what figures read of it has the right types."""
        config = super().config
        inner = config.get("text_config", config)
        sources = inner.get("kv_source_layer_ids") if isinstance(inner, dict) else 0
        if sources is not None and not (isinstance(sources, list) and all(_whole(layer) for layer in sources)):
            raise self._wrong("config", "has a text_config or kv_source_layer_ids of the wrong form")
        return config

    def points(self, reference: str) -> list[str]:
        """Hook points that have a table against `reference`."""
        points = super().points(reference)
        for point in points:
            if point not in POINTS:
                raise self._wrong(f"divergence/{reference}/{point}"[:80], "is no hook point that this version knows")
        return points

    def table(self, reference: str, point: str) -> Table:
        """Divergence of every run from `reference` at one hook point."""
        table = super().table(reference, point)
        if reason := self._table_fault(table, point):
            raise self._wrong(f"divergence/{reference}/{point}", reason)
        return table

    def rows(self, reference: str, point: str, run: int) -> RowTable:
        """Divergence of one run, row by row."""
        where = f"rows/{reference}/{point}"
        # Offsets and slices of a stranger fail in ways that the reader does not name.
        with told(self.path, where):
            rows = super().rows(reference, point, run)
        position = rows.position
        if position.ndim != 1 or position.dtype.kind not in "iu" or (position[1:] <= position[:-1]).any():
            raise self._wrong(f"{where}/position", "is no rising list of positions")
        table = self.table(reference, point)
        compared = table.arrays["n"][run, :, table.bucket("all")]
        if (most := int(compared.max(initial=0))) > len(position):
            raise self._wrong(where, f"has {len(position)} rows of run {run}, of which {most} were compared")
        layers = len(compared)
        for name, array in rows.arrays.items():
            if array.shape != (layers, len(position)):
                raise self._wrong(f"{where}/{name}", f"is {array.shape} for run {run}, want {(layers, len(position))}")
        for name in _NEEDED[kind_of(point)]:
            if name not in rows.arrays and name not in ("nonfinite", "flips"):
                raise self._wrong(where, f"has no {name}")
        return rows

    def _table_fault(self, table: Table, point: str) -> str | None:
        """Why a table cannot be that of a point over the runs, or None."""
        if table.kind != kind_of(point):
            return f"is of kind {table.kind}, want {kind_of(point)}"
        missing = [name for name in REGIONS if name not in table.buckets]
        if missing or len(set(table.buckets)) != len(table.buckets):
            return f"has no region {missing[0]}" if missing else "names a region twice"
        bins = [name for name in table.buckets if name not in REGIONS]
        if odd := [name for name in bins if not re.fullmatch(r"d:[0-9]{1,15}-[0-9]{1,15}", name)]:
            return f"has a region {odd[0][:40]!r}, want d:FIRST-LAST"
        for name in ("n", *_NEEDED[table.kind]):
            if name not in table.arrays:
                return f"has no {name}"
        shape = table.arrays["n"].shape
        depths = {1} if point in SINGLE_POINTS else _depths(self.runs) or {shape[1] if len(shape) == 3 else 0}
        layers = next(iter(depths))
        for name, array in table.arrays.items():
            want = (len(self.runs), layers, len(THRESHOLDS) if name in PER_THRESHOLD else len(table.buckets))
            if array.shape != want:
                return f"has {name} of shape {array.shape}, want {want} (runs, layers, regions)"
        return None

    def _wrong(self, part: str, reason: str) -> TraceFormatError:
        return TraceFormatError(f"{self.path}: /{part} {reason}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _depths(runs: Sequence[RunInfo]) -> set[int]:
    """Numbers of layers of which the runs know the exact region."""
    return {len(spans) for run in runs for spans in (run.exact_in, run.exact_out) if len(spans)}


def _run_fault(run: RunInfo, i: int, n: int) -> str | None:
    """What is wrong with run `i` of `n`, or None."""
    for name in ("arm", "semantics"):
        if not isinstance(getattr(run, name), str):
            return f"has no text as {name}"
    for name in (*_WHOLE, *_OPTIONAL):
        value = getattr(run, name)
        if not (_whole(value) or (name in _OPTIONAL and value is None)):
            return f"has {name} {str(value)[:40]!r}, want a number of tokens or of a run"
    if run.index != i:
        return f"calls itself {run.index}"
    if run.oracle is not None and run.oracle >= n:
        return f"is judged against run {run.oracle}, but there are {n}"
    if run.start > run.stop:
        return f"starts at {run.start} and stops at {run.stop}"
    for name in ("exact_in", "exact_out"):
        if not _is_spans(getattr(run, name)):
            return f"has {name} that is no list of [first, stop] per layer"
    return None


def _is_spans(layers: object) -> bool:
    return isinstance(layers, list | tuple) and all(
        isinstance(spans, list | tuple)
        and all(isinstance(span, list | tuple) and len(span) == 2 and all(map(_whole, span)) for span in spans)
        for spans in layers
    )
