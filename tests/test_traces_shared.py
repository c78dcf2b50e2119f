"""One file and many hands: reading beside a writer, in threads, from a folder that cannot be written (cases C3, C8)."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replayscope.inspector import cli
from replayscope.traces import TraceError, TraceLockedError, TraceReader, TraceWriter, disk
from tests import small


def hold(script: str, *words: str) -> subprocess.Popen:
    """A process that says 'ready' and then waits."""
    command = [sys.executable, "-c", textwrap.dedent(script), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_four_readers_see_whole_traces_or_one_clear_line_while_a_process_writes(root, tmp_path):
    path = tmp_path / "t.h5"
    small.small_trace(path)
    script = """
        import sys
        sys.path.insert(0, sys.argv[2])
        from replayscope.traces import TraceLockedError
        from tests import small
        print("ready", flush=True)
        done = 0
        while done < 12:
            try:
                small.small_trace(sys.argv[1])
                done += 1
            except TraceLockedError:
                pass
    """
    process = hold(script, str(path), str(root))
    whole = 0
    with ThreadPoolExecutor(4) as pool:
        while process.poll() is None:
            whole += sum(pool.map(reads_whole, [path] * 4))
    process.communicate()
    assert whole >= 4
    small.check(TraceReader(path))


def reads_whole(path: Path) -> bool:
    """Whether no writer held the file during one of the calls; what is read is right in any case."""
    try:
        small.check(TraceReader(path))
    except TraceLockedError as error:
        assert "\n" not in str(error)
        return False
    return True


def test_a_partial_that_is_being_written_is_one_line(tmp_path, capsys):
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS)
        with pytest.raises(TraceLockedError, match="in use by another process"):
            TraceReader(out.partial)
        assert cli.main(["show", str(out.partial), "--verify"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "in use" in said


def test_another_process_that_holds_the_trace_is_one_line_and_does_not_stop_readers(tmp_path, capsys):
    path = tmp_path / "t.h5"
    small.small_trace(path)
    process = hold("import h5py, sys; f = h5py.File(sys.argv[1]); print('ready', flush=True); input()", str(path))
    try:
        small.check(TraceReader(path))
        words = ["record", "-p", "ids:1,2,3", "--arms", "full", "-o", str(path), "--force", "-q"]
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "in use by another process" in said
    finally:
        process.communicate("\n")
    small.check(TraceReader(path))
    assert cli.main(words) == 0


def test_a_read_only_folder_can_be_read_and_not_written(tmp_path, monkeypatch):
    path = tmp_path / "t.h5"
    small.small_trace(path)
    real = os.open

    def refuse(name, flags, *mode, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, os.strerror(30), str(name))
        return real(name, flags, *mode, **options)

    # Permissions do not hold a superuser back.
    monkeypatch.setattr(disk.os, "open", refuse)
    small.check(TraceReader(path))
    assert TraceReader(path).verify() == []
    with pytest.raises(TraceError, match="Read-only file system") as raised, TraceWriter(tmp_path / "n.h5"):
        pass
    assert "\n" not in str(raised.value)


def test_a_journal_in_a_read_only_folder_is_one_line_and_is_carried_out_where_it_may_be(tmp_path, monkeypatch):
    path = tmp_path / "t.h5"
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_apply", lambda fd, pages: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(disk.Disk, "rollback", lambda self: None)
        with pytest.raises(KeyboardInterrupt), TraceWriter(path) as out:
            out.header(config={"a": 1}, provenance={}, tokens=small.TOKENS)
    real = os.open

    def refuse(name, flags, *mode, **options):
        if flags & os.O_RDWR:
            raise OSError(30, os.strerror(30), str(name))
        return real(name, flags, *mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "open", refuse)
        with pytest.raises(TraceError, match=r"has to be repaired, but: Read-only"):
            TraceReader(out.partial)
    assert TraceReader(out.partial).config == {"a": 1}


def test_no_handle_stays_open_between_calls_of_a_writer_but_its_own(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with TraceWriter(tmp_path / "t.h5") as out:
        out.header(config={}, provenance={}, tokens=small.TOKENS)
        out.runs(small.RUNS)
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


def test_of_two_writers_that_begin_at_once_the_second_is_told_and_the_first_is_whole(tmp_path):
    """Both looked before either began."""
    path = tmp_path / "t.h5"
    first, second = TraceWriter(path), TraceWriter(path)
    with first:
        with pytest.raises(TraceLockedError, match=r"t\.h5\.partial is in use by another process"), second:
            pass
        first.header(config={}, provenance={}, tokens=small.TOKENS)
        first.runs([])
    assert TraceReader(path).complete and [p.name for p in tmp_path.iterdir()] == ["t.h5"]


@pytest.mark.parametrize("name", ["t.h5", None], ids=["renamed", "removed"])
def test_a_partial_that_goes_before_it_is_locked_is_left_alone(tmp_path, monkeypatch, name):
    """Another writer gave it its final name in between: that file is not the one to write to."""
    partial, lock = tmp_path / "t.h5.partial", disk.lock
    partial.write_bytes(b"whole")

    def late(fd: int, shown: Path) -> None:
        monkeypatch.setattr(disk, "lock", lock)
        partial.rename(tmp_path / name) if name else partial.unlink()
        lock(fd, shown)

    monkeypatch.setattr(disk, "lock", late)
    one = disk.Disk(partial)
    assert partial.stat().st_ino == os.fstat(one._fd).st_ino
    one.close()
    assert name is None or (tmp_path / name).read_bytes() == b"whole"
