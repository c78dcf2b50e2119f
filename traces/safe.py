"""Opening HDF5 that a stranger may have written.

Nothing is followed (soft, external or virtual), nothing unpickled (object dtypes), and nothing allocated that is larger
than the bytes which the file really has.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from replayscope.traces.disk import LOCKED, recover
from replayscope.traces.errors import TraceError, TraceFormatError, TraceLockedError, TraceVersionError, system_error
from replayscope.traces.schema import FORMAT, SCHEMA_VERSION

_FILTERS = {h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE}
_SMALL, _DENSEST = 64 << 20, 64
_MAX_DEPTH = 4
_SUPERBLOCK = 48  # bytes of the block that a file of version 3 begins with
DAMAGED = "is damaged: the stored bytes fail their checksum or cannot be read"
SEE_VERIFY = "replayscope show --verify names every damaged part; "
_VERIFY = f"{SEE_VERIFY}copy or record it again"
_GIVE = "give a file that record, sweep or import wrote"


@contextmanager
def open_trace(path: Path) -> Iterator[h5py.File]:
    """The open file, read-only, closed on leaving. Raises TraceError in one line, reads inside the block included."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise TraceError(f"no trace at {path}; check the path") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {system_error(error)}") from None
    if path.is_dir():
        raise TraceError(f"{path} is a folder; give the .h5 file in it")
    if size == 0:
        raise TraceFormatError(f"{path} is empty (0 bytes); copy or record it again")
    try:
        recover(path)
        file = h5py.File(path, "r")
    except OSError as error:
        raise _opening(path, error, size) from None
    try:
        with file:
            _check_header(file, path)
            yield file
    except TraceError:
        raise
    except (OSError, RuntimeError, KeyError) as error:
        # What HDF5 raises on damaged bytes, by kind of damage.
        raise TraceFormatError(f"{path} is damaged: {_short(error)}; {_VERIFY}") from None


def _opening(path: Path, error: OSError, size: int) -> TraceError:
    text = str(error)
    if error.errno in LOCKED or "unable to lock file" in text:
        return TraceLockedError(f"{path} is in use by another process; try again when it is done")
    if "file signature not found" in text:
        return TraceFormatError(f"{path} is not an HDF5 file; {_GIVE}")
    # Of a file that ends within its first block HDF5 says whatever it stumbles over.
    if "truncated file" in text or size < _SUPERBLOCK:
        return TraceFormatError(f"{path} is truncated: the file ends before its data; copy or record it again")
    if error.errno == 13:
        return TraceError(f"cannot read {path}: permission denied; make it readable")
    return TraceFormatError(f"{path} cannot be opened: {_short(error)}")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).strip("'\"").split())
    return text if len(text) <= 160 else text[:157] + "…"


def _check_header(file: h5py.File, path: Path) -> None:
    if attribute(file, "format") != FORMAT:
        raise TraceFormatError(f"{path} is HDF5 but not a ReplayScope trace; {_GIVE}")
    version = attribute(file, "schema_version")
    if not isinstance(version, int) or version < 1:
        raise TraceFormatError(f"{path} has no valid schema version")
    if version > SCHEMA_VERSION:
        raise TraceVersionError(
            f"{path} has schema version {version}, this program reads up to {SCHEMA_VERSION}; use a newer one"
        )


def attribute(item: h5py.File | h5py.Group | h5py.Dataset, name: str) -> int | float | str | None:
    """A scalar attribute, or None where it is missing or is no scalar number or text of fixed length.

    Text of variable length lies in a heap without checksums; one wrong byte there sends HDF5 into an endless loop.
    """
    if name not in item.attrs:
        return None
    where = item.attrs.get_id(name)
    if where.shape != () or where.dtype.kind not in "iufS":
        return None
    value = np.asarray(item.attrs[name]).item()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def place(item: h5py.Group | h5py.Dataset, name: str = "") -> str:
    """Where an item, or a name in it, lies in the file: '/divergence/full/hidden'."""
    own = str(item.name).rstrip("/")
    return f"{own}/{name}" if name else own


def names(group: h5py.Group) -> list[str]:
    """Names in a group, sorted. Raises TraceFormatError if one is no text."""
    found = list(group)
    if not all(isinstance(name, str) for name in found):
        raise TraceFormatError(f"{group.file.filename}: {place(group)} holds a name that is not UTF-8")
    return sorted(found)


