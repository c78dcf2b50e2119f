"""What is committed goes to the disk while more is computed, so that the sync at the end finds little left to write."""

import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from replayscope.traces import QueuedWriter, TraceReader, TraceWriter, disk
from tests import small

STATE = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)  # 512 KiB
Asked = list[tuple[int, int]]


def states(out: TraceWriter | QueuedWriter, count: int) -> None:
    for layer in range(count):
        out.state(0, f"layers.{layer}.hidden", np.arange(256), STATE, "float32")


def record(out: TraceWriter | QueuedWriter, count: int) -> None:
    with out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS)
        states(out, count)


@pytest.fixture
def asked(monkeypatch) -> Asked:
    """First byte and bytes of every stretch that the system was asked to write, however it is asked."""
    found: Asked = []
    monkeypatch.setattr(disk, "_sync_file_range", lambda fd, at, count, flags: found.append((at, count)) or 0)
    return found


@pytest.mark.parametrize("queued", [False, True])
def test_all_but_the_end_is_on_its_way_before_the_sync(tmp_path, asked, monkeypatch, queued):
    at_sync = []
    real = disk.Disk.sync
    monkeypatch.setattr(disk.Disk, "sync", lambda self: at_sync.append(sum(n for _, n in asked)) or real(self))
    out = TraceWriter(tmp_path / "t.h5")
    record(QueuedWriter(out) if queued else out, 20)
    assert at_sync[0] > out.path.stat().st_size - disk._AHEAD - disk._PAGE > 9 << 20


def test_each_stretch_once_in_whole_pages_and_of_what_is_committed(tmp_path, asked, monkeypatch):
    """A page that is being written to the disk may hold up whoever changes it: the last one is left out."""
    committed = []
    real = disk._begin_to_sync

    def begin(fd: int, start: int, end: int) -> None:
        committed.append(os.fstat(fd).st_size)
        real(fd, start, end)

    monkeypatch.setattr(disk, "_begin_to_sync", begin)
    record(TraceWriter(tmp_path / "t.h5"), 20)
    assert asked[0][0] == 0 and len(asked) == len(committed) >= 5
    for (at, count), (following, _) in pairwise(asked):
        assert at + count == following
    for (at, count), size in zip(asked, committed, strict=True):
        assert (at + count) % disk._PAGE == 0 and at + count <= size and count >= disk._AHEAD


def test_a_small_trace_is_left_to_the_sync(tmp_path, asked):
    record(TraceWriter(tmp_path / "t.h5"), 1)
    assert asked == []


def test_what_a_stopped_writer_left_is_not_asked_for_again(tmp_path, asked):
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS)
        states(out, 8)
        raise KeyboardInterrupt
    left = out.partial.stat().st_size
    asked.clear()
    again = TraceWriter(tmp_path / "t.h5")
    again.resume = True
    with again:
        states(again, 16)
    assert asked[0][0] == left


@pytest.mark.parametrize("call", [None, lambda *words: -1, disk._find_sync_file_range()], ids=["none", "fails", "own"])
def test_the_trace_is_the_same_however_the_system_answers(tmp_path, monkeypatch, call):
    monkeypatch.setattr(disk, "_sync_file_range", call)
    record(TraceWriter(tmp_path / "t.h5"), 8)
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.complete and trace.verify() == [] and len(trace.states()) == 8
    small.same(trace.state(0, "layers.7.hidden").bits, STATE)


