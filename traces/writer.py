"""Writing a trace: records go into `<name>.partial`, each flushed; a clean exit completes, syncs and renames it."""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import h5py
import numpy as np

from replayscope.traces.datasets import CHUNK_BYTES, put, put_attribute, put_json, put_straight, put_text
from replayscope.traces.disk import Disk, refuse_if_locked
from replayscope.traces.dtypes import storage_dtype
from replayscope.traces.errors import TraceError, TraceExistsError, system_error
from replayscope.traces.schema import (
    FORMAT,
    KINDS,
    LOST,
    PER_THRESHOLD,
    POSITIONS,
    SCHEMA_VERSION,
    THRESHOLDS,
    Cast,
    RunInfo,
    Table,
    Tokens,
    check_name,
    is_positions,
    relative_l2,
    stored_name,
)

log = logging.getLogger(__name__)

KEEP_FREE = 64 << 20  # bytes that a run leaves free on the disk, whatever is asked
_LIBVER = ("v110", "v110")  # checksums on all metadata; read by HDF5 1.10 and newer


class TraceWriter:
    """Context manager that writes one trace.

    `header` first, then `runs`, then any number of tables, rows, states and texts, each once. Left by an exception, it
    keeps the unfinished file at `partial` and adds a note that says so; the file at `path` is touched only by the
    final rename. max_bytes: largest file; keep_free: bytes that the disk keeps free. The record that would break one
    of them raises TraceError and leaves no trace. compression: of raw states, for mailing. With ``resume`` set before
    it is entered it goes on with the `.partial` of a writer that was stopped, which has its header and its runs; states
    that are in it already are not written again.

    Raises TraceExistsError if `path` exists and `force` is false, TraceLockedError if another process holds it or
    is recording to it, TraceError if its folder is missing or a write fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        force: bool = False,
        *,
        max_bytes: int | None = None,
        keep_free: int = 0,
        compression: Literal["gzip"] | None = None,
    ):
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._max_bytes, self._keep_free = max_bytes, keep_free
        self._compression: Literal["gzip"] | None = compression
        self._disk: Disk | None = None
        self._batch: h5py.File | None = None
        self._groups: dict[int, h5py.Group] = {}  # of the states, while the file is open
        self._positions: dict[int, dict[bytes, str]] = {}  # of each run, under which name which positions are stored
        self.resume, self._kept = False, set[str]()
        self._records = 0
        self._complete = False
        self._n_runs: int | None = None
        if not self.path.name:
            raise TraceError(f"{str(path)!r} is no file name for a trace")
        if not self.path.parent.is_dir():
            raise TraceError(f"no folder {self.path.parent}; make it first")
        if self.path.is_dir():
            raise TraceError(f"{self.path} is a folder; give a file name")
        if self.path.exists() and not self.path.is_file():
            raise TraceError(f"{self.path} is no plain file but a pipe, a socket or a device; give another name")
        if self.path.exists() and not force:
            raise TraceExistsError(f"{self.path} exists; use --force to replace it or choose another name")
        refuse_if_locked(self.path, self.path)
        refuse_if_locked(self.partial, self.path)

    def __enter__(self) -> "TraceWriter":
        with self._one_line():
            if self.resume:
                self._disk = Disk(self.partial, keep=True)
                with self._commit() as file:
                    runs = file["runs"]
                    assert isinstance(runs, h5py.Dataset)
                    self._records = int(np.asarray(file.attrs["records"]))
                    self._n_runs = len(json.loads(runs[()].tobytes()))
                    file.visit(self._kept.add)
                    file.attrs["schema_version"] = SCHEMA_VERSION
                return self
            # What lies there is emptied once it is locked: it may be that of a writer which began just now.
            if self.partial.is_symlink():
                self.partial.unlink()
            self._disk = Disk(self.partial)
            with self._commit("w") as file:
                put_attribute(file.id, "format", FORMAT)
                file.attrs["schema_version"] = SCHEMA_VERSION
                file.attrs["complete"] = 0
                file.attrs["records"] = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._open().close()
            self._disk = None
        if error is not None:
            note = f"the unfinished trace is kept at {self.partial}"
            error.add_note(note)
            log.warning("%s", note)

    def last(self) -> None:
        """Say that the trace is complete; nothing is recorded after it. Leaving the `with` block does it too, in one
        more commit."""
        if self._n_runs is None:
            raise TraceError(f"nothing was recorded; the empty trace is left at {self.partial}")
        held = self._commit() if self._batch is None else contextlib.nullcontext(self._batch)
        with self._one_line(), held as file:
            file.attrs["complete"] = 1
        self._complete = True

    def _finish(self) -> None:
        """Sync the trace and give it its final name."""
        with self._one_line():
            if not self._complete:
                self.last()
            self._open().sync()
            os.replace(self.partial, self.path)
            _sync(self.path.parent)

    def header(self, *, config: Mapping[str, Any], provenance: Mapping[str, Any], tokens: Tokens) -> None:
        """What was run: the model's config, where it came from and how it ran, and the prompt."""
        ids = np.asarray(tokens.ids, np.int64)
        if ids.ndim != 1 or len(tokens.texts) != len(ids):
            raise ValueError(f"token ids {ids.shape} and {len(tokens.texts)} texts: want [token] and one text each")
        texts = [text.encode("utf-8", "surrogatepass") for text in tokens.texts]
        with self._record() as file:
            put_json(file, "config", config)
            put_json(file, "provenance", provenance)
            group = file.create_group("tokens")
            put(group, "ids", ids)
            put(group, "bytes", np.frombuffer(b"".join(texts), np.uint8))
            put(group, "offsets", np.cumsum([0, *map(len, texts)], dtype=np.int64))

    def runs(self, runs: Sequence[RunInfo]) -> None:
        """All runs of the trace, in the order of the tables' first axis. May be called again when more is known of the
        same runs. Raises ValueError if they are misnumbered."""
        if [run.index for run in runs] != list(range(len(runs))):
            raise ValueError("runs are numbered 0, 1, 2 … in their order")
        if self._n_runs not in (None, len(runs)):
            raise ValueError(f"{len(runs)} runs replace {self._n_runs}: only the same runs can be told again")
        with self._record() as file:
            if self._n_runs is not None:
                del file["runs"]
            put_json(file, "runs", [run.to_json() for run in runs])
        self._n_runs = len(runs)

    def table(self, reference: str, point: str, table: Table) -> None:
        """Divergence of every run from `reference` at one hook point."""
        self._check_table(point, table)
        with self._record() as file:
            group = self._new(file, f"divergence/{check_name(reference)}", check_name(point))
            put_attribute(group.id, "kind", table.kind)
            for name, value in table.attrs.items():
                put_attribute(group.id, check_name(name), value)
            put_json(group, "buckets", list(table.buckets))
            for name, values in table.arrays.items():
                put(group, check_name(name), values)
            if "diff2" in table.arrays:
                sums = table.arrays
                put(group, "rel_l2", relative_l2(sums["diff2"], sums["ref2"], sums["n"], sums.get("nonfinite", 0)))

    def rows(
        self, reference: str, point: str, offsets: np.ndarray, position: np.ndarray, arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Divergence row by row. offsets: [run + 1] into the packed rows; position: [packed row]; arrays: name ->
        [layer, packed row]."""
        offsets, position = np.asarray(offsets, np.int64), np.asarray(position, np.int64)
        if self._n_runs is None or offsets.shape != (self._n_runs + 1,) or position.shape != (offsets[-1],):
            raise ValueError(f"offsets {offsets.shape} and position {position.shape} do not fit {self._n_runs} runs")
        for name, values in arrays.items():
            if values.ndim != 2 or values.shape[1] != len(position):
                raise ValueError(f"rows of {point}: {name} is {values.shape}, want [layer, {len(position)}]")
        with self._record() as file:
            group = self._new(file, f"rows/{check_name(reference)}", check_name(point))
            put(group, "offsets", offsets)
            put(group, "position", position)
            for name, values in arrays.items():
                put(group, check_name(name), values, chunk=(1, max(1, CHUNK_BYTES // values.itemsize)))

    def state(
        self,
        run: int,
        name: str,
        positions: np.ndarray,
        array: np.ndarray,
        logical_dtype: str,
        cast: Cast | None = None,
    ) -> None:
        """Raw values of one hook point, such as 'layers.5.window_kv', in one run.

        positions: [row] absolute. array: [row, …], in the storage dtype of `logical_dtype` (uint16 bits for bfloat16,
        uint8 bits for fp8). cast: what casting to it lost. Raises ValueError on another shape or dtype.
        """
        want = storage_dtype(logical_dtype)
        positions = np.asarray(positions, np.int64)
        if array.dtype != want:
            raise ValueError(f"{name}: {logical_dtype} is stored as {want}, got {array.dtype}")
        if array.ndim < 1 or positions.shape != array.shape[:1]:
            raise ValueError(f"{name}: positions {positions.shape} do not fit values {array.shape}")
        if self._n_runs is None or not 0 <= run < self._n_runs:
            raise ValueError(f"{name}: no run {run} among {self._n_runs}")
        if is_positions(stored := stored_name(name)):
            raise ValueError(f"{name!r} is a name for positions")
        if f"states/{run:04d}/{stored}" in self._kept:
            return
        self._check_room(self._open().size + array.nbytes if self._compression is None else 0)
        with self._record() as file:
            if run not in self._groups:
                self._groups[run] = file.require_group(f"states/{run:04d}")
            group = self._groups[run]
            if self._compression is None:
                data = put_straight(self._open(), group, stored, array)
            else:
                data = put(group, stored, array, compression=self._compression)
            if array.dtype.kind == "u":
                put_attribute(data, "logical_dtype", logical_dtype)
            if cast is not None:
                put_attribute(data, "model_dtype", cast.source)
                for lost in LOST:
                    put_attribute(data, lost, getattr(cast, lost))
            self._put_positions(run, stored, positions)

    def _put_positions(self, run: int, name: str, positions: np.ndarray) -> None:
        """Most states of a run have the same rows: those of the first are the run's, others have a name of their own,
        and are stored once under all their names."""
        group, rows, own = self._groups[run], positions.tobytes(), f"{name}.{POSITIONS}"
        known = self._positions.setdefault(run, {})
        if not known and POSITIONS in group:
            known[np.asarray(group[POSITIONS]).tobytes()] = POSITIONS
        if rows not in known:
            known[rows] = own if known else POSITIONS
            put(group, known[rows], positions)
        elif known[rows] != POSITIONS:
            group.id.links.create_hard(own.encode(), group.id, known[rows].encode())

    def text(self, name: str, text: str) -> None:
        """A named text, such as a greedy continuation."""
        with self._record() as file:
            put_text(file.require_group("texts"), check_name(name), text)

    def _new(self, file: h5py.File, where: str, name: str) -> h5py.Group:
        """A new group; a run that was taken up tells again what the stopped one had told of fewer layers."""
        group = file.require_group(where)
        if f"{where}/{name}" in self._kept:
            self._kept.remove(f"{where}/{name}")
            del group[name]
        return group.create_group(name)

    def _check_table(self, point: str, table: Table) -> None:
        if table.kind not in KINDS:
            raise ValueError(f"{point}: no kind {table.kind!r}; the kinds are {', '.join(KINDS)}")
        if self._n_runs is None:
            raise ValueError("runs come before tables")
        if "n" not in table.arrays:
            raise ValueError(f"{point}: the table has no row counts 'n'")
        layers = table.arrays["n"].shape[1]
        for name, values in table.arrays.items():
            last = len(THRESHOLDS) if name in PER_THRESHOLD else len(table.buckets)
            if values.shape != (self._n_runs, layers, last):
                raise ValueError(f"{point}: {name} is {values.shape}, want {(self._n_runs, layers, last)}")

    def _check_room(self, size: int) -> None:
        """Raises TraceError if a file of so many bytes is larger than allowed or leaves the disk too little."""
        if self._max_bytes is not None and size > self._max_bytes:
            raise TraceError(
                f"{self.path} would be larger than the {self._max_bytes:,} bytes that --max-bytes allows; "
                f"what was recorded is at {self.partial}"
            )
        grows = size - self._open().committed
        if self._keep_free and (free := shutil.disk_usage(self.path.parent).free) - grows < self._keep_free:
            raise TraceError(f"the disk of {self.path} has only {free:,} bytes free; make room or give another -o")

    def _open(self) -> Disk:
        if self._disk is None:
            raise TraceError(f"{self.path} is not being written: use the writer in a `with` block")
        return self._disk

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """The records of this block are in the file when it ends, or none of them: that is quicker than one by one."""
        before = self._records, self._n_runs, self._complete
        try:
            with self._one_line(), self._commit() as self._batch:
                yield
                self._batch.attrs["records"] = self._records
        except BaseException:
            self._records, self._n_runs, self._complete = before
            raise
        finally:
            self._batch = None

    @contextlib.contextmanager
    def _record(self) -> Iterator[h5py.File]:
        """One record: its datasets and the counter. It is in the file when the block ends, or not at all."""
        self._open()
        if self._batch is not None:
            yield self._batch
        else:
            with self._one_line(), self._commit() as file:
                yield file
                file.attrs["records"] = self._records + 1
        self._records += 1

    @contextlib.contextmanager
    def _commit(self, mode: Literal["w", "r+"] = "r+") -> Iterator[h5py.File]:
        """Changes to the file that are made together. HDF5 opens and closes it each time, so that what is committed is
        a file at rest: this format checks every piece of metadata and refuses a file that was left open."""
        disk = self._open()
        try:
            with h5py.File(disk, mode, libver=_LIBVER) as file:
                yield file
            self._check_room(disk.size)
            disk.commit()
        except BaseException:
            disk.rollback()
            self._positions.clear()
            raise
        finally:
            self._groups.clear()

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except TraceError:
            raise
        except (OSError, RuntimeError) as error:
            raise TraceError(f"cannot write {self.partial}: {_reason(error)}") from error
        except ValueError as error:
            if "name already exists" in str(error):
                raise TraceError(f"the same part of {self.partial} is recorded twice: {error}") from error
            raise


def _reason(error: BaseException) -> str:
    """In the words of the system, and the next step: HDF5 hides both in a long message."""
    hidden = re.search(r"errno = (\d+)", str(error))
    if number := getattr(error, "errno", None) or (int(hidden[1]) if hidden else 0):
        return system_error(OSError(number, os.strerror(number)))
    found = re.search(r"error message = '([^']+)'", str(error))
    return found[1] if found else " ".join(str(error).split())[:160]


def _sync(path: Path) -> None:
    """Push a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
