"""A matrix that was stopped goes on to the same bytes, says honestly how far it is, and holds what is planted in it."""

import json
import logging

import pytest

from replayscope.inspector import judge, judge_matrix
from replayscope.inspector.executor import Executor
from replayscope.inspector.judge_pace import Pace
from replayscope.inspector.judge_results import Store
from replayscope.inspector.judge_run import group_lines
from replayscope.inspector.judge_tokens import Text
from tests import judging, v41

CONTRACT = judging.TINY.format(samples=3, evidence="", matrix='arms = ["encoder"]\nneighbours = 0\nconcurrency = [2]')
SIZE = v41.config().vocab_size
TEXT = Text(lambda t: [b % SIZE for b in t.encode()], lambda ids: "".join(chr(32 + i % 90) for i in ids), "Words. ")


def timeless(path) -> list[str]:
    """The lines of a file without what a clock says: when it was made, and how long each thing took."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        for key in ("made", "seconds", "sha256"):
            line.pop(key, None)
        for arm in line.get("arms", {}).values():
            del arm["ttft"], arm["per_token"]
    return [json.dumps(line) for line in lines]


def test_what_ctrl_c_leaves_goes_on_to_the_same_bytes(tmp_path, monkeypatch, caplog):
    contract, executor = judging.contract(CONTRACT), Executor(v41.model(), keep_state=True)
    groups = judge_matrix.groups(contract)
    monkeypatch.setattr(judge, "_load", lambda asked: judge._Asked(executor, TEXT, "0", groups, {}, []))

    def asked(name: str) -> judge.JudgeRun:
        return judge.JudgeRun(contract, "tiny.toml", model="tiny", out=tmp_path / name)

    judge.run(asked("whole.jsonl"))
    whole, path = timeless(tmp_path / "whole.jsonl"), tmp_path / "stopped.jsonl"
    assert [json.loads(line)["kind"] for line in whole[1:]] == ["prompt"] * 3 + ["cost"] * 2 + ["end"]

    def stop(frame):
        if frame.layer == 5:
            raise KeyboardInterrupt

    def add(store, line, before=Store.add):
        before(store, line)
        if line["kind"] == "prompt":
            raise KeyboardInterrupt

    # In the middle of a pass, then between the lines of its two prompts.
    executor.taps.append(stop)
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        judge.run(asked("stopped.jsonl"))
    assert "0 of 3 prompts are in" in caplog.text and "the same command goes on" in caplog.text
    assert timeless(path) == whole[:1]
    executor.taps.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "add", add)
        judge.run(asked("stopped.jsonl"))
    assert timeless(path) == whole[:2]
    judge.run(asked("stopped.jsonl"))
    assert timeless(path) == whole
    judge.run(asked("stopped.jsonl"))
    assert timeless(path) == whole, "nothing is left to run"


def test_progress_counts_what_prompts_cost_and_only_what_ran_now(caplog):
    """Of two groups one costs ten times the other; of the cheap one half was there."""
    now = [0.0]
    with caplog.at_level(logging.INFO):
        pace = Pace({"cheap": 10, "dear": 100}, {"cheap": 4, "dear": 4}, {("cheap", 0), ("cheap", 1)}, lambda: now[0])
        now[0] = 5.0
        pace.add("cheap", 2)  # 20 rows in 5 s, and nothing said: ten seconds have not gone by
        assert not caplog.records
        now[0] = 30.0
        pace.add("dear", 1)  # 120 of 440 - 20 rows in 30 s; 300 are left
    assert [r.getMessage() for r in caplog.records] == ["31/100, 5 of 8 prompts, about 75 s left: dear"]


def test_a_stale_window_is_another_prompts_and_is_planted_where_it_is_asked():
    contract, executor = judging.contract(CONTRACT), Executor(v41.model(), keep_state=True)
    (group,) = judge_matrix.groups(contract)

    def runs(plants):
        made = next(group_lines(contract, group, TEXT, set(), plants, executor))
        return [{run["run"]: run for run in line["runs"]} for line in made]

    for right, wrong in zip(runs({}), runs({"*/encoder/*": "broken:stale"}), strict=True):
        assert list(right) == list(wrong) == ["full", "hit/paper/task", "encoder/paper/task"]
        assert max(wrong["hit/paper/task"]["kl"]) < 1e-14, "the control is what it was"
        a, b = (runs["encoder/paper/task"] for runs in (right, wrong))
        assert [b["replayed"], b["cached"]] == b["planned"] and b["changed"] == 0, "it is seen by its outcome alone"
        # Layer 0 writes its window from tokens alone; behind it every row has read the other prompt's keys.
        (first, second), (_, changed) = (run["states"]["window_kv.window"][:2] for run in (b, a))
        assert first <= 1e-12 and second != pytest.approx(changed, rel=1e-2)
        assert a["kl"] != pytest.approx(b["kl"], rel=1e-3)
