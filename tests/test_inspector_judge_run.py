"""The matrix on a tiny model: every run is what its name says, planted faults are found, results can be taken up."""

import json
from dataclasses import replace

import pytest
import torch

from replayscope.inspector import cli, judge_matrix, judge_run
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.judge_costs import cost_lines
from replayscope.inspector.judge_results import Results, Store, header_of, read
from replayscope.inspector.judge_tokens import Text
from replayscope.inspector.judge_verdict import judge
from replayscope.traces.errors import TraceLockedError
from tests import judging, v41

W, SAMPLES = 6, 3
CONTRACT = judging.TINY.format(samples=SAMPLES, evidence="budget = 0.7\nreference = 0.0", matrix="concurrency = [3]")


@pytest.fixture(scope="module")
def text() -> Text:
    """Bytes folded into the vocabulary of the fixtures."""
    size = v41.config().vocab_size
    return Text(
        lambda t: [b % size for b in t.encode()], lambda ids: "".join(chr(32 + i % 90) for i in ids), "Some words. "
    )


def lines(text, contract, cells="*", plants=None, model=None):
    executor = Executor(model or v41.model(), keep_state=True)
    return [
        line
        for group in judge_matrix.groups(contract, cells)
        for some in judge_run.group_lines(contract, group, text, set(), plants or {}, executor)
        for line in some
    ]


def judged(contract, made):
    results = Results(header_of(contract, "tiny", "*", "tiny.toml") | {"plants": {}}, made, [], True)
    return judge(results, contract)


@pytest.fixture(scope="module")
def ran(text):
    contract = judging.contract(CONTRACT)
    return contract, lines(text, contract)


def test_every_run_is_what_its_name_says(ran):
    _, made = ran
    assert [line["seed"] for line in made] == [1000, 1001, 1002]
    for line in made:
        runs = {run["run"]: run for run in line["runs"]}
        assert list(runs)[:2] == ["full", "hit/paper/task"] and len(runs) == 9
        cut = runs["hit/paper/task"]["cut"]
        assert [runs[f"encoder/paper/task{o}"]["cut"] - cut for o in ("-1", "", "+1")] == [-1, 0, 1]
        for name, run in runs.items():
            replayed = W if name.startswith(("encoder", "both")) else 0
            cached = 0 if name.startswith(("full", "decoder")) else run["cut"]
            assert [run["replayed"], run["cached"]] == [replayed, cached] == run["planned"], name
            assert run["cached"] + run["fresh"] == line["tokens"] and run["changed"] == 0
        # In fp64 nothing flips: the control is full up to the rounding of a sum of terms of order 1.
        assert max(runs["hit/paper/task"]["kl"]) < 1e-14 and not any(runs["hit/paper/task"]["differs"])
        window = runs["encoder/paper/task"]["states"]["window_kv.window"]
        assert window[0] <= 1e-12 and min(window[2:]) > 1e-6, "layer 0 is exact, deeper layers are not"
        assert runs["hit/paper/task"]["states"]["window_kv.window"][0] is None, "a hit replays no window"


def test_what_shares_a_pass_changes_nothing(ran, text):
    _, made = ran
    alone = lines(text, judging.contract(CONTRACT, **{"[3]": "[1]"}))
    for one, other in zip(made, alone, strict=True):
        for a, b in zip(one["runs"], other["runs"], strict=True):
            assert a["run"] == b["run"] and a["text"] == b["text"] and a["exact"] == b["exact"]
            # Four digits are stored; below 1e-12 nats there is only rounding.
            assert a.get("kl", [0]) == pytest.approx(b.get("kl", [0]), rel=2e-3, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("overwrite", "cached entries changed"), ("start+1", "replayed 5 tokens where 6"), ("start-1", "replayed 7")],
)
def test_a_broken_arm_in_one_cell_is_found_and_named(ran, text, kind, says):
    contract, _ = ran
    cell = "chain.straddle/n70/suffix-none/out-short/x3/encoder/paper/task"
    found = judged(contract, lines(text, contract, plants={cell: f"broken:{kind}"}))
    assert [(c.name, says in c.why[0]) for c in found.judged if c.faults] == [(cell, True)]
    assert found.worst(1)[0].name == cell and found.arms["encoder"] == "fail" and found.arms["both"] != "fail"


