"""Verdicts over made-up results: what must be accepted, refused, left open, and named."""

import json
from dataclasses import replace

import pytest

from replayscope.inspector import judge_text, judge_verdict
from replayscope.inspector.errors import UsageError
from replayscope.inspector.judge_matrix import groups
from replayscope.inspector.judge_verdict import judge
from tests import judging

AT = "passkey.straddle/n320/suffix-short/out-short/x8"
BOTH = f"{AT}/both/paper/task"


def verdict(outcome=judging.good, text=judging.CONTRACT, header=None, **changed):
    asked = judging.contract(text, **changed)
    return judge(judging.results(asked, outcome, header), asked)


def in_cell(cell, told):
    """good, and in one cell what ``told`` (the number of the prompt) says besides."""
    return lambda group, run, i: judging.good(group, run, i) | (told(i) if f"{group}/{run}" == cell else {})


def test_what_drops_nothing_is_accepted_with_intervals_and_costs():
    found = verdict()
    assert found.verdict == "accept" and found.ok and found.samples == (60, 60)
    assert set(found.arms.values()) == {"pass"} and not found.reasons
    assert all(cell.drop.low <= cell.drop.drop <= cell.drop.high < 0.05 for cell in found.judged)
    assert all(cell.kl.low <= cell.kl.value <= cell.kl.high for cell in found.judged)
    assert found.prices["both"]["ttft"] == pytest.approx(0.505, abs=0.01)
    text = judge_text.text(found)
    assert text.startswith("verdict: accept\n14 cells judged with 60 prompts each") and "roll back" not in text


def test_a_narrow_regression_at_one_cut_is_refused_though_the_mean_is_unchanged():
    """Ten prompts get worse in one cell, and one better in each of ten others: over all cells nothing dropped."""
    cells = [group.cell(run) for group in groups(judging.contract()) for run in group.runs if run.arm != "hit"]
    better = {cell: i for i, cell in enumerate(c for c in cells if c != BOTH)}

    def outcome(group, run, i):
        told = judging.good(group, run, i)
        cell = f"{group}/{run}"
        if run == "full":
            return told | {"exact": i < 50}
        if cell == BOTH:
            return told | {"exact": 10 <= i < 50}
        return told | {"exact": i < 50 or (better.get(cell, 99) < 10 and i == 50)}

    found = verdict(outcome)
    assert sum(c.drop.worse for c in found.judged) == sum(c.drop.better for c in found.judged) == 10
    assert found.verdict == "accept decoder replay only" and not found.ok
    assert found.arms == {"encoder": "pass", "decoder": "pass", "both": "fail"}
    (cell,) = [c for c in found.judged if c.state == "fail"]
    assert cell.name == BOTH and found.worst(1) == [cell] and cell.adjusted < 0.05
    assert "success drops by 16.7%" in cell.why[0]
    assert judge_text.roll_back(found) == ["both replays off", "decoder replay alone", "encoder replay"]
    # The twin: spread over the cells, the same ten prompts are no drop that any cell can show.
    spread = verdict(lambda g, r, i: judging.good(g, r, i) | {"exact": r == "full" or i != better.get(f"{g}/{r}", 99)})
    assert not [c for c in spread.judged if c.state == "fail"] and spread.verdict == "not enough evidence"


def test_a_stable_change_of_the_distribution_at_one_cut_is_named_by_its_neighbours():
    """No prompt fails and the cell's KL is within its limit; only the cuts beside it show the jump."""
    found = verdict(in_cell(BOTH, lambda i: {"kl": [0.08] * 4}))
    failed = [c for c in found.judged if c.state == "fail"]
    assert [c.name for c in failed] == [BOTH] and "mean jump" in failed[0].why[0]
    assert verdict(in_cell(BOTH, lambda i: {"kl": [0.05] * 4})).verdict == "accept"


def test_a_defect_in_one_cell_is_found_and_named():
    for told, says in (
        ({"changed": 3}, "cached entries changed in 60 of 60 prompts"),
        ({"replayed": 31}, "replayed 31 tokens where 32 belong to the arm"),
        ({"states": {"window_kv.window": [0.02, 0.2]}}, "max window_kv ≤ 1e-05"),
    ):
        found = verdict(in_cell(BOTH, lambda i, told=told: told))
        assert [c.name for c in found.worst()] == [BOTH] and says in found.worst()[0].why[0]
        assert f"--cells {BOTH}" in judge_text.text(found)


def test_too_few_prompts_are_not_enough_evidence_and_what_is_needed_is_said():
    found = verdict(**{"samples = 60": "samples = 20"})
    assert found.verdict == "not enough evidence" and set(found.arms.values()) == {"open"}
    assert "about 59 prompts are needed" in found.worst()[0].why[0]


def test_a_cell_in_which_full_fails_is_blind_and_an_arm_that_is_blind_is_not_accepted():
    found = verdict(lambda g, r, i: judging.good(g, r, i) | {"exact": False})
    assert found.verdict == "not enough evidence" and all(c.blind for c in found.judged)
    half = verdict(lambda g, r, i: judging.good(g, r, i) | {"exact": "straddle" in g})
    assert half.verdict == "accept" and {c.blind for c in half.judged} == {True, False}


def test_a_critical_task_may_not_fail_once():
    one = in_cell(BOTH, lambda i: {"exact": i != 3})
    budget = {"samples = 60": "samples = 200\nbudget = 0.1"}
    assert verdict(one, **budget).verdict == "accept"
    service = judging.CONTRACT.replace("[evidence]", '[service]\ncritical = ["passkey.straddle"]\n[evidence]')
    found = verdict(one, service, **budget)
    assert "critical task: 1 new failure, seed 1003" in found.worst()[0].why[0]
    elsewhere = in_cell(BOTH.replace("straddle", "before"), lambda i: {"exact": i != 3})
    assert verdict(elsewhere, service, **budget).verdict == "accept"


