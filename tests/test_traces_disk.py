"""What is committed goes to the disk while more is computed, so that the sync at the end finds little left to write."""

import os
import sys
from itertools import pairwise

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
