"""Writing: nothing is overwritten, half written or locked without a word; a kill leaves a readable prefix."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import h5py
import numpy as np
import pytest

from replayscope.traces import (
    RunInfo,
    Table,
    Tokens,
    TraceError,
    TraceExistsError,
    TraceLockedError,
    TraceReader,
    TraceWriter,
)
from replayscope.traces.schema import bucket_names
from tests import small

RUN = RunInfo(index=0, arm="full", semantics="paper", cut=None, replay=None, start=0, stop=4, prompt_end=4, window=8)
TOKENS = Tokens(np.arange(4), ["a", "b", "c", "d"])

WRITER = """
    import sys, time, numpy as np
    from replayscope.traces import RunInfo, Tokens, TraceWriter
    run = RunInfo(0, "full", "paper", cut=None, replay=None, start=0, stop=4, prompt_end=4, window=8)
    out = TraceWriter(sys.argv[1], force=True).__enter__()
    out.header(config={"a": 1}, provenance={}, tokens=Tokens(np.arange(4), list("abcd")))
    out.runs([run])
    for layer in range(int(sys.argv[2])):
        out.state(0, f"layers.{layer}.hidden", np.arange(64), np.full((64, 256), layer, np.float32), "float32")
    with out._record() as file:
        file.create_dataset("states/unfinished", data=np.zeros(100_000))
        file.flush()
        print("ready", flush=True)
        time.sleep(60)
"""


def fill(path, force=False, value=0.0):
    with TraceWriter(path, force=force) as out:
        out.header(config={"a": 1}, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        out.state(0, "embed", np.arange(4), np.full((4, 2), value), "float64")


def writing(path, states=5) -> subprocess.Popen:
    """A process that holds an open writer."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(states)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_an_existing_file_is_kept_unless_forced(tmp_path):
    path = tmp_path / "t.h5"
    fill(path)
    before = path.read_bytes()
    with pytest.raises(TraceExistsError, match=r"t.h5 exists; use --force"):
        TraceWriter(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["t.h5"]
    fill(path, force=True, value=1.0)
    assert TraceReader(path).state(0, "embed").values[0, 0] == 1.0
    assert os.listdir(tmp_path) == ["t.h5"]


@pytest.mark.parametrize(("name", "says"), [("none/t.h5", "no folder"), ("", "is a folder"), ("sub", "is a folder"),
                                              ("pipe", "is no plain file but a pipe")])  # fmt: skip
def test_a_place_that_cannot_hold_a_trace_is_one_line(tmp_path, name, says):
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=says) as raised:
        TraceWriter(tmp_path / name, force=True)
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2


def test_a_pipe_in_place_of_the_unfinished_trace_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t.h5.partial")
    with pytest.raises(TraceError, match=r"cannot write .*t\.h5\.partial"), TraceWriter(tmp_path / "t.h5"):
        pass


