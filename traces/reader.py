"""Reading a trace. Every call opens the file, reads what it needs and closes it, so a reader may be shared by threads,
kept while the file is replaced, and copied."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from replayscope.traces import safe
from replayscope.traces.dtypes import decode, storage_dtype
from replayscope.traces.errors import TraceError, TraceFormatError
from replayscope.traces.schema import (
    KINDS,
    LOST,
    PER_THRESHOLD,
    POINTS,
    POSITIONS,
    THRESHOLDS,
    Cast,
    RowTable,
    RunInfo,
    State,
    Table,
    Tokens,
    is_positions,
    natural_key,
    natural_name,
    stored_name,
)

T = TypeVar("T")


class TraceReader:
    """One trace file. Raises TraceError in one line: when made, if the file is missing, foreign, damaged or newer than
    this program; in a call, if what is asked for is not in the file or not safe to read."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._small: dict[str, Any] = {}
        self._stamp: tuple[int, int] | None = None
        with safe.open_trace(self.path):
            pass

    @property
    def complete(self) -> bool:
        """False while the writer is at work and for ever if it was stopped."""
        return self._cached("complete", lambda file: safe.attribute(file, "complete") == 1)

    @property
    def schema_version(self) -> int:
        """Version of the format that the file is written in."""
        return self._cached("schema_version", lambda file: int(safe.attribute(file, "schema_version") or 0))

    @property
    def records(self) -> int:
        """Number of records that were written and flushed."""
        return self._cached("records", lambda file: int(safe.attribute(file, "records") or 0))

    @property
    def config(self) -> dict[str, Any]:
        """The model's config as recorded."""
        return self._cached("config", lambda file: _document(file, "config", dict))

    @property
    def provenance(self) -> dict[str, Any]:
        """What is needed to run it again: versions, seed, hashes, dtype, device, options."""
        return self._cached("provenance", lambda file: _document(file, "provenance", dict))

    @property
    def runs(self) -> list[RunInfo]:
        """All runs, in the order of the tables' first axis."""
        return self._cached("runs", lambda file: [RunInfo.from_json(run) for run in _document(file, "runs", list)])

    @property
    def tokens(self) -> Tokens:
        """Token ids and texts of the prompt."""
        return self._cached("tokens", _tokens)

    def references(self) -> list[str]:
        """What the runs were compared with: 'full', 'oracle'."""
        return self._cached("references", lambda file: _children(file, "divergence"))

    def points(self, reference: str) -> list[str]:
        """Hook points that have a table against `reference`, in the order in which a token meets them."""
        return self._cached(
            f"points {reference}", lambda file: sorted(_children(file, "divergence", reference), key=_place)
        )

    def table(self, reference: str, point: str) -> Table:
        """Divergence of every run from `reference` at one hook point."""
        return self._cached(f"table {reference} {point}", lambda file: _table(file, reference, point))

    def row_points(self, reference: str) -> list[str]:
        """Hook points that were kept row by row against `reference`."""
        with safe.open_trace(self.path) as file:
            return sorted(_children(file, "rows", reference), key=_place)

    def rows(self, reference: str, point: str, run: int) -> RowTable:
        """Divergence of one run, row by row."""
        with safe.open_trace(self.path) as file:
            group = _find(file, "rows", reference, point)
            offsets = safe.read_array(group, "offsets")
            if not 0 <= run < len(offsets) - 1:
                raise TraceError(f"{self.path} has no run {run}; its runs are 0 to {len(offsets) - 2}")
            first, stop = int(offsets[run]), int(offsets[run + 1])
            position = safe.read(safe.dataset(group, "position"), slice(first, stop))
            names = [name for name in safe.names(group) if name not in ("offsets", "position")]
            at = (slice(None), slice(first, stop))
            return RowTable(position, {name: safe.read(safe.dataset(group, name), at) for name in names})

    def states(self) -> list[tuple[int, str]]:
        """(run, name) of every stored raw state, such as (3, 'layers.5.window_kv'), by run and then by layer."""
        with safe.open_trace(self.path) as file:
            found = []
            for run in _children(file, "states"):
                if not run.isdecimal():
                    raise TraceFormatError(f"{self.path}: /states/{run} is not the number of a run")
                stored = safe.names(safe.subgroup(safe.subgroup(file, "states"), run))
                found += [(int(run), natural_name(name)) for name in stored if not is_positions(name)]
            return sorted(found, key=lambda item: (item[0], natural_key(item[1])))

    def positions(self, run: int, name: str) -> np.ndarray:
        """Positions of the stored rows of one hook point in one run, without its values."""
        with safe.open_trace(self.path) as file:
            return safe.read(_positions(self._stored(file, run, name), name))

    def state(self, run: int, name: str, rows: slice = slice(None)) -> State:
        """Raw values of one hook point in one run; `rows` selects stored rows, and only those are read."""
        with safe.open_trace(self.path) as file:
            group, stored = self._stored(file, run, name), stored_name(name)
            data, positions = safe.dataset(group, stored), _positions(group, name)
            logical = safe.attribute(data, "logical_dtype")
            if logical is None and data.dtype.kind != "u":
                logical = data.dtype.name
            if not isinstance(logical, str):
                raise TraceFormatError(f"{self.path}: {data.name} has no logical_dtype")
            if data.dtype != storage_dtype(logical) or positions.shape != data.shape[:1]:
                raise TraceFormatError(f"{self.path}: {data.name} does not fit its dtype tag or its positions")
            bits = safe.read(data, rows)
            return State(safe.read(positions, rows), decode(bits, logical), logical, bits, _cast(data))

    def _stored(self, file: h5py.File, run: int, name: str) -> h5py.Group:
        """The states of a run, among which is the one named."""
        group = _find(file, "states", f"{run:04d}")
        if stored_name(name) not in group:
            have = sorted((natural_name(n) for n in safe.names(group) if not is_positions(n)), key=natural_key)
            raise TraceError(f"run {run} of {self.path} stores no {name}; it stores {', '.join(have)}")
        return group

    def texts(self) -> list[str]:
        """Names of the stored texts."""
        with safe.open_trace(self.path) as file:
            return _children(file, "texts")

    def text(self, name: str) -> str:
        """A named text."""
        with safe.open_trace(self.path) as file:
            return safe.read_bytes(_parent(file, "texts", name), name).decode("utf-8", "surrogatepass")

    def sizes(self) -> dict[str, int]:
        """Stored bytes of each part of the file: 'divergence', 'rows', 'states', …"""
        total: dict[str, int] = {}
        seen: set[h5py.Dataset] = set()
        with safe.open_trace(self.path) as file:
            for path, item in safe.walk(file):
                # Positions that states share are one dataset under several names.
                if isinstance(item, h5py.Dataset) and item not in seen:
                    seen.add(item)
                    part = path.split("/")[1]
                    total[part] = total.get(part, 0) + int(item.id.get_storage_size())
        return total

    def verify(self) -> list[str]:
        """Read every number against its checksum and every table against the runs; one line per fault, [] if sound."""
        faults = []
        with safe.open_trace(self.path) as file:
            if safe.attribute(file, "complete") != 1:
                faults.append("the trace is partial: its writer did not finish")
            for path, item in safe.walk(file):
                if isinstance(item, TraceFormatError):
                    faults.append(str(item))
                elif bad := _unreadable(item):
                    faults.append(f"{path}: {bad}")
        more: list[str] = []
        for check in (lambda: self.config, lambda: self.provenance, lambda: self.tokens):
            more += _fault(check)
        if not (broken := _fault(lambda: self.runs)):
            n_runs = len(self.runs)
            for reference in self.references():
                for point in self.points(reference):
                    more += _fault(lambda r=reference, p=point: _fits(self.table(r, p), n_runs, f"{r}/{p}"))
        # Every damaged part is named above already; what else HDF5 stumbles over is not.
        found = faults + [fault for fault in more + broken if safe.DAMAGED not in fault]
        return [fault.replace(safe.SEE_VERIFY, "") for fault in found]

    def _cached(self, key: str, read: Callable[[h5py.File], T]) -> T:
        """A small part of the file, read again only when the file has changed."""
        with_stamp = _stamp(self.path)
        if with_stamp != self._stamp:
            self._small, self._stamp = {}, with_stamp
        if key not in self._small:
            with safe.open_trace(self.path) as file:
                self._small[key] = read(file)
        return self._small[key]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


