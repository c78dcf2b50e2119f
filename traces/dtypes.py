"""Dtypes that numpy lacks, kept bit by bit.

bf16, fp8, fp4 and bool values lie in the file as unsigned views with the attribute `logical_dtype`. float32 holds each
of the small floats exactly, so decoding loses nothing but the payload of a NaN.
"""

import numpy as np

from replayscope.traces.errors import TraceFormatError

BITVIEWS = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "float8_e8m0fnu": np.dtype(np.uint8),
    "float4_e2m1fn_x2": np.dtype(np.uint8),
    "bool": np.dtype(np.uint8),
}
NATIVE = {
    name: np.dtype(name)
    for name in (
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
    )
}
LOGICAL_DTYPES = (*BITVIEWS, *NATIVE)


def storage_dtype(logical: str) -> np.dtype:
    """The numpy dtype in which values of a logical dtype are stored. Raises TraceFormatError on an unknown name."""
    if logical in BITVIEWS:
        return BITVIEWS[logical]
    if logical in NATIVE:
        return NATIVE[logical]
    raise TraceFormatError(f"unknown dtype {logical!r}; this version knows {', '.join(LOGICAL_DTYPES)}")


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int, ieee: bool) -> np.ndarray:
    """Values of all 256 codes of a signed 8-bit float, float32. ieee: the top exponent holds inf and NaN."""
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    top = exponent == (1 << exponent_bits) - 1
    if ieee:
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(top & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return np.where(code >= 128, -value, value).astype(np.float32)


def _powers() -> np.ndarray:
    """Values of all 256 codes of e8m0: 2^(code-127), code 255 is NaN. float32."""
    value = np.ldexp(1.0, np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)


_VALUES = {
    "float8_e4m3fn": _small_float(4, 3, 7, ieee=False),
    "float8_e5m2": _small_float(5, 2, 15, ieee=True),
    "float8_e8m0fnu": _powers(),
}


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def decode(bits: np.ndarray, logical: str) -> np.ndarray:
    """Stored bits -> numbers of the same shape: float32 for bf16 and fp8, bool, otherwise the array itself.

    fp4 is packed by two, the first in the low half of a byte: float32 with a last axis twice as long.

    Raises TraceFormatError if the dtype is unknown or the bits have another width than it.
    """
    want = storage_dtype(logical)
    if bits.dtype != want:
        raise TraceFormatError(f"values tagged {logical} are stored as {bits.dtype}, expected {want}")
    if logical == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if logical == "float4_e2m1fn_x2":
        return _FP4[np.stack((bits & 15, bits >> 4), axis=-1)].reshape(*bits.shape[:-1], -1)
    if logical == "bool":
        return bits != 0
    if logical in _VALUES:
        return _VALUES[logical][bits]
    return bits


def encode_bf16(values: np.ndarray) -> np.ndarray:
    """float32 numbers -> bf16 bits (uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0) | (bits >> 16).astype(np.uint16), rounded)