def test_no_fault_is_seen_where_none_was_planted(ran):
    contract, made = ran
    assert not any(cell.faults for cell in judged(contract, made).cells)


def test_turns_ask_again_over_what_the_turns_before_left(text):
    contract = judging.contract(CONTRACT, **{"[3]": '[3]\noutputs = ["turns", "long"]\nneighbours = 0'})
    made = lines(text, contract)
    turns, long = (m for m in (made[:SAMPLES], made[SAMPLES:]))
    for line in turns:
        runs = {run["run"]: run for run in line["runs"]}
        assert all(len(run["turns"]) == 3 for run in runs.values())
        # full and the control go on without a replay and stay equal; errors of the encoder's replays are there.
        assert max(runs["hit/paper/task"]["kl"]) < 1e-14 < max(runs["encoder/paper/task"]["kl"])
    assert all(len(run["kl"]) == 40 for line in long for run in line["runs"][1:])
    for line in made:
        assert all(len(run["sampled"]) == len(run["differs"]) == len(run["kl"]) for run in line["runs"][1:])
        assert not any(line["runs"][1]["sampled"]), "equal logits sample equal tokens"
    assert any(any(run["sampled"]) for line in long for run in line["runs"][2:]), "others need not"


def test_costs_take_every_arm_by_itself(text):
    contract = judging.contract(CONTRACT)
    (group,) = judge_matrix.groups(contract)
    made = list(cost_lines(contract, group, text, set(), Executor(v41.model(), keep_state=True)))
    assert [line["seed"] for line in made] == [1000, 1001]
    for line in made:
        assert set(line["arms"]) == {"full", "hit", "encoder", "decoder", "both"}
        assert all(arm["ttft"] > 0 and arm["per_token"] > 0 for arm in line["arms"].values())
        assert line["arms"]["encoder"]["replayed"] == W and line["arms"]["hit"]["window_bytes"] > 0
        assert line["arms"]["encoder"]["global_bytes"] > 0 == line["arms"]["full"]["global_bytes"]


def test_a_run_is_taken_up_where_it_stopped(ran, tmp_path):
    contract, made = ran
    path, header = tmp_path / "r.jsonl", header_of(contract, "tiny", "*", "tiny.toml")
    with Store(path, header) as store:
        store.add(made[0])
        store.add(made[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])  # the last line is cut off, as a kill leaves it
    assert not read(path).complete and len(read(path).prompts) == 1
    with Store(path, header | {"made": "later"}) as store:
        assert store.done == {(made[0]["group"], 1000)}
        store.add(made[1])
        store.add(made[2])
        store.seal()
    found = read(path)
    assert found.complete and json.dumps(found.prompts) == json.dumps(made)
    with Store(path, header) as store:
        assert store.complete and len(store.done) == 3
    with pytest.raises(UsageError, match="results of another model"):
        Store(path, header | {"model": "other"})
    path.write_bytes(path.read_bytes().replace(b'"exact":false', b'"exact":true ', 1))
    with pytest.raises(UsageError, match="was changed after it was sealed"):
        read(path)


@pytest.mark.parametrize("force", [False, True])
def test_two_runs_into_one_file_are_refused_and_harm_nothing(ran, tmp_path, force):
    contract, made = ran
    path, header = tmp_path / "r.jsonl", header_of(contract, "tiny", "*", "tiny.toml")
    with Store(path, header) as store:
        store.add(made[0])
        before = path.read_bytes()
        with pytest.raises(TraceLockedError, match="in use by another process"):
            Store(path, header, force)
        assert path.read_bytes() == before
    with Store(path, header, force) as store:
        assert len(store.done) == (0 if force else 1)


def test_a_prompt_that_is_there_twice_is_no_new_evidence(ran, tmp_path):
    contract, made = ran
    path, header = tmp_path / "r.jsonl", header_of(contract, "tiny", "*", "tiny.toml")
    with Store(path, header) as store:
        for line in (made[0], made[1], made[0]):
            store.add(line)
        store.seal()
    with pytest.raises(UsageError, match=r"holds prompt \d+ of .* twice"):
        read(path)


