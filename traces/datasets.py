"""How numbers and texts become datasets and attributes of the file."""

import json
from functools import lru_cache
from typing import Any, Literal

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t  # type: ignore[attr-defined]

from replayscope.traces.disk import Disk
from replayscope.traces.fletcher import fletcher32
from replayscope.traces.safe import bomb

CHUNK_BYTES = 256 * 1024  # large enough to stream, small enough that one row of one layer is read cheaply
STATE_CHUNK_BYTES = 1 << 20  # of raw states: most layers are one chunk then, which needs no index


def put(
    group: h5py.Group,
    name: str,
    values: np.ndarray,
    chunk: tuple[int, ...] | None = None,
    compression: Literal["gzip"] | None = None,
) -> h5d.DatasetID:
    """A dataset with a checksum on every chunk; one without elements cannot have chunks."""
    values = _numbers(name, values)
    if values.size == 0:
        return group.create_dataset(name, data=values).id
    chunk = chunk or _chunk(values, CHUNK_BYTES)
    chunk = tuple(min(want, have) for want, have in zip(chunk, values.shape, strict=True))
    if compression is None:
        made = _create(group, name, values, chunk)
        made.write(h5s.ALL, h5s.ALL, values, _type(values.dtype))
        return made
    packed = group.create_dataset(
        name, data=values, chunks=chunk, fletcher32=True, shuffle=True, compression=compression, compression_opts=1
    )
    group.file.flush()
    if bomb(values.nbytes, packed.id.get_storage_size()):
        # A reader cannot tell it from a file made to exhaust its memory.
        del group[name]
        return put(group, name, values, chunk)
    return packed.id


def put_straight(disk: Disk, group: h5py.Group, name: str, values: np.ndarray) -> h5d.DatasetID:
    """As `put`, for many bytes: they go from the array to the file, where HDF5 would copy them twice."""
    values = _numbers(name, values)
    if values.size == 0:
        return put(group, name, values)
    chunk = _chunk(values, STATE_CHUNK_BYTES)
    sums = fletcher32(values, chunk[0] * values[:1].nbytes)
    made = _create(group, name, values, chunk)
    origin = (0,) * (values.ndim - 1)
    for first, checksum in zip(range(0, len(values), chunk[0]), sums, strict=True):
        part = values[first : first + chunk[0]]
        if len(part) < chunk[0]:
            # The file holds whole chunks.
            part = np.concatenate((part, np.zeros((chunk[0] - len(part), *part.shape[1:]), part.dtype)))
        where, held = (first, *origin), _blank(part.nbytes + 4)
        disk.put((_bytes(part), checksum), lambda at=where, held=held: made.write_direct_chunk(at, held))
    return made


def put_text(group: h5py.Group, name: str, text: str) -> None:
    """Text as UTF-8 bytes; lone surrogates are kept."""
    put(group, name, np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8))


def put_json(group: h5py.Group, name: str, value: Any) -> None:
    """A JSON document. Raises ValueError on NaN and Infinity."""
    put_text(group, name, json.dumps(value, allow_nan=False))


def put_attribute(item: h5d.DatasetID | h5g.GroupID, name: str, value: Any) -> None:
    """A number, or text of fixed length: HDF5 keeps other text in a heap that has no checksum. Raises ValueError if
    there is one of the name."""
    data = np.asarray(np.bytes_(value.encode() or b"\0") if isinstance(value, str) else value)
    kind = _type(data.dtype)
    h5a.create(item, name.encode(), kind, _space(())).write(data, kind)


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{name} holds {values.dtype}; a trace holds numbers")
    return np.ascontiguousarray(values)


def _chunk(values: np.ndarray, size: int) -> tuple[int, ...]:
    """Whole rows, so many that the chunks are of one size: the last one is stored as large as the others."""
    most = max(1, size // max(1, values[:1].nbytes))
    count = -(-len(values) // most)
    return -(-len(values) // count), *values.shape[1:]


def _create(group: h5py.Group, name: str, values: np.ndarray, chunk: tuple[int, ...]) -> h5d.DatasetID:
    """A dataset that nothing is written of yet. h5py's own call takes several times as long."""
    return h5d.create(group.id, name.encode(), _type(values.dtype), _space(values.shape), _layout(chunk))


@lru_cache
def _type(dtype: np.dtype) -> h5t.TypeID:
    return h5t.py_create(dtype, logical=True)


@lru_cache
def _space(shape: tuple[int, ...]) -> h5s.SpaceID:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


@lru_cache
def _layout(chunk: tuple[int, ...]) -> h5p.PropDCID:
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_chunk(chunk)
    made.set_fletcher32()
    made.set_obj_track_times(False)
    return made


def _bytes(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


@lru_cache(maxsize=4)
def _blank(size: int) -> np.ndarray:
    """Bytes that are never looked at."""
    return np.empty(size, np.uint8)
