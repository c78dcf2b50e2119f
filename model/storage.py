"""Safetensors shards as memory maps: headers are checked before they are believed, tensors are views, pages go back."""

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayscope.model.weights import WeightsError

# Names in a header → what can be decoded.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
_MAX_HEADER = 100 << 20
# Rows of a table gathered before its pages are given back: the system maps up to 16 pages around each.
_ROWS = 32


class Shard:
    """One .safetensors file, mapped; ``entries``: name → where it lies. Only the header is read.

    Raises WeightsError with one line for a file that is no safetensors file or ends before its last tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self.header_size, header = _read_header(file.read(8), file.read, self.size)
                # Copy on write: torch takes only buffers that could be written. Nothing writes.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.entries = {k: self._entry(v) for k, v in header.items() if k != "__metadata__"}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise WeightsError(f"cannot read weights {path}: {str(e).splitlines()[0] if str(e) else e!r}") from e

    def _entry(self, raw: dict[str, Any]) -> "Entry":
        shape, (first, last) = tuple(raw["shape"]), raw["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, first, last)) or last < first:
            raise ValueError("its header gives an impossible shape or place")
        start, stop = 8 + self.header_size + first, 8 + self.header_size + last
        if stop > self.size:
            raise ValueError(f"it is truncated: {self.size:,} bytes, the header promises {stop:,} or more")
        dtype = DTYPES.get(raw["dtype"])
        if dtype is not None and math.prod(shape) * dtype.itemsize != last - first:
            raise ValueError(f"its header gives {last - first:,} bytes to a tensor {list(shape)} of {raw['dtype']}")
        return Entry(self, str(raw["dtype"]), shape, start, stop)

    def view(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers from byte ``start`` on, [count], sharing the map's memory where they are aligned."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        if start % dtype.itemsize:
            whole = bytearray(self._map[start : start + count * dtype.itemsize])
            return torch.frombuffer(whole, dtype=dtype, count=count)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)

    def release(self) -> None:
        """Give the pages read so far back to the system; they are read again when they are needed again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def read_ahead(self, start: int, stop: int) -> None:
        """Ask the system to bring these bytes into its cache; nothing of it counts as this process's memory."""
        if hasattr(os, "posix_fadvise"):
            with self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor: the header's name of its dtype, its stored shape, and its first and last + 1 byte."""

    shard: Shard
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self) -> Tensor:
        """The tensor as stored, a view of the map."""
        return self.shard.view(self.start, math.prod(self.shape), DTYPES[self.dtype]).view(self.shape)

    def rows(self, at: Tensor) -> Tensor:
        """Rows ``at`` [n] of a tensor [rows, columns], copied; of the rest only what lies on the same pages is read."""
        table = self.shard.view(self.start, self.stop - self.start, torch.uint8).view(self.shape[0], -1)
        out = torch.empty(len(at), table.shape[1], dtype=torch.uint8)
        for part, some in zip(out.split(_ROWS), at.split(_ROWS), strict=True):
            torch.index_select(table, 0, some, out=part)
            self.shard.release()
        return out.view(DTYPES[self.dtype])


def _read_header(first: bytes, read: Any, size: int) -> tuple[int, dict[str, Any]]:
    """Length of the JSON header, and the header itself."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise ValueError("it is no safetensors file, or truncated")
    header = json.loads(read(length))
    if not isinstance(header, dict) or not all(isinstance(v, dict) for v in header.values()):
        raise ValueError("its header is no table of tensors")
    return length, header