def test_results_of_other_types_are_refused_in_a_line(ran, tmp_path, capsys):
    contract, made = ran
    path, header = tmp_path / "r.jsonl", header_of(contract, "tiny", "*", "tiny.toml")
    for planted in ("x", 10**400):
        strange = json.loads(json.dumps(made[0]))
        for run in strange["runs"][1:]:
            run["kl"] = [planted]
        with Store(path, header, force=True) as store:
            store.add(strange)
            store.seal()
        assert cli.main(["judge", "verdict", str(path)]) == 2
        assert "holds results whose parts do not fit" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b"[1]\n", b"\xff\n", b'{"kind":"replayscope judge results"}\n'])
def test_what_holds_no_results_is_said(tmp_path, data):
    path = tmp_path / "r.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"holds no results|results of schema None"):
        read(path)


def test_the_numbers_are_those_of_a_run_without_shortcuts(text):
    """Greedy texts and forced KL of one prompt against separate plans that share nothing but the weights."""
    from replayscope.inspector.generate import generate
    from replayscope.inspector.plan import Plan
    from replayscope.inspector.semantics import Shape, request

    contract = judging.contract(CONTRACT)
    (group,) = judge_matrix.groups(contract)
    one = judge_matrix.prompt(group, 1000, text)
    steps, N = len(one.answer) + 1, len(one.ids)
    ids = torch.tensor([*one.ids, *[0] * steps])
    shape = Shape(v41.config(), N + steps, forced=steps)
    plan = Plan((request(shape, "full"), request(shape, "encoder", one.cut)))
    made = generate(v41.model(), plan, {"prompt": ids}, steps)
    (line,) = [line for line in lines(text, contract) if line["seed"] == 1000]
    runs = {run["run"]: run for run in line["runs"]}
    assert runs["encoder/paper/task"]["text"] == text.decode(made.ids[1].tolist())
    ids[N:] = made.ids[0]
    both = v41.rows(Executor(v41.model()), [replace(r, chunk=None) for r in plan.requests], tokens={"prompt": ids})
    p, q = (r["logits"][-steps - 1 : -1].log_softmax(-1) for r in both)
    expected = (p.exp() * (p - q)).sum(-1).tolist()
    assert runs["encoder/paper/task"]["kl"] == pytest.approx(expected, rel=1e-3)


def test_the_command_runs_resumes_and_judges_on_mini(tmp_path, capsys):
    """The whole way on the embedded model, whatever it has learned: two prompts, one cell with its control."""
    from replayscope.inspector.cli import main

    contract, out = tmp_path / "c.toml", str(tmp_path / "r.jsonl")
    contract.write_text(CONTRACT.replace("samples = 3", "samples = 2") + "neighbours = 0\n")
    words = [str(contract), "--cells", "*/encoder/*"]
    assert main(["judge", "plan", *words]) == 0
    assert "1 cell, 2 prompts" in capsys.readouterr().out
    assert main(["judge", "run", *words, "-o", out, "--plant", "*=broken:overwrite"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("verdict: refuse") and "cached entries changed in 2 of 2 prompts" in told
    assert "planted on purpose" in told and "cells of the contract did not run" in told
    before = (tmp_path / "r.jsonl").read_bytes()
    assert main(["judge", "run", *words, "-o", out, "--plant", "*=broken:overwrite", "-q"]) == 1
    assert (tmp_path / "r.jsonl").read_bytes() == before, "nothing is left to run"
    capsys.readouterr()
    assert main(["judge", "run", *words, "-o", out]) == 2 and "other plants" in capsys.readouterr().err
    assert main(["judge", "run", *words, "-o", out, "--plant", "x=broken:overwrite", "--force"]) == 2
    capsys.readouterr()
    none, long = tmp_path / "none.jsonl", tmp_path / "long.toml"
    start = tmp_path / "start.toml"
    start.write_text(contract.read_text() + 'cuts = ["start"]\n')
    long.write_text(contract.read_text().replace("[70]", "[5000]"))
    for source, plant, says in (
        (contract, "*=broken:floor@99", "has the layers 0 to"),
        (start, "*=broken:overwrite", "--plant cannot break chain.straddle"),
        (
            long,
            "*=broken:overwrite",
            "lengths: 5,000 comes to 5,002 tokens with",
        ),
    ):
        assert main(["judge", "run", str(source), "-o", str(none), "--plant", plant]) == 2
        assert says in capsys.readouterr().err and not none.exists(), "all is checked before anything is written"
    assert main(["judge", "verdict", out, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "refuse"
