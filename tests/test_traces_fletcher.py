"""The checksum of a chunk, against the one that HDF5 stores and against its definition."""

import h5py
import numpy as np
import pytest

from replayscope.traces.fletcher import fletcher32


def stored(data: np.ndarray) -> bytes:
    """What HDF5 puts behind the only chunk of a dataset."""
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        item = file.create_dataset("x", data=data, chunks=data.shape, fletcher32=True)
        return item.id.read_direct_chunk((0,) * data.ndim)[1][-4:]


def defined(data: bytes) -> bytes:
    """Word by word, the high byte first."""
    s1 = s2 = 0
    for i in range(0, len(data), 2):
        s1 += int.from_bytes(data[i : i + 2].ljust(2, b"\0"), "big")
        s2 += s1
    folded = [(s % 65535 or 65535) if s else 0 for s in (s1, s2)]
    return (folded[1] << 16 | folded[0]).to_bytes(4, "little")


SIZES = [1, 2, 3, 719, 720, 721, 2047, 2048, 2049, 4095, 4096, 6150, 100_001]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_one_that_hdf5_stores(size):
    random = np.random.default_rng(size)
    for data in (random.integers(0, 256, size, np.uint8), np.full(size, 255, np.uint8), np.zeros(size, np.uint8)):
        assert fletcher32(data, size) == [stored(data)] == [defined(data.tobytes())], data[:3]


@pytest.mark.parametrize("size", SIZES)
def test_of_many_chunks_of_which_the_last_is_not_full(size):
    random = np.random.default_rng(size)
    for total in (1, size - 1, size + 1, 3 * size - 1, 3 * size, 2 * size + size // 2):
        data = random.integers(0, 256, total, np.uint8)
        chunks = np.concatenate((data, np.zeros(-total % size, np.uint8))).reshape(-1, size)
        assert fletcher32(data, size) == [stored(chunk) for chunk in chunks], total


@pytest.mark.parametrize("dtype", ["u2", "i4", "f4", "f8", "i8"])
def test_of_any_dtype_and_shape(dtype):
    values = (1e3 * np.random.default_rng(0).standard_normal((37, 3, 41))).astype(dtype)
    assert fletcher32(values, values.nbytes) == [stored(values)]


def test_sums_that_are_multiples_of_65535():
    """Where a sum folds to 0 although a word is not: both 0 and 65535 are 0 there, and HDF5 stores one of them."""
    for words in ([0xFFFF], [1, 0xFFFE], [0, 0, 0xFFFF, 0], [0xFFFF] * 4096, [0x8000, 0, 0x7FFF]):
        data = np.array(words, "<u2")
        assert fletcher32(data, data.nbytes) == [stored(data)], words


def test_of_a_chunk_as_large_as_a_writer_makes_none():
    """Sums of 2^23 words of the largest value do not overflow."""
    data = np.full(1 << 23, 0xFFFF, np.uint16)
    assert fletcher32(data, data.nbytes) == [b"\xff" * 4]


@pytest.mark.parametrize("at", [0, 1, 2048, 6149])
def test_a_flipped_bit_and_words_that_change_places_show(at):
    data = np.random.default_rng(1).integers(0, 256, 6150, np.uint8)
    flipped, swapped = data.copy(), data.view(np.uint16).copy()
    flipped[at] ^= 1
    swapped[[at // 2, 3000]] = swapped[[3000, at // 2]]
    assert len({*fletcher32(data, 6150), *fletcher32(flipped, 6150), *fletcher32(swapped, 6150)}) == 3
