"""Triton forms compile for a GPU on a machine without one: the interpreter takes what no compiler would."""

import os
import subprocess
import sys

# Largest shared memory of one block on Hopper, in bytes.
SHARED = 232_448
KERNELS = {"_attend", "_state", "_first_sweep", "_second_sweep", "_scores", "_select", "_compress"}


def test_kernels_compile_for_hopper_and_use_its_tensor_cores(tmp_path, root):
    # Triton 3.9 warns unless it is told how to treat products and sums; its cache stays out of the home folder.
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    words = [sys.executable, str(root / "tests" / "compiled.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == KERNELS
    assert all(int(shared) <= SHARED for _, shared, _ in lines), lines
    assert all((tensor_cores == "True") == (name in ("_attend", "_scores")) for name, _, tensor_cores in lines)
    # Queries of 64 KB and three tiles of keys of 32 KB each: without what a launch knows of addresses and strides no
    # tile is copied ahead, and a kernel that wants too much would seem to fit.
    assert max(int(shared) for name, shared, _ in lines if name == "_attend") >= 160 * 1024
