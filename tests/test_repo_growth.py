"""The benchmark of growth: peak memory is that of the measured process, whatever its parent held."""

import os
import subprocess
import sys

from tests.conftest import ROOT

HELD = 900 * 1024 * 1024  # bytes; a process that has only loaded torch holds a third of it
ASK = "import growth; print(growth.peak_memory())"


def test_a_child_does_not_start_at_its_parents_peak():
    parent = f"import subprocess, sys; x = b'x' * {HELD}; subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"
    assert int(output(parent)) < HELD / 1.5


def test_what_a_process_held_and_gave_back_counts():
    assert int(output(f"x = b'x' * {HELD}; del x; {ASK}")) > HELD


def output(code):
    here = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=here, check=True).stdout