def _positions(group: h5py.Group, name: str) -> h5py.Dataset:
    """Those of the state's own rows, or those of the run."""
    own = f"{stored_name(name)}.{POSITIONS}"
    return safe.dataset(group, own if own in group else POSITIONS)


def _cast(data: h5py.Dataset) -> Cast | None:
    source, *lost = (safe.attribute(data, name) for name in ("model_dtype", *LOST))
    if source is None:
        return None
    if not isinstance(source, str) or not all(isinstance(n, int) and n >= 0 for n in lost):
        raise TraceFormatError(f"{data.file.filename}: {data.name} does not say right what its cast lost")
    return Cast(source, *(int(n or 0) for n in lost))


def _place(point: str) -> tuple[int, str]:
    return (POINTS.index(point) if point in POINTS else len(POINTS)), point


def _children(file: h5py.File, *path: str) -> list[str]:
    """Names inside a group; none where the first part is missing: a trace need not have rows, states or texts."""
    if path[0] not in file:
        return []
    return safe.names(_find(file, *path))


def _parent(file: h5py.File, *path: str) -> h5py.Group:
    """The group that holds the last name of the path. Raises TraceError with the names that are there."""
    group: h5py.Group = file
    for depth, name in enumerate(path):
        # `name in group` would read '/' and '.' as a path.
        if name not in safe.names(group):
            where = "/".join(path[:depth]) or "the trace"
            have = ", ".join(safe.names(group)) or "nothing"
            raise TraceError(f"{file.filename} has no {name} in {where}; it has {have}")
        if depth < len(path) - 1:
            group = safe.subgroup(group, name)
    return group


