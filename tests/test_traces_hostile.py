"""`show --verify` on files that a stranger made: one line each, exit code 1, and no byte of another file is read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from replayscope.inspector import cli
from replayscope.traces.schema import SCHEMA_VERSION
from tests import small

SECRET = b'{"secret": "root:x:0:0"}'


def replaced(name: str, make: Callable[[h5py.Group, str], object]) -> Callable[[Path], None]:
    """Replace one part of the file by what `make(group, name)` puts there."""

    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            at = file[os.path.dirname(name) or "/"]
            del at[os.path.basename(name)]
            make(at, os.path.basename(name))

    return change


def schema(value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file.attrs["schema_version"] = value

    return change


def foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(4)


def nested(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.create_group("texts/a/b/c/d/e/f")


def flipped(path: Path) -> None:
    with h5py.File(path) as file:
        where = file["states/0001/layers.001.hidden"].id.get_chunk_info(0).byte_offset
    raw = bytearray(path.read_bytes())
    raw[where + 5] ^= 1
    path.write_bytes(raw)


def in_a_heap(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = "replayscope-trace"


def virtual(at: h5py.Group, name: str) -> None:
    layout = h5py.VirtualLayout(shape=(4,), dtype=np.uint8)
    layout[:] = h5py.VirtualSource("secret.h5", "secret", shape=(4,))
    at.create_virtual_dataset(name, layout)


HOSTILE = {
    "external storage": replaced(
        "texts/greedy", lambda at, name: at.create_dataset(name, (24,), np.uint8, external=[("secret.txt", 0, 24)])
    ),
    "soft link": replaced("texts/greedy", lambda at, name: at.__setitem__(name, h5py.SoftLink("/config"))),
    "external link": replaced(
        "texts/greedy", lambda at, name: at.__setitem__(name, h5py.ExternalLink("secret.h5", "/secret"))
    ),
    "virtual dataset": replaced("texts/greedy", virtual),
    "shape bomb": replaced(
        "texts/greedy", lambda at, name: at.create_dataset(name, (1 << 40,), np.float64, chunks=(1 << 20,))
    ),
    "foreign HDF5": foreign,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:9000]),
    "zero bytes": lambda path: path.write_bytes(b""),
    "no HDF5": lambda path: path.write_bytes(b"PK\x03\x04" * 999),
    "no schema": schema("one"),
    "newer schema": schema(SCHEMA_VERSION + 1),
    "deep nesting": nested,
    "flipped bit": flipped,
    "text in a heap": in_a_heap,
}


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("secret.txt").write_bytes(SECRET)
    with h5py.File("secret.h5", "w") as file:
        file["secret"] = np.frombuffer(SECRET, np.uint8)
    small.small_trace("t.h5")
    return Path("t.h5")


@pytest.mark.parametrize("kind", HOSTILE)
def test_each_is_one_line_and_exit_1(kind, path, capsys):
    HOSTILE[kind](path)
    code = cli.main(["show", "t.h5", "--verify"])
    out, err = capsys.readouterr()
    assert (code, err, out.count("\n")) == (1, "", 1), out
    assert out.startswith("fault: ") and "root:x" not in out and len(out) < 500


def test_a_sound_file_is_told_whole_and_exit_0(path, capsys):
    assert cli.main(["show", "t.h5", "--verify"]) == 0
    assert "every checksum right" in capsys.readouterr().out


def test_what_is_missing_or_in_use_is_no_fault_of_a_file(path, capsys):
    assert cli.main(["show", "none.h5", "--verify"]) == 2
    shutil.copytree(".", "folder")
    assert cli.main(["show", "folder", "--verify"]) == 2
