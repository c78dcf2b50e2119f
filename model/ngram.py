"""The baseline that `mini` has to beat: a byte n-gram model with Witten-Bell interpolation. No torch."""

import numpy as np


class NGram:
    """Counts of ``order``-grams of bytes over a text; h' is the context h without its first byte, and

    P_n(c|h) = (count(h·c) + distinct(h)·P_{n-1}(c|h')) / (count(h) + distinct(h)).

    Below order 1 every byte is equally likely. The default order of 5 predicts a byte from the 4 before it.
    """

    def __init__(self, text: bytes, order: int = 5) -> None:
        data = np.frombuffer(text, np.uint8)
        self.order = order
        # Per order: sorted grams (as integers) with counts, sorted contexts with counts and distinct continuations.
        self.tables = []
        for n in range(1, order + 1):
            grams, counts = np.unique(_packed(data, n), return_counts=True)
            contexts, first, distinct = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
            self.tables.append((grams, counts, contexts, np.add.reduceat(counts, first), distinct))

    def bits_per_byte(self, text: bytes) -> float:
        """Mean -log2 P of each byte of ``text`` from the second ``order`` on, in bits."""
        data = np.frombuffer(text, np.uint8)
        p = np.full(len(data) - self.order + 1, 1 / 256)
        for n, (grams, counts, contexts, totals, distinct) in enumerate(self.tables, 1):
            packed = _packed(data, n)[self.order - n :]
            context = packed >> np.uint64(8)
            seen = _lookup(grams, counts, packed)
            total, kinds = _lookup(contexts, totals, context), _lookup(contexts, distinct, context)
            p = np.where(total > 0, (seen + kinds * p) / np.maximum(total + kinds, 1), p)
        return float(-np.log2(p).mean())


def _packed(data: np.ndarray, n: int) -> np.ndarray:
    """Every run of n bytes as one integer, first byte highest."""
    out = np.zeros(len(data) - n + 1, np.uint64)
    for i in range(n):
        out = (out << np.uint64(8)) | data[i : len(data) - n + 1 + i].astype(np.uint64)
    return out


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
