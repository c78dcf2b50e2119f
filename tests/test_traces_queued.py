"""Writing beside computing: one thread, bounded memory, errors that reach the caller, limits kept while running."""

import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from replayscope.inspector import cli
from replayscope.traces import QueuedWriter, TraceError, TraceReader, TraceWriter, disk, queued, writer
from tests import small
from tests.test_traces_crash import failing

STATE = np.zeros((256, 256), np.float32)  # 256 KiB
PARTIAL = ["the trace is partial: its writer did not finish"]


def begin(out: QueuedWriter | TraceWriter) -> None:
    out.header(config={}, provenance={}, tokens=small.TOKENS)
    out.runs(small.RUNS)


def state(out: QueuedWriter | TraceWriter, layer: int, array: np.ndarray = STATE) -> None:
    out.state(0, f"layers.{layer}.hidden", np.arange(len(array)), array, "float32")


@contextmanager
def held(out: QueuedWriter) -> Iterator[None]:
    """What is recorded inside waits until the block ends."""
    go = threading.Event()
    out._put(go.wait, 0)
    try:
        yield
    finally:
        go.set()


def test_the_queue_writes_what_the_writer_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(small, "TraceWriter", lambda path, force: QueuedWriter(TraceWriter(path, force)))
    small.small_trace(tmp_path / "t.h5")
    small.check(TraceReader(tmp_path / "t.h5"))
    assert os.listdir(tmp_path) == ["t.h5"]


def test_one_thread_makes_every_call_to_hdf5_and_ends(tmp_path, monkeypatch):
    threads = set()
    real = h5py.File

    def file(*words, **options):
        threads.add(threading.current_thread().name)
        return real(*words, **options)

    monkeypatch.setattr(writer.h5py, "File", file)
    with QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        state(out, 0)
    assert threads == {"trace writer"}
    assert "trace writer" not in {thread.name for thread in threading.enumerate()}


def most_waiting(tmp_path, monkeypatch, pending: int) -> tuple[int, float, float]:
    """Bytes that waited at most, seconds of the slow disk, and seconds that the caller was held up by 12 records."""
    slow = 0.02
    real = TraceWriter.state

    def crawl(self, *words):
        time.sleep(slow)
        real(self, *words)

    monkeypatch.setattr(TraceWriter, "state", crawl)
    most = 0
    with QueuedWriter(TraceWriter(tmp_path / "t.h5", force=True), pending) as out:
        begin(out)
        out.flush()
        began = time.perf_counter()
        for layer in range(12):
            state(out, layer)
            most = max(most, out._bytes)
        held = time.perf_counter() - began
    assert len(TraceReader(tmp_path / "t.h5").states()) == 12
    return most, 12 * slow, held


