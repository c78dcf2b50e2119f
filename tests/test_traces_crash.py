"""Kills: at every single write to the file, at random moments of a real process, and by a disk that is full."""

import os
import random
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from replayscope.traces import TraceError, TraceReader, TraceWriter, disk
from tests import small

ROOT = Path(__file__).resolve().parents[1]
Change = tuple[str, int, bytes]


@pytest.fixture(scope="module")
def changes(tmp_path_factory) -> tuple[list[Change], list[int]]:
    """Every change that a writer makes to its file, and after how many of them each record was reported done."""
    return recorded(tmp_path_factory.mktemp("crash") / "t.h5")


def recorded(path: Path) -> tuple[list[Change], list[int]]:
    log: list[Change] = []
    done: list[int] = []
    real = os.pwritev, os.ftruncate

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        log.append(("write", at, b"".join(parts)))
        return real[0](fd, parts, at)

    def ftruncate(fd: int, size: int) -> None:
        log.append(("cut", size, b""))
        real[1](fd, size)

    class Noting(TraceWriter):
        def _record(self):
            held = super()._record()

            class Told:
                def __enter__(self):
                    return held.__enter__()

                def __exit__(self, *error):
                    try:
                        return held.__exit__(*error)
                    finally:
                        done.append(len(log))

            return Told()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk.os, "pwritev", pwritev)
        patch.setattr(disk.os, "ftruncate", ftruncate)
        patch.setattr(small, "TraceWriter", Noting)
        small.small_trace(path)
    return log, done


def killed_after(count: int, log: list[Change], path: Path) -> None:
    """The file as it is when the process dies after so many changes; the last one may be torn."""
    with open(path, "w+b") as file:
        for kind, at, data in log[:count]:
            if kind == "cut":
                file.truncate(at)
            else:
                file.seek(at)
                file.write(data)