def _find(file: h5py.File, *path: str) -> h5py.Group:
    return safe.subgroup(_parent(file, *path), path[-1])


def _document(file: h5py.File, name: str, kind: type[T]) -> T:
    value = safe.read_json(_parent(file, name), name)
    if not isinstance(value, kind):
        raise TraceFormatError(f"{file.filename}: /{name} is not a JSON {kind.__name__}")
    return value


def _tokens(file: h5py.File) -> Tokens:
    group = _find(file, "tokens")
    ids, offsets = safe.read_array(group, "ids"), safe.read_array(group, "offsets")
    data = safe.read_bytes(group, "bytes")
    if ids.ndim != 1 or offsets.shape != (len(ids) + 1,) or offsets[-1] != len(data):
        raise TraceFormatError(f"{file.filename}: the token texts do not fit the token ids")
    try:
        texts = [
            data[first:stop].decode("utf-8", "surrogatepass")
            for first, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
    except UnicodeDecodeError:
        raise TraceFormatError(f"{file.filename}: a token text is not UTF-8") from None
    return Tokens(ids, texts)


def _table(file: h5py.File, reference: str, point: str) -> Table:
    group = _find(file, "divergence", reference, point)
    kind, buckets = safe.attribute(group, "kind"), safe.read_json(group, "buckets")
    if kind not in KINDS or not isinstance(buckets, list) or not all(isinstance(name, str) for name in buckets):
        raise TraceFormatError(f"{file.filename}: {group.name} is not a divergence table")
    # rel_l2 follows from the sums; it is there for readers without this package.
    names = [name for name in safe.names(group) if name not in ("buckets", "rel_l2")]
    arrays = {name: safe.read_array(group, name) for name in names}
    return Table(str(kind), buckets, arrays, {k: safe.attribute(group, k) for k in group.attrs if k != "kind"})


def _fits(table: Table, n_runs: int, name: str) -> None:
    for array, values in table.arrays.items():
        last = len(THRESHOLDS) if array in PER_THRESHOLD else len(table.buckets)
        if values.ndim != 3 or values.shape[0] != n_runs or values.shape[2] != last:
            raise TraceFormatError(f"/divergence/{name}/{array} is {values.shape}, want ({n_runs}, layers, {last})")


def _fault(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except TraceError as error:
        return [str(error)]
    return []


def _unreadable(data: h5py.Dataset) -> str | None:
    """The first part of a dataset that cannot be read or fails its checksum, a chunk at a time."""
    for block in data.iter_chunks() if data.chunks else [()]:
        try:
            data[block]
        except (OSError, RuntimeError):
            rows = f" at rows {block[0].start} to {block[0].stop - 1}" if block else ""
            return f"damaged{rows}: the stored bytes fail their checksum or cannot be read"
    return None
