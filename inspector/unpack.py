"""Packed rows of a V4.1 cache as numbers: window KV, main KV and index keys.

A row is its numbers and then its scales. Engines keep rows in pages: the numbers of all of a page's rows, then the
scales of all of them, then what fills the page up (SGLang's dsv4/kv_layout.py, torch_quant.py, rope_pack_indexer.py).
Every number times its scale is exact in float32, as far as that has the exponent.

    name     bytes  numbers              scales
    window   528    512 e4m3             16 ue8m0, one per 32 numbers
    main     288    512 e2m1 (256 bytes) 32 e4m3, one per 16 numbers
    index    68     128 e2m1 (64 bytes)  4 ue8m0, one per 32 numbers
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose
from replayscope.traces.dtypes import decode

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


@dataclass(frozen=True)
class Layout:
    """width: numbers of a row; block: numbers that share a scale; fp4: two to a byte; scale: dtype of the scales."""

    width: int
    block: int
    fp4: bool
    scale: str

    @property
    def data_bytes(self) -> int:
        return self.width // 2 if self.fp4 else self.width

    @property
    def scale_bytes(self) -> int:
        return self.width // self.block

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


LAYOUTS = {
    "window": Layout(512, 32, False, "float8_e8m0fnu"),
    "main": Layout(512, 16, True, "float8_e4m3fn"),
    "index": Layout(128, 32, True, "float8_e8m0fnu"),
}


def unpack(packed: ndarray, name: str, page: int | None = None) -> ndarray:
    """uint8 -> float32 [row, width]; without `page` rows [row, row_bytes], each with its scales behind it; with it
    pages of so many rows [page, …], whatever axes a page has, as long as it holds its rows (more bytes are padding).

    Raises UsageError if the name is no layout or the shape does not fit it.
    """
    layout = LAYOUTS[choose("packed layout", name, list(LAYOUTS))]
    if packed.dtype not in (np.uint8, np.int8) or packed.ndim < 2:
        raise UsageError(f"packed {name} rows are bytes [row, byte], got {packed.dtype} {list(packed.shape)}")
    flat = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
    if page is None:
        if flat.shape[1] != layout.row_bytes:
            raise UsageError(f"a packed {name} row has {layout.row_bytes} bytes, got {flat.shape[1]}")
        return _numbers(flat[:, : layout.data_bytes], flat[:, layout.data_bytes :], layout)
    need = page * layout.row_bytes
    if flat.shape[1] < need:
        raise UsageError(f"a page of {page} packed {name} rows has at least {need} bytes, got {flat.shape[1]}")
    data = flat[:, : page * layout.data_bytes].reshape(-1, layout.data_bytes)
    scales = flat[:, page * layout.data_bytes : need].reshape(-1, layout.scale_bytes)
    return _numbers(data, scales, layout)


def e2m1_pairs(packed: ndarray) -> ndarray:
    """Bytes [row, byte] -> float32 [row, 2·byte]; the low half of a byte is the first of its two numbers."""
    codes = np.stack((packed & 0xF, packed >> 4), -1).reshape(len(packed), -1)
    return _E2M1[codes]


def _numbers(data: ndarray, scales: ndarray, layout: Layout) -> ndarray:
    values = e2m1_pairs(data) if layout.fp4 else decode(np.ascontiguousarray(data), "float8_e4m3fn")
    # Scales that no engine writes may leave the range of float32; they give inf or NaN, and a comparison shows those.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values * np.repeat(decode(np.ascontiguousarray(scales), layout.scale), layout.block, 1)