def lost(log: list[Change], done: list[int], path: Path, torn: bool) -> list[int]:
    """The moments at which a kill leaves a file that does not open or lacks a record that was reported done."""
    bad = []
    first = next(i for i in range(len(log)) if log[i][0] == "write" and log[i + 1][0] == "cut")  # the empty trace
    for moment in range(first + 2, len(log) + 1):
        changes = list(log[:moment])
        if torn and changes[-1][0] == "write":
            changes[-1] = ("write", changes[-1][1], changes[-1][2][: len(changes[-1][2]) // 2])
        killed_after(moment, changes, path)
        reported = sum(at < moment for at in done)
        try:
            trace = TraceReader(path)
            faults = [fault for fault in trace.verify() if "partial" not in fault]
            whole = trace.records >= reported and (trace.records < 2 or not faults)
        except TraceError:
            whole = False
        if not whole:
            bad.append(moment)
    return bad


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_write_loses_no_record_that_was_reported_done(changes, tmp_path, torn):
    log, done = changes
    assert len(done) == 11 and len(log) > 100
    assert lost(log, done, tmp_path / "k.h5", torn) == []


def test_without_the_journal_a_kill_loses_the_file(tmp_path, monkeypatch):
    def plain(self: disk.Disk) -> None:
        self._flush()
        for page, held in sorted(self._pages.items()):
            disk._write(self._fd, (held,), page * disk._PAGE)
        os.ftruncate(self._fd, self.size)
        self._pages.clear()
        self.committed = self.size

    monkeypatch.setattr(disk.Disk, "commit", plain)
    log, done = recorded(tmp_path / "t.h5")
    assert lost(log, done, tmp_path / "k.h5", torn=False)


def opens(path: Path) -> int | None:
    """Records that h5py alone finds in a file, by what the documentation says; None where it cannot be opened."""
    try:
        with h5py.File(path) as file:
            found = int(file.attrs["records"])
            for group in ("states", "divergence"):
                if group in file:
                    file[group].visititems(lambda name, item: item[()] if isinstance(item, h5py.Dataset) else None)
            return found
    except (OSError, RuntimeError, KeyError):
        return None


@pytest.mark.parametrize("torn", [False, True])
def test_what_the_documentation_says_repairs_a_partial_without_this_package(changes, tmp_path, torn):
    """And the twin: h5py alone, without it, does not open some of them."""
    log, done = changes
    script = re.search(r"```python\n(import struct.*?)```", (ROOT / "docs/trace-format.md").read_text(), re.S)[1]
    assert "replayscope" not in script
    path, run, unread, bad = tmp_path / "k.h5", compile(script, "script", "exec"), 0, []
    first = next(i for i in range(len(log)) if log[i][0] == "write" and log[i + 1][0] == "cut")
    for moment in range(first + 2, len(log) + 1):
        some = list(log[:moment])
        if torn and some[-1][0] == "write":
            some[-1] = ("write", some[-1][1], some[-1][2][: len(some[-1][2]) // 2])
        killed_after(moment, some, path)
        unread += opens(path) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["script", str(path)])
            exec(run, {})
        found = opens(path)
        if found is None or found < sum(at < moment for at in done):
            bad.append(moment)
    assert bad == [] and unread > 0


SCRIPT = """
    import sys, numpy as np
    from replayscope.traces import RunInfo, Tokens, TraceWriter
    run = RunInfo(0, "full", "paper", cut=None, replay=None, start=0, stop=4, prompt_end=4, window=8)
    print("start", flush=True)
    with TraceWriter(sys.argv[1], force=True) as out:
        out.header(config={"a": 1}, provenance={}, tokens=Tokens(np.arange(4), list("abcd")))
        out.runs([run])
        for layer in range(200):
            out.state(0, f"layers.{layer}.hidden", np.arange(64), np.full((64, 64), layer, np.float32), "float32")
            print(layer, flush=True)
    print("end", flush=True)
"""


def start(path: Path, script: str = SCRIPT) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_sigkill_at_random_moments_leaves_a_partial_and_never_half_a_file(tmp_path):
    path = tmp_path / "t.h5"
    draw = random.Random(0)
    cut_short = 0
    for _ in range(24):
        path.unlink(missing_ok=True)
        process = start(path)  # over whatever the last one left
        assert process.stdout.readline() == "start\n"
        heard = [process.stdout.readline() for _ in range(draw.randrange(40))]
        time.sleep(draw.uniform(0, 0.01))
        process.kill()
        # Not communicate(): it would miss what the first readline took along.
        with process.stdout:
            said = ("".join(heard) + process.stdout.read()).split()
        process.wait()
        layers = [int(word) for word in said if word.isdecimal()]
        if path.exists():
            assert TraceReader(path).complete and TraceReader(path).verify() == []
            continue
        partial = path.with_name("t.h5.partial")
        if not layers:
            continue  # nothing was reported done; the next run must work all the same
        cut_short += 1
        trace = TraceReader(partial)
        kept = [name for _, name in trace.states()]
        assert not trace.complete or "end" not in said
        assert kept[: len(layers)] == [f"layers.{layer}.hidden" for layer in layers]
        assert all((trace.state(0, f"layers.{layer}.hidden").values == layer).all() for layer in layers)
        assert [fault for fault in trace.verify() if "partial" not in fault] == []
    assert cut_short >= 5, "the kills fall into the writing"
    process = start(path)
    process.communicate()
    assert TraceReader(path).verify() == [] and os.listdir(tmp_path) == ["t.h5"]


def failing(at: int) -> Callable[[int, list[memoryview], int], int]:
    """A pwritev on a disk that has no byte left from `at` on; it takes what still fits."""

    def pwritev(fd: int, parts: list[memoryview], where: int) -> int:
        data = b"".join(parts)
        if where + len(data) > at and where >= at:
            raise OSError(28, os.strerror(28))
        return real(fd, [data[: at - where]], where)

    real = os.pwritev
    return pwritev


@pytest.mark.parametrize("room", range(3000, 22000, 1300))
def test_a_disk_that_fills_up_at_any_point_keeps_what_was_recorded(tmp_path, monkeypatch, room):
    done = []
    out = TraceWriter(tmp_path / "t.h5")
    with monkeypatch.context() as patch, pytest.raises(TraceError, match="No space left on device") as raised, out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS)
        patch.setattr(disk.os, "pwritev", failing(room))
        for layer in range(100):
            out.state(0, f"layers.{layer}.hidden", np.arange(6), np.full((6, 9), layer, np.float32), "float32")
            done.append(f"layers.{layer}.hidden")
    assert "\n" not in str(raised.value) and not out.path.exists()
    trace = TraceReader(out.partial)
    assert not trace.complete and [name for _, name in trace.states()] == done
    assert trace.verify() == ["the trace is partial: its writer did not finish"]