def test_a_slow_disk_holds_the_caller_up_before_memory_grows(tmp_path, monkeypatch):
    most, spent, held = most_waiting(tmp_path, monkeypatch, 3 * STATE.nbytes)
    assert most <= 3 * STATE.nbytes and held > spent / 2
    most, spent, held = most_waiting(tmp_path, monkeypatch, STATE.nbytes // 2)
    assert most == STATE.nbytes, "a record larger than the queue waits alone"


def test_without_a_bound_more_waits(tmp_path, monkeypatch):
    most, _, _ = most_waiting(tmp_path, monkeypatch, 1 << 40)
    assert most > 3 * STATE.nbytes


def test_an_error_of_the_thread_reaches_the_caller(tmp_path, monkeypatch):
    out = QueuedWriter(TraceWriter(tmp_path / "t.h5"))
    with pytest.raises(TraceError, match="No space left on device"), out:
        begin(out)
        out.flush()
        monkeypatch.setattr(disk.os, "pwritev", failing(600_000))
        for layer in range(1000):
            state(out, layer)
    trace = TraceReader(out.writer.partial)
    assert not out.writer.path.exists() and [name for _, name in trace.states()] == [
        "layers.0.hidden",
        "layers.1.hidden",
    ]
    assert trace.verify() == PARTIAL
    monkeypatch.undo()
    with QueuedWriter(TraceWriter(tmp_path / "t.h5")) as again:
        begin(again)
    assert os.listdir(tmp_path) == ["t.h5"]


def test_a_wrong_record_is_told_and_the_file_is_not_finished(tmp_path):
    with pytest.raises(ValueError, match="no run 7"), QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        out.state(7, "embed", np.arange(1), np.zeros((1, 2)), "float64")
    assert os.listdir(tmp_path) == ["t.h5.partial"]
    assert TraceReader(tmp_path / "t.h5.partial").verify() == PARTIAL


def test_interrupted_it_writes_what_waits_and_says_so(tmp_path):
    with pytest.raises(KeyboardInterrupt) as raised, QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        for layer in range(5):
            state(out, layer)
        raise KeyboardInterrupt
    assert any("t.h5.partial" in note for note in raised.value.__notes__)
    assert len(TraceReader(tmp_path / "t.h5.partial").states()) == 5 and not (tmp_path / "t.h5").exists()


@pytest.mark.parametrize("kind", [TraceWriter, lambda inner: QueuedWriter(inner)])
def test_the_largest_size_is_kept_while_running(tmp_path, kind):
    limit = 1 << 20
    make = (lambda inner: inner) if kind is TraceWriter else kind
    inner = TraceWriter(tmp_path / "t.h5", max_bytes=limit)
    with pytest.raises(TraceError, match="larger than the 1,048,576 bytes that --max-bytes allows"), make(inner) as out:
        begin(out)
        for layer in range(20):
            state(out, layer)
    assert inner.partial.stat().st_size <= limit
    assert 2 <= len(TraceReader(inner.partial).states()) < 4
    with TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        for layer in range(20):
            state(out, layer)
    assert (tmp_path / "t.h5").stat().st_size > limit


def test_the_disk_keeps_something_free(tmp_path, monkeypatch):
    free = [1 << 30]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    out = TraceWriter(tmp_path / "t.h5", keep_free=1 << 20)
    with pytest.raises(TraceError, match="has only 1,100,000 bytes free"), out:
        begin(out)
        state(out, 0)
        free[0] = 1_100_000
        state(out, 1)
    assert [name for _, name in TraceReader(out.partial).states()] == ["layers.0.hidden"]


def test_runs_can_be_told_again_and_only_the_same_ones(tmp_path):
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS[:1])
        state(out, 0)
        out.runs([small.FULL.__class__(**{**small.FULL.to_json(), "cached_changed": 3})])
        with pytest.raises(ValueError, match="2 runs replace 1"):
            out.runs(small.RUNS)
    assert TraceReader(tmp_path / "t.h5").runs[0].cached_changed == 3
    assert TraceReader(tmp_path / "t.h5").verify() == []


def test_compressed_states_are_smaller_and_the_same(tmp_path):
    values = np.repeat(np.arange(256, dtype=np.float32)[:, None], 256, axis=1)
    for name, compression in (("plain.h5", None), ("packed.h5", "gzip")):
        with TraceWriter(tmp_path / name, compression=compression) as out:
            begin(out)
            state(out, 0, values)
    plain, packed = (TraceReader(tmp_path / name) for name in ("plain.h5", "packed.h5"))
    assert packed.verify() == [] and packed.path.stat().st_size < plain.path.stat().st_size / 2
    small.same(packed.state(0, "layers.0.hidden").bits, plain.state(0, "layers.0.hidden").bits)


def test_a_state_that_would_look_like_a_bomb_is_stored_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("replayscope.traces.safe._SMALL", 1 << 10)
    with TraceWriter(tmp_path / "t.h5", compression="gzip") as out:
        begin(out)
        state(out, 0)
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.verify() == [] and (trace.state(0, "layers.0.hidden").values == 0).all()
    with h5py.File(trace.path) as file:
        assert file["states/0000/layers.000.hidden"].compression is None


@pytest.fixture
def commits(monkeypatch) -> list[int]:
    """One entry for every commit so far."""
    found: list[int] = []
    commit = disk.Disk.commit
    monkeypatch.setattr(disk.Disk, "commit", lambda self: found.append(1) or commit(self))
    return found


