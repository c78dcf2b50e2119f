"""The roofline script: refuses without CUDA, times nothing that is wrong, takes shares of the larger floor."""

import subprocess
import sys

import pytest
import torch


@pytest.fixture
def roofline(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import roofline

    yield roofline
    for name in ("roofline", "harness"):
        sys.modules.pop(name, None)


def test_without_cuda_there_is_one_line(root):
    for words in ([sys.executable, "benchmarks/roofline.py"], ["bash", "benchmarks/device_check.sh"]):
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=root, env={"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        )
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.endswith("no CUDA device here; run it on a machine that has one\n")


def kernel(roofline, **calls):
    ones = torch.ones(4)
    named = {"torch": lambda: ones, "torch.compile": lambda: ones} | calls
    return lambda device: roofline.Kernel(named, moved=100, done=600, unit="bf16", rtol=0.0, atol=1e-6)


def test_a_wrong_variant_is_named_and_not_timed(roofline, monkeypatch):
    def broken():
        raise RuntimeError("out of resource: shared memory")

    calls = {"triton": lambda: torch.ones(4) + 1e-3, "other": broken, "copy": lambda: None}
    monkeypatch.setitem(roofline.KERNELS, "one", kernel(roofline, **calls))
    limits = {"copy": 50.0, "bf16": 100.0, "fp64": 1.0}
    records = list(roofline.measure("one", torch.device("cpu"), 2, limits, lambda call: call() is None or 1.0))
    by_variant = {record["variant"]: record for record in records}
    assert "not close" in by_variant["triton"]["failed"] and "median_s" not in by_variant["triton"]
    assert by_variant["other"]["failed"] == "out of resource: shared memory"
    assert by_variant["copy"]["median_s"] and "failed" not in by_variant["copy"]


def test_the_floor_is_the_larger_of_bytes_and_operations(roofline, monkeypatch):
    times = {"torch": iter([8.0, 16.0]), "torch.compile": iter([12.0, 24.0]), "triton": iter([4.0, 12.0])}
    calls = {name: (lambda name=name: (torch.ones(4), name)) for name in times}
    monkeypatch.setitem(roofline.KERNELS, "one", kernel(roofline, **calls))
    monkeypatch.setattr(roofline, "_differ", lambda call, want, k: None)
    limits = {"copy": 50.0, "bf16": 300.0, "fp64": 1.0}
    records = roofline.measure("one", torch.device("cpu"), 2, limits, lambda call: next(times[call()[1]]))
    triton = {record["variant"]: record for record in records}["triton"]
    # 100 bytes at 50 a second take 2 s, 600 operations at 300 a second likewise; the median is 8 s.
    assert (triton["floor_s"], triton["share_of_floor"], triton["median_s"], triton["spread"]) == (2.0, 0.25, 8.0, 1.0)
    assert triton["bound_by"] == "memory"
    assert triton["faster_than_torch"] == pytest.approx((8 / 4 + 16 / 12) / 2)
    assert triton["faster_than_torch.compile"] == pytest.approx((12 / 4 + 24 / 12) / 2)
