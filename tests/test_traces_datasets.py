"""States go from their array to the file: HDF5 alone reads them, whatever their shape, and sees damage."""

import h5py
import numpy as np
import pytest

from replayscope.traces import Tokens, TraceError, TraceReader, TraceWriter, datasets
from replayscope.traces.datasets import STATE_CHUNK_BYTES
from replayscope.traces.disk import Disk
from tests import small

SHAPES = {
    "one chunk": ((5, 3), np.float32),
    "one number": ((1,), np.float64),
    "no rows": ((0, 4), np.float32),
    "no columns": ((4, 0), np.float32),
    "several chunks": ((1024, 2, 128), np.float32),
    "a last chunk that is not full": ((1025, 300), np.float32),
    "an odd number of bytes": ((777, 1021), np.uint8),
    "a row larger than a chunk": ((3, STATE_CHUNK_BYTES // 8 + 1), np.float64),
}


def write(path, arrays: dict[str, np.ndarray]) -> None:
    with TraceWriter(path, force=True) as out:
        out.header(config={}, provenance={}, tokens=Tokens(np.arange(1), ["a"]))
        out.runs(small.RUNS)
        for i, array in enumerate(arrays.values()):
            out.state(0, f"layers.{i}.hidden", np.arange(len(array)), array, str(array.dtype))


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.integers(0, 255, shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def test_h5py_alone_reads_what_was_written(tmp_path, arrays):
    write(tmp_path / "t.h5", arrays)
    assert TraceReader(tmp_path / "t.h5").verify() == []
    with h5py.File(tmp_path / "t.h5") as file:
        for i, (name, array) in enumerate(arrays.items()):
            data = file[f"states/0000/layers.{i:03d}.hidden"]
            assert isinstance(data, h5py.Dataset) and (data[()] == array).all() and data.dtype == array.dtype, name
            assert array.size == 0 or data.fletcher32, name


def test_chunks_are_of_one_size_and_little_is_stored_that_is_no_row(tmp_path, arrays):
    write(tmp_path / "t.h5", arrays)
    with h5py.File(tmp_path / "t.h5") as file:
        for i, (name, array) in enumerate(arrays.items()):
            data = file[f"states/0000/layers.{i:03d}.hidden"]
            if array.size:
                row, count = array[:1].nbytes, data.id.get_num_chunks()
                assert row * data.chunks[0] <= max(STATE_CHUNK_BYTES, row), name
                # A chunk has its checksum, and no chunk lacks more than a row.
                assert array.nbytes <= data.id.get_storage_size() - 4 * count < array.nbytes + count * row, name


def test_a_wrong_checksum_shows_when_it_is_read(tmp_path, monkeypatch, arrays):
    monkeypatch.setattr(datasets, "fletcher32", lambda data, size: [bytes(4)] * -(-data.nbytes // size))
    write(tmp_path / "t.h5", arrays)
    with h5py.File(tmp_path / "t.h5") as file, pytest.raises(OSError, match="filter returned failure during read"):
        file["states/0000/layers.004.hidden"][0]
    assert len(TraceReader(tmp_path / "t.h5").verify()) == sum(array.size > 0 for array in arrays.values())


def test_bytes_over_what_is_committed_wait_for_the_commit(tmp_path):
    """HDF5 may put a chunk where an older part of the file was."""
    disk = Disk(tmp_path / "x")
    disk.write(bytes(10_000))
    disk.commit()
    disk.seek(9_000)
    disk.put((b"a" * 600, b"b" * 900), lambda: disk.write(bytes(1500)))
    assert (tmp_path / "x").read_bytes()[:10_000] == bytes(10_000) and disk.tell() == disk.size == 10_500
    disk.seek(9_000)
    assert disk.read(1500) == b"a" * 600 + b"b" * 900
    disk.commit()
    assert (tmp_path / "x").read_bytes() == bytes(9_000) + b"a" * 600 + b"b" * 900
    disk.close()


def test_a_chunk_that_hdf5_does_not_write_at_once_is_an_error(tmp_path, monkeypatch):
    put = Disk.put
    monkeypatch.setattr(Disk, "put", lambda self, parts, ask: put(self, parts, lambda: None))
    with pytest.raises(TraceError, match="HDF5 kept to itself"):
        write(tmp_path / "t.h5", {"one": np.ones((3, 3))})
    assert TraceReader(tmp_path / "t.h5.partial").states() == []
