"""Reading: in threads and processes, while the file changes, and in errors that name what is there."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from replayscope.traces import TraceError, TraceReader
from tests.synthetic import synthetic_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "t.h5"
    synthetic_trace(path, n_tokens=48, layers=3, cuts=(9, 24, 32))
    return path


def fingerprint(path: Path) -> float:
    trace = TraceReader(path)
    total = sum(float(np.nansum(trace.table("full", point).arrays["n"])) for point in trace.points("full"))
    return total + sum(float(trace.state(run, name).values.sum()) for run, name in trace.states())


def test_threads_read_what_one_reads(path):
    alone = fingerprint(path)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(fingerprint, [path] * 6)) == {alone}


def test_one_reader_is_shared_by_threads(path):
    trace = TraceReader(path)
    with ThreadPoolExecutor(4) as pool:
        runs = list(
            pool.map(lambda _: len(trace.runs) + len(trace.tokens.texts) + len(trace.points("full")), range(40))
        )
    assert len(set(runs)) == 1


def test_processes_read_what_one_reads(path):
    script = """
        import sys, numpy as np
        from replayscope.traces import TraceReader
        trace = TraceReader(sys.argv[1])
        print(sum(float(trace.state(run, name).values.sum()) for run, name in trace.states()))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1
    assert all(process.returncode == 0 for process in processes)


def test_no_handle_stays_open(path):
    def handles() -> list[str]:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.lexists(link)]

    trace = TraceReader(path)
    trace.table("full", "hidden")
    with pytest.raises(TraceError):
        trace.table("full", "nothing")
    assert str(path) not in handles()


def test_a_reader_can_be_copied_and_pickled(path):
    trace = TraceReader(path)
    assert trace.runs
    for twin in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert twin.runs == trace.runs and twin.points("full") == trace.points("full")


def test_a_replaced_file_is_read_again(tmp_path):
    synthetic_trace(tmp_path / "t.h5", n_tokens=32, layers=3, cuts=(9,))
    trace = TraceReader(tmp_path / "t.h5")
    assert len(trace.tokens.ids) == 32
    synthetic_trace(tmp_path / "t.h5", n_tokens=40, layers=3, cuts=(9,))
    assert len(trace.tokens.ids) == 40
    (tmp_path / "t.h5").unlink()
    with pytest.raises(TraceError, match="no trace at"):
        _ = trace.tokens


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda t: t.table("fulll", "hidden"), "has no fulll in divergence; it has full, oracle"),
        (lambda t: t.table("full", "hiddn"), "has no hiddn in divergence/full; it has attn_in"),
        (lambda t: t.table("full", "../oracle/hidden"), "has no ../oracle/hidden in divergence/full"),
        (lambda t: t.table("full", "hidden").bucket("windw"), "no region 'windw'; this trace has all, window"),
        (lambda t: t.rows("full", "mix", 0), "has no mix in rows/full; it has attn_out"),
        (lambda t: t.rows("full", "hidden", 99), "has no run 99; its runs are 0 to"),
        (
            lambda t: t.state(0, "layers.7.hidden"),
            "run 0 of .* stores no layers.7.hidden; it stores layers.0.window_kv",
        ),
        (lambda t: t.state(1, "logits"), "has no 0001 in states"),
        (lambda t: t.text("sampled"), "has no sampled in texts; it has greedy"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(path, ask, says):
    with pytest.raises(TraceError, match=says):
        ask(TraceReader(path))


def test_rows_and_slices_of_a_state(path):
    trace = TraceReader(path)
    whole = trace.state(0, "layers.1.window_kv")
    part = trace.state(0, "layers.1.window_kv", slice(3, 6))
    assert part.positions.tolist() == [3, 4, 5] and (part.bits == whole.bits[3:6]).all()
    assert trace.row_points("full") == ["window_kv", "topk", "attn_out", "router", "hidden", "logits"]
    assert trace.rows("full", "hidden", 0).position.size == 0
    assert trace.sizes()["divergence"] > 0


def test_traces_needs_no_torch():
    script = "import replayscope.traces, sys; assert not {'torch', 'plotly', 'gradio'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
