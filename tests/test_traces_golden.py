"""Files of every schema that ever was keep opening; one of a newer schema is refused by its number."""

import shutil

import h5py
import numpy as np
import pytest

from replayscope.inspector import cli
from replayscope.traces import SCHEMA_VERSION, TraceReader, TraceVersionError
from tests import small


@pytest.fixture(params=range(1, SCHEMA_VERSION + 1))
def golden(root, request):
    """The file that was written when the schema was new."""
    return root / "tests" / "golden" / f"schema-{request.param}.h5"


def test_a_golden_file_still_says_what_it_said(golden):
    trace = TraceReader(golden)
    small.check(trace)
    assert trace.verify() == []


def test_a_golden_file_of_other_numbers_is_told_apart(golden, tmp_path):
    path = shutil.copy(golden, tmp_path / "t.h5")
    with h5py.File(path, "r+") as file:
        file["divergence/full/hidden/diff2"][1, 1, 0] += 1e-9
    with pytest.raises(AssertionError):
        small.check(TraceReader(path))


def test_what_is_written_today_says_the_same(tmp_path):
    small.small_trace(tmp_path / "t.h5")
    small.check(TraceReader(tmp_path / "t.h5"))


def test_unknown_parts_of_the_same_schema_are_skipped(golden, tmp_path):
    path = shutil.copy(golden, tmp_path / "t.h5")
    with h5py.File(path, "r+") as file:
        file.create_dataset("added/later", data=np.arange(3))
        file.attrs["added"] = 3
    small.check(TraceReader(path))


def test_a_newer_schema_is_refused_by_its_number(golden, tmp_path, capsys):
    path = shutil.copy(golden, tmp_path / "t.h5")
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = SCHEMA_VERSION + 1
    with pytest.raises(TraceVersionError, match=rf"schema version {SCHEMA_VERSION + 1}, .* reads up to"):
        TraceReader(path)
    assert cli.main(["show", str(path)]) == 2
    assert f"schema version {SCHEMA_VERSION + 1}" in capsys.readouterr().err
