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


def fletcher32(data: np.ndarray, size: int) -> list[bytes]:
    """The four bytes that HDF5 stores behind each chunk of `size` bytes that holds a part of `data`, a contiguous array
    of any shape and dtype; the rest of the last chunk is zeros."""
    data = data.reshape(-1).view(np.uint8)
    full, last = divmod(data.size, size)
    sums = _sums(data[: full * size].reshape(full, size)) if full else []
    if last:
        sums += _sums(data[full * size :].reshape(1, last))
    n = -(-size // 2)
    # Its running sums are folded into 16 bits; only words that are all 0 give 0, otherwise 65535 stands for it.
    folded = (((256 * s % _MODULUS or _MODULUS) if s1 else 0 for s in (n * s1 - ahead, s1)) for s1, ahead in sums)
    return [(high << 16 | low).to_bytes(4, "little") for high, low in folded]


def _sums(chunks: np.ndarray) -> list[tuple[int, int]]:
    """Σ w[i] and Σ i·w[i] of each row of bytes; exact for the 4 GB that a chunk may have, the second modulo 65535."""
    count, size = chunks.shape
    if rest := size % (2 * _COLUMNS):
        padded = np.zeros((count, 2 * _COLUMNS), np.uint8)
        padded[:, :rest] = chunks[:, size - rest :]
        ends, chunks = _sums(padded), chunks[:, : size - rest]
        before = chunks.shape[1] // 2
        starts = _sums(chunks) if before else [(0, 0)] * count
        return [(s + e, i + j + before * e) for (s, i), (e, j) in zip(starts, ends, strict=True)]
    words = chunks.view("<u2").reshape(count, -1, _COLUMNS)
    rows = np.add.reduce(words, 2, np.uint32).astype(np.int64)
    # Sums of 65536 words fit 32 bits, which takes half as long as 64.
    columns = np.add.reduce(words, 1, np.uint32 if words.shape[1] <= 1 << 16 else np.uint64).astype(np.int64)
    starts = np.arange(0, words.shape[1] * _COLUMNS, _COLUMNS) % _MODULUS
    ahead = rows @ starts + columns @ _COLUMN
    return list(zip(rows.sum(1).tolist(), ahead.tolist(), strict=True))
