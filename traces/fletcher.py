"""The checksum that HDF5 keeps behind every chunk, of bytes where they lie.

HDF5's filter computes it of a copy that it makes for the purpose. Fletcher-32 sums 16-bit words w[0] … w[n-1], and the
sums of all beginnings, modulo 65535: s1 = Σ w[i], s2 = Σ (n-i)·w[i]. A sum of integers may be taken in any order: rows
and columns of a matrix of words say both. HDF5 reads words with the high byte first (H5_checksum_fletcher32 in
H5checksum.c); swapping the bytes of every word multiplies by 256 modulo 65535, which is done once at the end.
"""

import numpy as np

_MODULUS = 0xFFFF
_COLUMNS = 1024  # words of a row: the sums of rows and of columns then take the same time
_COLUMN = np.arange(_COLUMNS)


def fletcher32(data: np.ndarray) -> bytes:
    """The four bytes that HDF5 stores behind a chunk that holds `data`, a contiguous array of any shape and dtype."""
    data = data.reshape(-1).view(np.uint8)
    n = -(-data.size // 2)
    whole = data.size - data.size % (2 * _COLUMNS)
    s1, ahead = _sums(data[:whole])
    if whole < data.size:
        last = np.zeros(2 * _COLUMNS, np.uint8)
        last[: data.size - whole] = data[whole:]
        more, beyond = _sums(last)
        s1, ahead = s1 + more, ahead + beyond + whole // 2 * more
    # Its running sums are folded into 16 bits; only words that are all 0 give 0, otherwise 65535 stands for it.
    high, low = ((256 * s % _MODULUS or _MODULUS) if s1 else 0 for s in (n * s1 - ahead, s1))
    return (high << 16 | low).to_bytes(4, "little")


def _sums(data: np.ndarray) -> tuple[int, int]:
    """Σ w[i] and Σ i·w[i] (modulo 65535) of whole rows of words; exact for the 4 GB that a chunk may have."""
    words = data.view("<u2").reshape(-1, _COLUMNS)
    rows = np.add.reduce(words, 1, np.uint32)
    # Sums of 65536 words fit 32 bits, which takes half as long as 64.
    columns = np.add.reduce(words, 0, np.uint32 if len(words) <= 1 << 16 else np.uint64).astype(np.int64)
    starts = np.arange(0, len(words) * _COLUMNS, _COLUMNS) % _MODULUS
    return int(np.add.reduce(rows, 0, np.int64)), int(starts @ rows.astype(np.int64)) + int(_COLUMN @ columns)