def test_a_system_without_the_call_has_none(monkeypatch):
    """An empty library, as on a Mac, or no library at all, as on Windows."""

    def refuse(name: None) -> object:
        raise TypeError("bad argument type for built-in operation")

    for library in (lambda name: object(), refuse):
        with monkeypatch.context() as patch:
            patch.setattr(disk.ctypes, "CDLL", library)
            assert disk._find_sync_file_range() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_linux_takes_the_call(tmp_path):
    call = disk._find_sync_file_range()
    assert call is not None
    with open(tmp_path / "x", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert call(file.fileno(), 0, 1 << 20, disk._SYNC_FILE_RANGE_WRITE) == 0
        assert call(file.fileno(), -1, 1 << 20, disk._SYNC_FILE_RANGE_WRITE) == -1, "arguments arrive as they are"


@pytest.fixture
def written(monkeypatch) -> Asked:
    """First byte and bytes of every call that writes to a file."""
    found: Asked = []
    real = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        count = real(fd, parts, at)
        found.append((at, count))
        return count

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    return found


def test_a_commit_writes_what_lies_together_at_once(tmp_path, written):
    """HDF5 makes a hundred writes for 20 states. Behind what was committed they are few stretches, with holes between
    them that HDF5 leaves; then come the journal and the pages that it is about."""
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS)
        before, size = len(written), (tmp_path / "t.h5.partial").stat().st_size
        with out.together():
            states(out, 20)
            assert len(written) == before
        counts = [count for at, count in written[before:] if at >= size]
    assert sum(counts) > 20 * STATE.nbytes and len(counts) < 12 and len(written) - before < 20
    assert TraceReader(tmp_path / "t.h5").verify() == []


def gathering(path: Path) -> disk.Disk:
    """One with 100 bytes committed, and 300 gathered behind them."""
    made = disk.Disk(path)
    made.write(bytes(100))
    made.commit()
    for at, byte in ((100, b"a"), (200, b"b"), (300, b"c")):
        made.seek(at)
        made.write(100 * byte)
    return made


@pytest.mark.parametrize("at", [80, 99, 100, 150, 199, 200, 250, 350, 399])
@pytest.mark.parametrize("count", [1, 100, 101, 250])
def test_bytes_written_twice_are_those_of_the_second_time(tmp_path, at, count):
    made = gathering(tmp_path / "x")
    want = bytearray(bytes(100) + b"a" * 100 + b"b" * 100 + b"c" * 100)
    want[at : at + count] = b"d" * count
    made.seek(at)
    made.write(b"d" * count)
    made.seek(0)
    assert made.read(len(want)) == want and made.size == len(want)
    assert (tmp_path / "x").read_bytes()[:100] == bytes(100), "what is committed waits for the commit"
    made.commit()
    assert (tmp_path / "x").read_bytes() == want
    made.close()


def test_what_was_gathered_is_forgotten_with_the_rest(tmp_path):
    made = gathering(tmp_path / "x")
    made.rollback()
    made.commit()
    assert (tmp_path / "x").read_bytes() == bytes(100) and made.size == 100
    made.close()


def test_memory_that_is_used_again_is_copied_and_not_much_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_COPIES", 1000)
    made, buffer, most = disk.Disk(tmp_path / "x"), bytearray(100), 0
    for i in range(50):
        buffer[:] = bytes([i]) * 100
        made.write(memoryview(buffer))
        most = max(most, sum(stop - start for start, stop, _ in made._gathered))
    assert 900 <= most <= 1100
    made.commit()
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([i]) * 100 for i in range(50))
    made.close()


def test_more_parts_than_one_call_takes(tmp_path, written):
    made = disk.Disk(tmp_path / "x")
    for i in range(3000):
        made.write(bytes([i % 256]) * 3)
    made.commit()
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([i % 256]) * 3 for i in range(3000))
    assert [count for _, count in written] == [3072, 3072, 2856]
    made.close()


@pytest.mark.parametrize("fails", [0, 1])
def test_what_cannot_be_written_is_told_by_the_commit_and_leaves_nothing(tmp_path, monkeypatch, fails):
    made = gathering(tmp_path / "x")
    made.seek(500)
    made.write(b"e" * 100)
    real, calls = os.pwritev, []

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        calls.append(at)
        if len(calls) > fails:
            raise OSError(28, "No space left on device")
        return real(fd, parts, at)

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    with pytest.raises(OSError, match="No space"):
        made.commit()
    assert len(calls) == fails + 1, "nothing is written after the first failure"
    made.rollback()
    monkeypatch.setattr(disk.os, "pwritev", real)
    made.seek(100)
    made.write(b"f" * 10)
    made.commit()
    assert (tmp_path / "x").read_bytes() == bytes(100) + b"f" * 10
    made.close()
