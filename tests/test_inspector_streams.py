"""The program on standard streams that are closed, full or gone: one line and the right code, and no file is hurt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayscope.traces.reader import TraceReader
from tests.synthetic import synthetic_trace

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
ELSEWHERE = "cannot write to standard output: {}; send it elsewhere"
WORDS = (
    ["--version"],
    ["--help"],
    ["record", "--help"],
    ["list", "arms"],
    ["list", "arms", "--json"],
    ["show", "t.h5"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams")
    synthetic_trace(path / "t.h5", n_tokens=32, window=4, layers=3, cuts=(8, 20))
    return path


def run(folder, words, how, entry=("-m", "replayscope.inspector"), **env) -> subprocess.CompletedProcess[str]:
    """The program as a shell starts it. how: redirections."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | env
    command = ["sh", "-c", f'exec "$@" {how}', "sh", sys.executable, *entry, *words]
    return subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.parametrize("buffered", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("how", "why"), [(">&-", "it is closed"), pytest.param(">/dev/full", "No space left on device", marks=FULL)]
)
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_what_cannot_be_written_is_an_error(folder, words, how, why, buffered):
    done = run(folder, words, how, **buffered)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"replayscope: {ELSEWHERE.format(why)}\n")


@pytest.mark.parametrize("how", ["2>&-", pytest.param("2>/dev/full", marks=FULL)])
def test_nobody_to_tell_leaves_the_code_as_it_is(folder, how):
    for words, code in ((["show", "t.h5"], 0), (["show", "nope.h5"], 2), (["show", "nope.h5", "--debug"], 2), ([], 2)):
        for unbuffered in ({}, {"PYTHONUNBUFFERED": "1"}):
            done = run(folder, words, how, **unbuffered)
            assert (done.returncode, done.stderr, bool(done.stdout)) == (code, "", code == 0), words


def test_a_closed_standard_input_is_no_prompt(folder):
    done = run(folder, ["record", "-m", "mini", "-p", "-", "-o", "x.h5"], "<&-")
    said = "replayscope: standard input cannot be read: it is closed; give @FILE or the text itself\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said) and not (folder / "x.h5").exists()


def test_with_all_streams_closed_a_trace_is_whole(folder):
    """No file of ours gets the number of a closed stream."""
    words = ["record", "-m", "mini", "-p", "ab", "--arms", "full", "--hooks", "embed", "-o", "all.h5"]
    plain = run(folder, [*words[:-1], "plain.h5"], "")
    done = run(folder, words, "<&- >&- 2>&-")
    # The table of arms could not be printed.
    assert (plain.returncode, done.returncode, done.stdout, done.stderr) == (0, 2, "", "")
    trace = TraceReader(folder / "all.h5")
    assert trace.complete and trace.verify() == [] and trace.states() == TraceReader(folder / "plain.h5").states()


def test_the_numbers_of_closed_streams_are_taken(folder):
    script = (
        "import os, sys\nfrom replayscope.inspector.streams import open_closed\nopen_closed()\n"
        "number = os.open('number', os.O_CREAT | os.O_WRONLY)\nos.write(number, str(number).encode())"
    )
    assert run(folder, [], "<&- >&- 2>&-", entry=("-c", script)).returncode == 0
    assert int((folder / "number").read_text()) > 2


@pytest.mark.parametrize(("raised", "code"), [("KeyboardInterrupt", 130), (None, 0)], ids=["interrupted", "good"])
def test_ctrl_c_while_python_shuts_down_is_not_answered_with_a_traceback(folder, raised, code):
    """The handlers of libraries run there, and are not ours to guard. The twin: the same without the entry."""
    script = f"""
import atexit, os, signal, sys
from replayscope.inspector import cli, entry

def ours(argv=None):
    print("said", file=sys.stderr)
    return {code}

cli.main = ours
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("not stopped", file=sys.stderr)))
"""
    done = run(folder, [], "", entry=("-c", f"{script}\nsys.exit(entry.main())"))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "said\n"), raised
    assert "Traceback" in run(folder, [], "", entry=("-c", f"{script}\nsys.exit(cli.main())")).stderr


def test_ctrl_c_twice(folder):
    """The second before the program has seen to the first: one line all the same."""
    script = """
import atexit, os, signal, sys
from replayscope.inspector import cli, entry

def ours(argv=None):
    raise KeyboardInterrupt

cli.main = ours
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.exit(entry.main())
"""
    done = run(folder, [], "", entry=("-c", script))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "replayscope: interrupted\n")