def test_states_that_wait_are_committed_together(tmp_path, commits):
    """All of them or none, and each by itself where together they do not go: as many as fit are kept."""
    with QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        out.flush()
        before = len(commits)
        with held(out):
            for layer in range(20):
                state(out, layer)
        out.flush()
        assert len(commits) - before <= 2
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.verify() == [] and trace.records == 22 and len(trace.states()) == 20
    with h5py.File(trace.path) as file:
        group = file["states/0000"]
        assert len({h5py.h5o.get_info(group[name].id).addr for name in group if name.endswith("positions")}) == 1
    assert trace.sizes()["states"] < trace.path.stat().st_size


def test_a_short_recording_is_two_commits_of_which_the_last_says_that_it_is_whole(tmp_path, commits):
    """And one that says so is not taken back by a state that does not go with it."""
    with QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        for layer in range(3):
            state(out, layer)
    assert len(commits) == 2, "the empty trace, and all that it holds"
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.complete and trace.records == 5 and trace.verify() == []
    inner = TraceWriter(tmp_path / "u.h5")
    with pytest.raises(ValueError, match="do not fit"), QueuedWriter(inner) as out, held(out):
        begin(out)
        state(out, 0)
        out.state(0, "embed", np.arange(3), STATE, "float32")
    trace = TraceReader(inner.partial)
    assert not trace.complete and trace.records == 3 and len(trace.states()) == 1


@pytest.mark.parametrize("moment", [0.05, 1e6])
def test_states_gather_for_a_moment_and_no_longer(tmp_path, monkeypatch, commits, moment):
    """They come one by one, with time between them in which each could have been committed by itself."""
    monkeypatch.setattr(queued, "_MOMENT", 1e6)
    with QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        out.flush()
        before = len(commits)
        for layer in range(5):
            state(out, layer)
            time.sleep(0.01)
        assert len(commits) == before
        out.flush()
        assert len(commits) == before + 1
        monkeypatch.setattr(queued, "_MOMENT", moment)
        state(out, 5)
        late = time.monotonic() + (0.3 if moment > 1 else 60)
        while len(commits) == before + 1 and time.monotonic() < late:
            time.sleep(0.01)
        assert (len(commits) == before + 2) is (moment < 1)
    assert len(TraceReader(tmp_path / "t.h5").states()) == 6


def test_what_is_written_is_let_go_before_more_comes(tmp_path):
    with QueuedWriter(TraceWriter(tmp_path / "t.h5")) as out:
        begin(out)
        array = STATE.copy()
        held = weakref.ref(array)
        state(out, 0, array)
        del array
        assert held() is not None
        out.flush()
        late = time.monotonic() + 60
        while held() is not None and time.monotonic() < late:
            time.sleep(0.001)
        assert held() is None


def test_of_states_that_do_not_go_together_those_that_fit_are_kept(tmp_path):
    inner = TraceWriter(tmp_path / "t.h5", max_bytes=200_000)
    with pytest.raises(TraceError, match="--max-bytes"), QueuedWriter(inner) as out:
        begin(out)
        out.flush()
        with held(out):
            for layer in range(20):
                state(out, layer, np.full((64, 64), layer, np.float32))
        out.flush()
    trace = TraceReader(inner.partial)
    kept = [name for _, name in trace.states()]
    assert 5 < len(kept) < 15 and kept == [f"layers.{layer}.hidden" for layer in range(len(kept))]
    assert trace.records == 2 + len(kept) and [f for f in trace.verify() if "partial" not in f] == []


def test_the_command_line_compresses_raw_states(tmp_path, capsys):
    words = [
        "record",
        "-p",
        "ids:" + ",".join(map(str, range(160))),
        "--arms",
        "full",
        "--hooks",
        "layers.1.hidden",
        "-q",
    ]
    for name, more in (("plain.h5", []), ("packed.h5", ["--compression", "gzip"])):
        assert cli.main([*words, *more, "-o", str(tmp_path / name)]) == 0
    packed = {}
    for name in ("plain.h5", "packed.h5"):
        with h5py.File(tmp_path / name) as file:
            packed[name] = file["states/0000/layers.001.hidden"].compression
    assert packed == {"plain.h5": None, "packed.h5": "gzip"}
