"""Thousands of damaged files: what is read is what was written, or the answer is one clean line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from tests import small

SEEDS = 3000


def fuzz(root: Path, trace: Path, seeds: int, first: int = 0) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fuzz", str(trace), str(first), str(seeds)]
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "t.h5"
    small.small_trace(path)
    return path


def test_flipped_bytes_and_cut_tails_give_a_clean_error_or_what_was_written(root, trace):
    halves = [fuzz(root, trace, SEEDS // 2, first) for first in (0, SEEDS // 2)]
    told = [json.loads(half.communicate(timeout=200)[0]) for half in halves]
    for one in told:
        assert one["bad"] == {}
        assert one["same"] > 10 and one["refused"] > 100, "the damage reaches both what is used and what is not"
        assert one["kib"] < 300 * 1024
    assert sum(one["same"] + one["refused"] for one in told) == SEEDS


def test_the_same_damage_to_a_file_without_checksums_reads_wrong_numbers(root, trace, tmp_path):
    with h5py.File(trace) as whole, h5py.File(tmp_path / "bare.h5", "w", libver=("v110", "v110")) as bare:
        bare.attrs.update(whole.attrs)

        def copy(name: str, item: h5py.Group | h5py.Dataset) -> None:
            made = (
                bare.create_dataset(name, data=item[()]) if isinstance(item, h5py.Dataset) else bare.create_group(name)
            )
            made.attrs.update(item.attrs)

        whole.visititems(copy)
    told = json.loads(fuzz(root, tmp_path / "bare.h5", 100).communicate(timeout=120)[0])
    assert sum(answer.startswith("wrong") for answer in told["bad"].values()) > 3
