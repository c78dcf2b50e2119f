"""The benchmark harness: no time without a passed check, ratios within a round, one JSON object a line."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
import torch

from replayscope.inspector.cores import one_thread
from replayscope.inspector.segments import Segments
from replayscope.model import presets


@pytest.fixture(scope="module")
def harness(root):
    spec = importlib.util.spec_from_file_location("harness", root / "benchmarks" / "harness.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["harness"]


@pytest.fixture(scope="module")
def bench(root):
    """The modules of benchmarks/ by name, as `python benchmarks/run.py` finds them."""
    sys.path.insert(0, str(root / "benchmarks"))
    yield importlib.import_module
    sys.path.remove(str(root / "benchmarks"))
    for name in ("growth", "shares", "sweep", "table"):
        sys.modules.pop(name, None)


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


def test_a_part_that_repeats_is_scaled(harness, monkeypatch):
    monkeypatch.setattr(harness, "_seconds", lambda call, device: call())
    contest = harness.Contest({"whole": lambda: 8.0, "a quarter": lambda: 1.0}, agree, scale={"a quarter": 4})
    case = harness.Case("scaled", "", "whole", lambda device: contest)
    _, part = harness.run_case(case, torch.device("cpu"), rounds=1)
    assert (part["median_s"], part["ratio"]) == (4.0, 2.0)


def test_the_sweep_is_timed_only_if_the_loop_finds_the_same(harness, bench, monkeypatch):
    sweep = bench("sweep")
    contest = sweep.mini_sweep(tokens=96, cuts=2, suffix=8)(torch.device("cpu"))
    contest.check()
    assert contest.work == 96 + 2 * (32 + 8) and contest.scale["ideal"] == contest.work / 96
    # The twin: a loop that forgets the replay's floor is told apart.
    right = sweep.Sweep.sensible
    monkeypatch.setattr(sweep.Sweep, "sensible", lambda self: right(self) * (1.2, 1.0))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        sweep.mini_sweep(tokens=96, cuts=2, suffix=8)(torch.device("cpu")).check()


def test_exponents_are_slopes_in_log_log(bench):
    growth = bench("growth")
    assert growth.slope([(x, 3 * x**1.5) for x in (1, 4, 16)]) == pytest.approx(1.5)
    assert growth.slope([(2, 1.0), (2, 5.0)]) is None
    assert growth.config(40, 16384).num_hidden_layers == 40 and growth.config(8, 64).index_source_layer_ids == (2, 4, 6)
    (record,) = growth.grow({"cuts": (2,)}, {"tokens": 80, "cuts": 2, "layers": 8}, 1)
    assert record["rows"] == 80 + (8 + 64) + (16 + 64) and record["peak_mb"] >= 0


def test_the_page_gets_its_table_and_nothing_else_changes(bench, tmp_path):
    table = bench("table")
    machine = {"device_name": "X", "cpus": 2, "threads": 2, "load": 9.0, "python": "3", "versions": {"torch": "2"},
               "commit": "c"}  # fmt: skip
    base = {"case": "k", "about": "a", "rounds": 1, "median_s": 2.0, "spread": 0.1, "against": "ideal"}
    lines = [machine, base | {"variant": "sweep", "ratio": 0.8, "ratio_range": [0.5, 1.0]},
             {"case": "growth", "axis": "cuts", "size": 4, "rows": 10, "median_s": 1.0, "peak_mb": 5.0},
             {"case": "bad", "about": "b", "failed": "they differ"}]  # fmt: skip
    made = table.tables(lines)
    assert "| sweep | 2 | 10 % | 1.25 (1.00 … 2.00) |" in made and "machine was busy (load 9.0)" in made
    assert "| 4 | 10 | 1 | 5 |" in made and "Not timed: they differ" in made
    page = f"before {table.BEGIN} old {table.END} after"
    assert table.written(page, "new") == f"before {table.BEGIN}\n\nnew\n\n{table.END} after"
    with pytest.raises(ValueError, match="the page has no"):
        table.written("no marks", "new")
    table.written(table.PAGE.read_text(), made)


def test_shares_tell_where_a_planted_wait_is(bench, monkeypatch):
    """The shares of a sweep's parts add up; the twin has one part wait, and it is that one's share that grows."""
    shares, sweep = bench("shares"), bench("sweep")
    model, _ = presets.load_any("mini", torch.float32, torch.device("cpu"))
    case = sweep.Sweep(model, 96, 2, 16)
    before = {place: getattr(*place) for places in shares.PARTS.values() for place in places}
    reduce = Segments.reduce

    def slow(*given, **named):
        time.sleep(0.01)
        return reduce(*given, **named)

    with one_thread():
        found = shares.shares(case)
        with monkeypatch.context() as patch:
            patch.setattr(Segments, "reduce", slow)
            slowed = shares.shares(case)
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) > 0
    assert {place: getattr(*place) for place in before} == before
    part = "comparison: regions, distances, thresholds"
    assert found[part] < 0.5 < slowed[part]
