"""Errors of the system as a user meets them: what went wrong, and what to do about it, in one line."""

import errno
import os

import pytest

from replayscope.inspector import cli
from replayscope.inspector.errors import system_error
from replayscope.inspector.estimate import Estimate
from replayscope.traces import errors
from tests.synthetic import synthetic_trace

LONG = "x" * 300


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run words in a folder with a trace a.h5 and a file f: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    synthetic_trace(tmp_path / "a.h5", n_tokens=40, layers=2, cuts=(9,))
    (tmp_path / "f").write_text("text")

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(words)
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("judge verdict nope.jsonl", "nope.jsonl: No such file or directory; check the path"),
        ("judge verdict .", ".: Is a directory; give a file, not a folder"),
        ("judge verdict f/r.jsonl", "f/r.jsonl: Not a directory; a part of the path is a file; check the path"),
        (f"judge verdict {LONG}", "File name too long; give a shorter one"),
        (f"judge run -o {LONG}.jsonl", "File name too long; give a shorter one"),
        (f"record -o {LONG}.h5", "File name too long; give a shorter one"),
        (f"plot a.h5 -o {LONG}.html", "File name too long; give a shorter one"),
        (f"plot a.h5 --figure all -o {LONG}", "File name too long; give a shorter one"),
        (f"report a.h5 -o {LONG}.html", "File name too long; give a shorter one"),
        (f"demo -o {LONG}", "File name too long; give a shorter one"),
        (f"show {LONG}", "File name too long; give a shorter one"),
    ],
)
def test_a_path_that_cannot_be_used_says_what_to_do(typed, says, run):
    code, out, err = run(*typed.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and err.endswith(f"{says}\n"), err


@pytest.mark.parametrize(
    "typed",
    ["record -o p.h5", "sweep -o to-null.h5", "plot a.h5 -o p.html", "plot a.h5 --figure reach -o p.csv",
     "report a.h5 -o p.html", "judge freeze -o p.toml", "judge run -o p.jsonl", "judge run -o to-null.jsonl"],
)  # fmt: skip
def test_a_pipe_or_a_device_is_never_replaced_nor_waited_for(typed, run):
    for ending in ("h5", "html", "csv", "toml", "jsonl"):
        os.mkfifo(f"p.{ending}")
        os.symlink(os.devnull, f"to-null.{ending}")
    code, out, err = run(*typed.split(), "--force")
    name = typed.split()[-1]
    assert (code, out) == (2, "")
    assert err == f"replayscope: {name} is no plain file but a pipe, a socket or a device; give another -o\n"
    assert os.path.exists(name) and not os.path.isfile(name)


@pytest.mark.parametrize("target", ["t.h5", "none/t.h5"], ids=["itself", "nowhere"])
def test_room_is_looked_for_where_a_link_lies_not_where_it_leads(target, tmp_path):
    """A trace replaces the link, as every other output does."""
    (tmp_path / "t.h5").symlink_to(target)
    Estimate(1, 1, 0, 0.0, 1).refuse_if_too_large(tmp_path / "t.h5", None)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize(
    "typed", ["plot a.h5 --figure all -o new", "plot a.h5 --figure reach -o new.html", "report a.h5 -o new.html"]
)
def test_a_folder_that_cannot_be_written_says_what_to_do(typed, number, run, monkeypatch):
    """Permissions do not hold a superuser back, and so the system refuses here whatever it is asked."""

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    for name in ("mkdir", "write_bytes"):
        monkeypatch.setattr(f"pathlib.Path.{name}", refuse)
    code, out, err = run(*typed.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and "new" in err, err
    assert err.endswith(f"{system_error(OSError(number, os.strerror(number)))}\n") and "; " in err


def test_every_number_has_a_next_step_and_words_of_others_stay():
    for number in (*errors._NEXT, errno.ECHILD):
        said, _, step = system_error(OSError(number, os.strerror(number))).partition("; ")
        assert said == os.strerror(number) and step
    assert system_error(OSError("no answer from the hub; try later")) == "no answer from the hub; try later"


def test_a_trace_that_compares_nothing_says_what_to_do(run):
    synthetic_trace("b.h5", n_tokens=40, layers=2, cuts=(9,))
    import h5py

    with h5py.File("b.h5", "r+") as file:
        del file["divergence"]
    code, _, err = run("report", "b.h5", "-o", "b.html")
    assert code == 2 and "set it against another trace with replayscope compare" in err
