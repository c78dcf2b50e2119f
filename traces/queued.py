"""Writing while something else computes: one thread makes every call to HDF5, and what waits for it is bounded."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from types import TracebackType
from typing import Any

import numpy as np

from replayscope.traces.schema import Cast, RunInfo, Table, Tokens
from replayscope.traces.writer import TraceWriter

PENDING = 64 << 20  # bytes that may wait: a few layers of states

# Records that are committed at once. A commit takes as long as writing a megabyte, and as long as HDF5 is at work no
# other thread has Python's lock: many short stretches of it hold computing up more than few long ones. So states are
# given a moment (in seconds) to gather, unless so many or so many bytes of them wait, or a caller does.
_TOGETHER, _ENOUGH, _MOMENT = 256, 24 << 20, 0.5


@dataclass(frozen=True)
class _Call:
    """size: bytes that it holds in memory. record: it may be committed with others, and is made again by itself if that
    fails."""

    run: Callable[[], object]
    size: int
    record: bool = False


class QueuedWriter:
    """The methods of a TraceWriter; each returns when its record is queued, and waits while the queue is full.

    Arrays are handed over: the caller must not change them afterwards. pending: bytes that may wait at once; a larger
    record waits alone. States are committed together, begun at the latest half a second after the first of them came.
    The first error of the thread is raised in the caller by its next call, at the latest at the end of the `with`
    block, and nothing is written after it. Records are written in the order of the calls.
    """

    def __init__(self, writer: TraceWriter, pending: int = PENDING):
        self.writer = writer
        self._limit = pending
        self._waiting: deque[_Call] = deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._callers = 0  # that wait until something is written
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="trace writer", daemon=True)

    def __enter__(self) -> "QueuedWriter":
        self._thread.start()
        self._put(self.writer.__enter__, 0)
        try:
            self.flush()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._put(self.writer.last, 0, True)
                self.flush()
                self._put(lambda: self.writer.__exit__(None, None, None), 0)
                self.flush()
        except BaseException as failed:
            self._abandon(failed)
            raise
        else:
            if error is not None:
                self._abandon(error)
        finally:
            self._end()

    def header(self, *, config: Mapping[str, Any], provenance: Mapping[str, Any], tokens: Tokens) -> None:
        """As TraceWriter.header."""
        self._put(lambda: self.writer.header(config=config, provenance=provenance, tokens=tokens), 0, True)

    def runs(self, runs: Sequence[RunInfo]) -> None:
        """As TraceWriter.runs."""
        self._put(lambda: self.writer.runs(runs), 0, True)

    def table(self, reference: str, point: str, table: Table) -> None:
        """As TraceWriter.table."""
        size = sum(values.nbytes for values in table.arrays.values())
        self._put(lambda: self.writer.table(reference, point, table), size)

    def rows(
        self, reference: str, point: str, offsets: np.ndarray, position: np.ndarray, arrays: Mapping[str, np.ndarray]
    ) -> None:
        """As TraceWriter.rows."""
        size = sum(values.nbytes for values in arrays.values())
        self._put(lambda: self.writer.rows(reference, point, offsets, position, arrays), size)

    def state(
        self,
        run: int,
        name: str,
        positions: np.ndarray,
        array: np.ndarray,
        logical_dtype: str,
        cast: Cast | None = None,
    ) -> None:
        """As TraceWriter.state."""
        self._put(lambda: self.writer.state(run, name, positions, array, logical_dtype, cast), array.nbytes, True)

    def text(self, name: str, text: str) -> None:
        """As TraceWriter.text."""
        self._put(lambda: self.writer.text(name, text), len(text))

    def flush(self) -> None:
        """Wait until every record queued so far is in the file. Raises the thread's error."""
        with self._changed:
            self._wait(lambda: self._error is not None or not self._waiting)
            self._raise()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for the thread, which then does not wait for more."""
        if not until():
            self._callers += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(until)
            finally:
                self._callers -= 1

    def _put(self, call: Callable[[], object], size: int, record: bool = False) -> None:
        with self._changed:
            self._wait(lambda: self._error is not None or not self._waiting or self._bytes + size <= self._limit)
            self._raise()
            self._waiting.append(_Call(call, size, record))
            self._bytes += size
            if len(self._waiting) == 1 or self._worth_it():
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while calls := self._next():
            try:
                self._write(calls)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._waiting.clear()
                    self._changed.notify_all()
            else:
                # A record counts as waiting until it is written: its bytes are still in memory.
                with self._changed:
                    self._bytes -= sum(self._waiting.popleft().size for _ in calls)
                    self._changed.notify_all()
                # Their memory is free for the next states now, not when the next commit begins.
                calls.clear()

    def _next(self) -> list[_Call]:
        """The calls to make at once, or none when all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._waiting)
            self._changed.wait_for(lambda: self._worth_it() or not self._waiting, _MOMENT)
            records = list(islice(takewhile(lambda call: call.record, self._waiting), _TOGETHER))
            return records or list(islice(self._waiting, 1))

    def _worth_it(self) -> bool:
        gathering = all(call.record for call in self._waiting) and len(self._waiting) < _TOGETHER
        return self._ended or self._callers > 0 or not gathering or self._bytes >= _ENOUGH

    def _write(self, calls: Sequence[_Call]) -> None:
        """Calls in their order, in one commit if they are several and all of them can be written."""
        if len(calls) > 1:
            try:
                with self.writer.together():
                    for call in calls:
                        call.run()
                return
            except Exception:
                # One by one as many are kept as can be, and the one that cannot is told.
                pass
        for call in calls:
            call.run()

    def _abandon(self, error: BaseException) -> None:
        """Leave the file as the error found it: what was queued is written first, unless writing is what failed."""
        with self._changed:
            self._wait(lambda: not self._waiting)
            self._error = None
            self._waiting.append(_Call(lambda: self.writer.__exit__(type(error), error, error.__traceback__), 0))
            self._wait(lambda: not self._waiting)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
