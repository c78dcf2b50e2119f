"""The benchmark harness: no time without a passed check, ratios within a round, one JSON object a line."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
import torch


@pytest.fixture(scope="module")
def harness(root):
    spec = importlib.util.spec_from_file_location("harness", root / "benchmarks" / "harness.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["harness"]


def agree() -> None:
    pass


def test_ratios_are_taken_within_a_round(harness, monkeypatch):
    slow, fast = iter([9.0, 3.0, 30.0, 6.0]), iter([9.0, 1.0, 10.0, 3.0])  # the first is the warm-up; round 2 was slow
    monkeypatch.setattr(harness, "_seconds", lambda call, device: call())
    variants = {"slow": lambda: next(slow), "fast": lambda: next(fast)}
    case = harness.Case("drift", "", "slow", lambda device: harness.Contest(variants, agree, work=10, unit="rows"))
    base, own = harness.run_case(case, torch.device("cpu"), rounds=3)
    assert (base["ratio"], own["ratio"], own["ratio_range"]) == (1, 3, [2, 3])
    assert (base["median_s"], own["median_s"], own["rate"], own["unit"]) == (6, 3, 10 / 3, "rows/s")


def test_a_call_is_timed_by_the_clock(harness):
    assert 0.02 <= harness._seconds(lambda: time.sleep(0.02), torch.device("cpu")) < 2


def test_nothing_is_timed_if_the_variants_disagree(harness):
    def disagree() -> None:
        raise AssertionError("they differ by 3")

    def never() -> None:
        raise RuntimeError("timed without a passed check")

    case = harness.Case("wrong", "", "a", lambda device: harness.Contest({"a": never}, disagree))
    (record,) = harness.run_case(case, torch.device("cpu"), rounds=1)
    assert record["failed"] == "they differ by 3" and "median_s" not in record


def test_a_case_without_its_baseline_is_an_error(harness):
    case = harness.Case("odd", "", "b", lambda device: harness.Contest({"a": agree}, agree))
    with pytest.raises(ValueError, match="no variant 'b'"):
        list(harness.run_case(case, torch.device("cpu"), rounds=1))


def test_the_runner_prints_json_lines(root):
    words = [
        sys.executable,
        str(root / "benchmarks" / "run.py"),
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--only",
        "divergence",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *records = map(json.loads, done.stdout.splitlines())
    assert first["versions"]["torch"] == torch.__version__
    assert {record["variant"] for record in records} >= {"plain", "row_sums"}