def test_an_exception_keeps_the_prefix_and_says_where(tmp_path, caplog):
    path = tmp_path / "t.h5"
    fill(path)
    with pytest.raises(KeyError) as raised, TraceWriter(path, force=True) as out:
        out.header(config={"a": 2}, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        raise KeyError("stop")
    assert any("t.h5.partial" in note for note in raised.value.__notes__) and "t.h5.partial" in caplog.text
    assert TraceReader(path).config == {"a": 1}
    partial = TraceReader(out.partial)
    assert not partial.complete and partial.config == {"a": 2} and partial.records == 2
    assert partial.verify() == ["the trace is partial: its writer did not finish"]
    fill(path, force=True)
    assert not out.partial.exists()


def test_a_killed_writer_leaves_every_finished_record(tmp_path):
    path = tmp_path / "t.h5"
    process = writing(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not path.exists()
    partial = TraceReader(tmp_path / "t.h5.partial")
    assert not partial.complete and partial.records == 7
    assert [name for _, name in partial.states()] == [f"layers.{i}.hidden" for i in range(5)]
    assert (partial.state(0, "layers.4.hidden").values == 4).all()
    fill(path)
    assert TraceReader(path).complete and os.listdir(tmp_path) == ["t.h5"]


def test_a_file_that_is_being_written_is_in_use(tmp_path):
    path = tmp_path / "t.h5"
    process = writing(path)
    try:
        with pytest.raises(TraceLockedError, match="is in use by another process"):
            TraceWriter(path, force=True)
        with pytest.raises(TraceLockedError, match="is in use by another process"):
            TraceReader(tmp_path / "t.h5.partial")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert TraceReader(tmp_path / "t.h5.partial").records == 7


def test_a_file_that_another_process_holds_is_not_replaced(tmp_path):
    path = tmp_path / "t.h5"
    fill(path)
    hold = "import h5py, sys, time; f = h5py.File(sys.argv[1]); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        before = path.read_bytes()
        with pytest.raises(TraceLockedError, match="is in use by another process"):
            TraceWriter(path, force=True)
        assert path.read_bytes() == before
        assert TraceReader(path).complete, "two readers at once are fine"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path):
    path = tmp_path / "t.h5"
    fill(path)
    script = """
        import resource, signal, sys, numpy as np
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        from replayscope.traces import RunInfo, Tokens, TraceError, TraceWriter
        run = RunInfo(0, "full", "paper", cut=None, replay=None, start=0, stop=4, prompt_end=4, window=8)
        try:
            with TraceWriter(sys.argv[1], force=True) as out:
                out.header(config={"a": 2}, provenance={}, tokens=Tokens(np.arange(1), ["a"]))
                out.runs([run])
                for i in range(10):
                    out.state(0, f"layers.{i}.hidden", np.arange(64), np.ones((64, 256)), "float64")
        except TraceError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout and "File too large" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1 and "Traceback" not in done.stderr
    assert TraceReader(path).config == {"a": 1} and TraceReader(path).verify() == []


def test_nothing_recorded_is_not_a_trace(tmp_path):
    with pytest.raises(TraceError, match="nothing was recorded"), TraceWriter(tmp_path / "t.h5"):
        pass
    assert not (tmp_path / "t.h5").exists()


def test_the_same_part_twice_is_refused_and_the_first_kept(tmp_path):
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        out.text("greedy", "first")
        with pytest.raises(TraceError, match="recorded twice"):
            out.text("greedy", "second")
    assert TraceReader(tmp_path / "t.h5").text("greedy") == "first"


def test_what_does_not_fit_is_refused_with_both_shapes(tmp_path):
    buckets = bucket_names(1)
    good = {"n": np.ones((1, 2, len(buckets)), np.int64)}
    with TraceWriter(tmp_path / "t.h5") as out:
        with pytest.raises(ValueError, match="runs come before tables"):
            out.table("full", "hidden", Table("state", buckets, good))
        with pytest.raises(ValueError, match="numbered 0, 1, 2"):
            out.runs([RUN, RUN])
        with pytest.raises(ValueError, match="one text each"):
            out.header(config={}, provenance={}, tokens=Tokens(np.arange(3), ["a"]))
        out.header(config={}, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        with pytest.raises(ValueError, match=r"diff2 is \(1, 2\), want \(1, 2, 7\)"):
            out.table("full", "hidden", Table("state", buckets, good | {"diff2": np.ones((1, 2))}))
        with pytest.raises(ValueError, match="no kind 'states'"):
            out.table("full", "hidden", Table("states", buckets, good))
        with pytest.raises(ValueError, match="no row counts"):
            out.table("full", "hidden", Table("state", buckets, {}))
        with pytest.raises(ValueError, match="bfloat16 is stored as uint16, got float32"):
            out.state(0, "embed", np.arange(1), np.zeros((1, 2), np.float32), "bfloat16")
        with pytest.raises(ValueError, match=r"positions \(2,\) do not fit values \(1, 2\)"):
            out.state(0, "embed", np.arange(2), np.zeros((1, 2)), "float64")
        with pytest.raises(ValueError, match="no run 3"):
            out.state(3, "embed", np.arange(1), np.zeros((1, 2)), "float64")
        with pytest.raises(ValueError, match="a trace holds numbers"):
            out.table("full", "hidden", Table("state", buckets, {"n": np.full((1, 2, len(buckets)), "x")}))
        with pytest.raises(ValueError, match="Out of range float"):
            out.header(config={"a": float("nan")}, provenance={}, tokens=TOKENS)


def test_a_state_is_stored_in_logical_order(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"transposed": values.T, "every second row": values[::2], "expanded": np.broadcast_to(values[:1], (3, 6))}
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        for i, view in enumerate(views.values()):
            out.state(0, f"layers.{i}.hidden", np.arange(len(view)), view, "float32")
    trace = TraceReader(tmp_path / "t.h5")
    for i, view in enumerate(views.values()):
        np.testing.assert_array_equal(trace.state(0, f"layers.{i}.hidden").values, view)


def test_the_writer_is_used_in_a_with_block(tmp_path):
    with pytest.raises(TraceError, match="`with` block"):
        TraceWriter(tmp_path / "t.h5").runs([RUN])


def test_one_row_of_one_layer_is_read_cheaply(tmp_path):
    rng = np.random.default_rng(0)
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=TOKENS)
        out.runs([RUN])
        for layer in range(4):
            bits = rng.integers(0, 1 << 16, (4096, 512), dtype=np.uint16)
            out.state(0, f"layers.{layer}.window_kv", np.arange(4096), bits, "bfloat16")
    trace = TraceReader(tmp_path / "t.h5")
    with h5py.File(tmp_path / "t.h5") as file:
        data = file["states/0000/layers.003.window_kv"]
        assert data.chunks == (1024, 512), "one row reads one chunk of 1 MiB, a layer reads itself once"
    start = time.perf_counter()
    row = trace.state(0, "layers.3.window_kv", slice(4095, 4096))
    assert time.perf_counter() - start < 0.2
    assert row.positions.tolist() == [4095] and (row.bits == bits[-1:]).all()


def test_a_writer_goes_on_with_what_another_left(tmp_path):
    """States are kept as they are, tables are told again, and a record that is new may not be told twice."""
    path, hidden = tmp_path / "t.h5", small.tables()["hidden"]
    with pytest.raises(KeyboardInterrupt), TraceWriter(path) as out:
        out.header(config=small.CONFIG, provenance=small.PROVENANCE, tokens=small.TOKENS)
        out.runs(small.RUNS)
        out.state(1, "final", small.POSITIONS, *small.STATES["final"])
        less = {name: values * 0 for name, values in hidden.arrays.items()}
        out.table("full", "hidden", Table("state", hidden.buckets, less, hidden.attrs))
        raise KeyboardInterrupt
    out = TraceWriter(path)
    out.resume = True
    with out:
        with pytest.raises(ValueError, match="runs replace 2"):
            out.runs(small.RUNS[:1])
        out.runs(small.RUNS)
        for point, table in small.tables().items():
            out.table("full", point, table)
        with pytest.raises(TraceError, match="twice"):
            out.table("full", "hidden", hidden)
        out.rows("full", "hidden", small.OFFSETS, small.POSITIONS, small.rows())
        for name, (array, logical) in small.STATES.items():
            out.state(1, name, small.POSITIONS, array * 0 if name == "final" else array, logical)
        out.text("greedy", small.TEXT)
    trace = TraceReader(path)
    assert trace.verify() == [] and trace.records == 13
    small.check_table(trace.table("full", "hidden"), hidden)
    for name in small.STATES:
        small.check_state(trace.state(1, name), name)