def test_a_control_that_differs_lets_nothing_be_concluded():
    found = verdict(lambda g, r, i: judging.good(g, r, i) | ({"kl": [1.0]} if r.startswith("hit") else {}))
    assert found.verdict == "not enough evidence" and "the control" in found.reasons[0]


def test_decoder_replay_alone_is_not_offered_where_the_engine_has_none():
    broken = in_cell(BOTH, lambda i: {"changed": 1})
    assert verdict(broken).verdict == "accept decoder replay only"
    block = judging.CONTRACT + 'semantics = ["vllm-0.33"]\n'
    wrong = in_cell(BOTH.replace("paper", "vllm-0.33"), lambda i: {"changed": 1})
    found = verdict(wrong, block)
    assert found.verdict == "refuse" and "no decoder replay without encoder replay" in found.reasons[-1]
    slow = in_cell("", lambda i: {})
    found = verdict(slow, **{"at_most = 1.0": "at_most = 0.1"})
    assert found.verdict == "refuse" and any("q50 ttft ≤ 0.1" in reason for reason in found.reasons)


def test_needs_of_the_service_are_held_against_what_the_engine_serves():
    text = judging.CONTRACT + 'semantics = ["sglang-day0"]\n'
    refused = verdict(text=text.replace("[evidence]", '[service]\nneeds = ["multimodal"]\n[evidence]'))
    assert refused.verdict == "refuse" and "sglang-day0 does not serve multimodal" in refused.reasons[0]
    unknown = verdict(text=judging.CONTRACT.replace("[evidence]", '[service]\nneeds = ["LoRA"]\n[evidence]'))
    assert unknown.verdict == "not enough evidence" and "no public source" in unknown.reasons[0]


def test_another_contract_is_refused_unless_it_is_said():
    asked = judging.contract()
    made = judging.results(asked)
    other = judging.contract(**{"at_most = 0.1": "at_most = 0.001"})
    with pytest.raises(UsageError, match="the runs began under contract made up"):
        judge(made, other)
    found = judge(made, other, unfrozen=True)
    assert found.verdict == "refuse" and any("it may know their outcome" in note for note in found.notes)
    # Comments and layout are not what a contract says.
    same = judging.contract("# note\n" + judging.CONTRACT.replace("at_most = 0.1\n", "at_most  =  0.1  # nats\n"))
    assert judge(made, same).ok


def test_what_did_not_run_is_not_accepted():
    asked = judging.contract()
    made = judging.results(asked)
    assert judge(replace(made, complete=False), asked).verdict == "not enough evidence"
    larger = judging.contract(judging.CONTRACT + 'suffixes = ["short", "none"]\n')
    found = judge(made, larger, unfrozen=True)
    assert found.verdict == "not enough evidence" and "cells of the contract did not run" in found.reasons[0]
    assert judge(replace(made, prompts=[], costs=[]), asked).verdict == "not enough evidence"


def test_plants_and_unfrozen_runs_are_said():
    asked = judging.contract()
    header = {"plants": {"*": "broken:overwrite"}, "contract": judging._header(asked)["contract"] | {"frozen": None}}
    notes = judge(judging.results(asked, header=header), asked).notes
    assert any("planted on purpose" in note for note in notes) and any("not frozen" in note for note in notes)


def test_the_json_is_strict_and_holds_every_cell():
    found = verdict(in_cell(BOTH, lambda i: {"kl": [None] * 4}))
    data = judge_text.data(found)
    assert len(data["cells"]) == len(found.cells) and {row["arm"] for row in data["dimensions"]["arm"]} == set(
        found.arms
    )
    (bad,) = [cell for cell in data["cells"] if cell["cell"] == BOTH]
    assert bad["state"] == "fail" and bad["command"].startswith("replayscope judge run made.toml -m mini --cells")
    (other,) = [cell for cell in data["cells"] if cell["cell"] == BOTH + "+1"]
    assert other["spread"]["kl"]["max"] == pytest.approx(0.016) and other["by_step"]["agreement"] == [1.0] * 4
    assert json.loads(json.dumps(data, allow_nan=True))["verdict"] == found.verdict
    assert judge_verdict.ROLL_BACK == ("off", "decoder", "encoder")


def test_a_report_shows_the_judgement_of_results(tmp_path, capsys):
    """In ui/report.py: results are told from traces by their name, and what they hold is escaped."""
    from replayscope.inspector.cli import main

    asked = judging.contract()
    made = judging.results(asked, in_cell(BOTH, lambda i: {"changed": 1}), {"model": "<b>mini</b>"})
    path = judging.write(tmp_path / "r.jsonl", made)
    out = tmp_path / "r.html"
    assert main(["report", str(path), "-o", str(out)]) == 0
    html = out.read_text()
    assert "Accept decoder replay only: 1 of 14 cells fails" in html and BOTH in html and "ttft p50" in html
    assert "By arm" in html and "Roll back in this order" in html and html.count('data-figure="') == 2
    assert "<b>mini</b>" not in html and "&lt;b&gt;mini" in html
    path.write_text(path.read_text().replace('"changed":1', '"changed":0'))
    assert main(["report", str(path), "-o", str(out), "--force"]) == 2
    assert "changed after it was sealed" in capsys.readouterr().err