def child(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """The group or checked dataset called `name`. Raises TraceFormatError on a link or on a dataset not to be read."""
    where = place(group, name)
    kind = group.get(name, getlink=True)
    if not isinstance(kind, h5py.HardLink):
        shown = "is missing" if kind is None else "is a soft or external link, which is never followed"
        raise TraceFormatError(f"{group.file.filename}: {where} {shown}")
    item = group[name]
    if isinstance(item, h5py.Dataset):
        check_dataset(item)
    elif not isinstance(item, h5py.Group):
        raise TraceFormatError(f"{group.file.filename}: {where} is neither a group nor a dataset")
    return item


def check_dataset(data: h5py.Dataset) -> None:
    """Raises TraceFormatError unless reading the dataset touches this file only and at most the bytes it stores."""
    size = os.stat(data.file.filename).st_size
    if reason := unsafe(data, size):
        raise TraceFormatError(f"{data.file.filename}: {data.name} {reason}")


def unsafe(data: h5py.Dataset, file_size: int) -> str | None:
    """Why a dataset of a file with so many bytes may not be read, or None."""
    try:
        dtype, shape = data.dtype, data.shape
    except TypeError:
        return "has a dtype that numpy does not know"
    if dtype.kind not in "iuf":
        return f"holds {dtype}, not numbers"
    if shape is None:
        return "is empty"
    plist = data.id.get_create_plist()
    if data.external or plist.get_external_count():
        return "keeps its data in another file, which is never followed"
    if data.is_virtual:
        return "is a virtual dataset, which is never followed"
    for i in range(plist.get_nfilters()):
        if plist.get_filter(i)[0] not in _FILTERS:
            return "is stored with a filter that traces do not use"
    stored = min(data.id.get_storage_size(), file_size)
    packed = any(plist.get_filter(i)[0] == h5py.h5z.FILTER_DEFLATE for i in range(plist.get_nfilters()))
    if packed and not str(data.name).startswith("/states/"):
        return "is compressed, which only raw states may be: they are read one at a time"
    claimed = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
    if bomb(claimed, stored) if packed and stored else claimed > stored:
        return f"claims {claimed} bytes but the file holds {stored}"
    chunk = int(np.prod([int(n) for n in data.chunks], dtype=object)) * dtype.itemsize if data.chunks else 0
    if chunk > (_SMALL if packed else file_size):
        return "claims chunks larger than the file"
    return None


def bomb(claimed: int, stored: int) -> bool:
    """Whether so many compressed bytes may not be unpacked to so many: states never shrink like that, zeros do."""
    return claimed > max(_SMALL, _DENSEST * stored)


def dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """The checked dataset called `name`."""
    item = child(group, name)
    if not isinstance(item, h5py.Dataset):
        raise TraceFormatError(f"{group.file.filename}: {place(group, name)} is a group, not numbers")
    return item


def subgroup(group: h5py.Group, name: str) -> h5py.Group:
    """A group inside a group."""
    item = child(group, name)
    if not isinstance(item, h5py.Group):
        raise TraceFormatError(f"{group.file.filename}: {place(group, name)} is not a group")
    return item


def read_bytes(group: h5py.Group, name: str) -> bytes:
    """A one-dimensional uint8 dataset as bytes."""
    data = dataset(group, name)
    if data.dtype != np.uint8 or data.ndim != 1:
        raise TraceFormatError(f"{group.file.filename}: {place(group, name)} is not text")
    return read(data).tobytes()


def read_json(group: h5py.Group, name: str) -> Any:
    """A JSON document kept as UTF-8 bytes."""
    try:
        return json.loads(read_bytes(group, name))
    except (ValueError, RecursionError):
        raise TraceFormatError(f"{group.file.filename}: {place(group, name)} is not JSON") from None


def read_array(group: h5py.Group, name: str) -> np.ndarray:
    """A whole dataset."""
    return read(dataset(group, name))


def read(data: h5py.Dataset, where: Any = ()) -> np.ndarray:
    """The numbers of a checked dataset at an index. Raises TraceFormatError that names it where they are damaged."""
    try:
        return data[where]
    except (OSError, RuntimeError):
        raise TraceFormatError(f"{data.file.filename}: {data.name} {DAMAGED}; {_VERIFY}") from None


def walk(group: h5py.Group, depth: int = 0) -> Iterator[tuple[str, h5py.Dataset | TraceFormatError]]:
    """Every dataset below a group as (path, dataset), or (path, error) where one may not be read."""
    if depth > _MAX_DEPTH:
        yield place(group), TraceFormatError(f"{group.file.filename}: {place(group)} is nested too deep")
        return
    for name in names(group):
        path = place(group, name)
        try:
            item = child(group, name)
        except (TraceFormatError, OSError, RuntimeError, KeyError) as error:
            yield path, error if isinstance(error, TraceFormatError) else TraceFormatError(f"{path}: {_short(error)}")
            continue
        if isinstance(item, h5py.Group):
            yield from walk(item, depth + 1)
        else:
            yield path, item
