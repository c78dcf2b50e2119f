"""The matrix on tiny Hugging Face models in fp64: right arms equal the cold prefill, planted faults are found."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from replayscope.inspector import judge_matrix, judge_run, judge_tokens
from replayscope.inspector.generate import Session
from replayscope.inspector.hf_cache import KeyValues
from replayscope.inspector.hf_executor import HFExecutor
from replayscope.inspector.judge_costs import cost_lines
from replayscope.inspector.judge_matrix import Run, next_turn
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import Shape, exact_replay, request
from replayscope.model.hf_wide import widened
from replayscope.model.tasks import PLACES, TASKS, make, score
from tests import hf, judging

W = hf.W
# Terms of order 1 in fp64; two right ways differ by rounding that passes six layers.
EQUAL = 1e-12
FILLER = "Some words stand here. "
CONTRACT = judging.TINY.format(
    samples=2, evidence="budget = 0.9\nreference = 0.0", matrix='concurrency = [2]\narms = ["encoder"]'
)
_DIMENSIONS = """arms = ["encoder", "exact"]
outputs = ["short", "long", "turns"]
neighbours = 0
cuts = ["start", "window", "middle", "task", "end"]
"""
WHOLE = CONTRACT.replace('arms = ["encoder"]\n', _DIMENSIONS)
# Window layers and global ones, with and without experts, sinks and shared KV.
FAMILIES = ("gemma-3", "gpt-oss", "gemma-4")


@cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Pieces of several characters, learned from tasks; 97 of them, as the tiny models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    texts = [sample.prompt + sample.answer for sample in samples()]
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=hf.VOCAB, special_tokens=["<pad>", "<bos>", "<eos>"])
    )
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")


def samples():
    return [make(task, seed, 150, place, "none", FILLER) for task in TASKS for place in PLACES for seed in range(3)]


@cache
def text() -> judge_tokens.TokenText:
    return judge_tokens.of_tokenizer(tokenizer(), FILLER)


def lines(family, contract, cells="*", plants=None):
    executor = HFExecutor(hf.model(family), keep_state=True)
    return [
        line
        for group in judge_matrix.groups(contract, cells)
        for some in judge_run.group_lines(contract, group, text(), set(), plants or {}, executor)
        for line in some
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def ran(request):
    contract = judging.contract(WHOLE)
    return request.param, contract, lines(request.param, contract)


def test_every_cell_of_the_matrix_is_what_its_name_says(ran):
    family, _, made = ran
    config = hf.model(family).config
    assert len(made) == 2 * 3
    for line in made:
        runs = {run["run"]: run for run in line["runs"]}
        assert len(runs) == 1 + 3 * 5, "full, and at five cuts the control, encoder and exact"
        for name, run in runs.items():
            cut, replay = run["cut"] or 0, {"encoder": W, "exact": exact_replay(config)}.get(name.split("/")[0], 0)
            assert [run["replayed"], run["cached"]] == [min(replay, cut), cut] == run["planned"], name
            assert run["cached"] + run["fresh"] == line["tokens"] or "turns" in line["group"]
            assert run["changed"] == 0
            if name == "full":
                continue
            lost = name.startswith("encoder") and (cut > W or "turns" in line["group"])
            assert (max(run["kl"]) > 1e-9) == lost == (max(run["kl"]) > EQUAL), name
            if not lost:
                assert (
                    not any(run["differs"]) and not any(run.get("sampled", ())) and run["text"] == runs["full"]["text"]
                )


def test_states_are_told_by_layer_and_windows_only_where_they_are(ran):
    family, _, made = ran
    config = hf.model(family).config
    for run in made[0]["runs"][1:]:
        window, last = run["states"]["window_kv.window"], run["states"]["hidden.last"]
        assert len(window) == len(last) == config.num_hidden_layers and None not in last
        replays = run["run"].startswith(("encoder", "exact")) and run["cut"]
        own = [config.window_source(l) == l for l in config.layers]
        assert [value is not None for value in window] == [bool(replays) and one for one in own]
        if replays:
            assert window[0] <= EQUAL, "layer 0 reads tokens alone"
        if run["run"] == "encoder/paper/end":
            assert max(v for v in window if v is not None) > 1e-6 < last[-1]


def test_texts_are_what_the_model_generates_by_itself(ran):
    """The library's own generation loop, cache and masks, and the model's tokenizer."""
    family, contract, made = ran
    model = hf.model(family)
    for group, line in zip(judge_matrix.groups(contract)[:2], (made[0], made[2]), strict=True):
        assert line["group"] == group.label
        one = judge_matrix.prompt(group, line["seed"], text())
        steps, ids = judge_matrix.steps(group, [one]), torch.tensor([one.ids])
        settings = {"do_sample": False, "max_new_tokens": steps, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad(), widened(model.dtype):
            own = model.module.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        whole, asked = (text().decode(some[0].tolist()) for some in (own, ids))
        assert whole.startswith(asked) and line["runs"][0]["text"] == whole.removeprefix(asked).lstrip(" ") != ""


def test_the_numbers_are_those_of_a_run_without_shortcuts(ran):
    """Forced KL of a prompt against plans of their own, in one pass from start to end and without a kept state."""
    family, contract, made = ran
    model, group, line = hf.model(family), judge_matrix.groups(contract)[0], made[0]
    one = judge_matrix.prompt(group, line["seed"], text())
    steps, N = judge_matrix.steps(group, [one]), len(one.ids)
    ids = torch.tensor([*one.ids, *[0] * steps])
    with torch.no_grad(), widened(model.dtype):
        for at in range(N, N + steps):
            ids[at] = model.module(input_ids=ids[None, :at]).logits[0, -1].argmax()
    shape = Shape(model.config, N + steps, forced=steps)
    for run in line["runs"][1:]:
        arm = run["run"].split("/")[0]
        plan = Plan((request(shape, "full"), request(shape, arm, run["cut"])))
        *_, last = HFExecutor(model, block=17).run(plan, {"prompt": ids})
        ends = [s.at + s.count - 1 for s in last.spans["logits"]]
        p, q = (last.tensors["logits"][end - steps : end].log_softmax(-1) for end in ends)
        # Four digits are stored.
        assert run["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).clamp(min=0).tolist(), rel=1e-3, abs=EQUAL)


ANSWER, SAYS, STEPS = (5, 6, 7), (8, 9, 10, 11), 3


def last_of_a_turn(family: str, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [3, V] of full, hit and encoder behind a second turn: over what the first left, and in a fresh run."""
    model, closed = hf.model(family), end + len(ANSWER)
    ids = torch.cat((hf.IDS[:end], torch.tensor([*ANSWER, *SAYS, *[0] * STEPS])))
    arms = ("full", "hit", "encoder")

    def session(prompt_end: int, cut: int) -> Session:
        shape = Shape(model.config, len(ids), forced=len(ids) - prompt_end)
        plan = Plan(tuple(request(shape, arm, None if arm == "full" else cut) for arm in arms))
        return Session(model, plan, {"prompt": ids}, HFExecutor(model, keep_state=True))

    # From cut 0 the first turn's cache is that of a cold prefill.
    one = session(end, 0)
    one.decode(STEPS)
    runs = (None, Run("hit", "paper", "start"), Run("encoder", "paper", "start"))
    made = [
        next_turn(model.config, r, run, closed, closed + len(SAYS))
        for r, run in zip(one.executor.plan.requests, runs, strict=True)
    ]
    one.turn([ANSWER] * 3, [SAYS] * 3, Plan(tuple(r for r, _ in made)), [at for _, at in made])
    return one.last, session(closed + len(SAYS), closed).last


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("end", [30, 29], ids=["even", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_over_an_exact_cache_is_the_turn_of_a_fresh_run(family, end):
    kept, fresh = last_of_a_turn(family, end)
    assert max(off(a, b) for a, b in zip(kept, fresh, strict=True)) <= EQUAL
    assert off(kept[1], kept[0]) <= EQUAL and off(kept[2], kept[0]) > 1e-6


def test_a_cache_that_replayed_rows_write_over_is_seen_in_the_next_turn(monkeypatch):
    """The twin: replayed rows put their global entries over those that the turn before left."""
    write = KeyValues.write

    def every_row(self, rows, layer, k, v):
        right = self.plan
        from_cut = [replace(r, first_entry=(r.kept_entries(1),) * len(r.first_entry)) for r in right.requests]
        self.plan = Plan(tuple(from_cut))
        write(self, rows, layer, k, v)
        self.plan = right

    monkeypatch.setattr(KeyValues, "write", every_row)
    kept, fresh = last_of_a_turn("gemma-3", 30)
    assert off(kept[2], fresh[2]) > 1e-6 > EQUAL >= off(kept[1], fresh[1])


def test_costs_take_every_arm_by_itself():
    contract = judging.contract(CONTRACT)
    (group,) = judge_matrix.groups(contract)
    made = list(cost_lines(contract, group, text(), set(), HFExecutor(hf.model("gemma-3"), keep_state=True)))
    assert len(made) == 2
    for line in made:
        assert set(line["arms"]) == {"full", "hit", "encoder"}
        assert all(arm["ttft"] > 0 and arm["per_token"] > 0 for arm in line["arms"].values())
        encoder, hit = line["arms"]["encoder"], line["arms"]["hit"]
        # Two of six layers are global: a token's keys and values, 2 heads of 8 numbers each, in fp64.
        assert encoder["global_bytes"] == encoder["cached"] * 2 * (2 * 2 * 8) * 8 and encoder["window_bytes"] == 0
        assert hit["window_bytes"] == W * 4 * (2 * 2 * 8) * 8


def test_a_cut_lies_at_a_token_and_never_behind_its_character():
    moved = 0
    for sample in samples():
        group = judge_matrix.Group(f"{sample.task}.{sample.place}", 150, "none", "short", 1)
        one = judge_matrix.prompt(group, sample.seed, text())
        before = text().decode(list(one.ids[: one.cut]))
        assert one.sample.prompt.startswith(before) and len(before) <= one.sample.cut
        # No token is longer than this; a boundary further down would be a token too early.
        longest = max(len(token) for token in tokenizer().get_vocab())
        assert one.sample.cut - len(before) < longest + len(one.sample.prompt) - len(one.sample.prompt.rstrip(" "))
        moved += len(before) < one.sample.cut
    assert moved, "some cuts lie inside a token"


def test_an_answer_that_is_produced_is_right_and_another_is_not():
    for sample in samples():
        group = judge_matrix.Group(f"{sample.task}.{sample.place}", 150, "none", "short", 1)
        one = judge_matrix.prompt(group, sample.seed, text())
        assert 1 not in one.answer, "no <bos> in the middle"
        assert score(one.sample, text().said(one.ids, list(one.answer))).exact
        assert not score(one.sample, text().said(one.ids, list(one.answer[:-1]))).exact


@pytest.fixture
def talking(tmp_path) -> Path:
    """A tiny model with its tokenizer."""
    target = tmp_path / "talking"
    shutil.copytree(hf.folder("gemma-3"), target)
    tokenizer().save_pretrained(target)
    return target


def test_the_command_plans_runs_and_judges_a_folder(talking, tmp_path, capsys):
    contract, out = tmp_path / "c.toml", tmp_path / "r.jsonl"
    contract.write_text(CONTRACT.replace('["encoder"]', '["encoder", "decoder"]'))
    words = (contract, "-m", talking, "--dtype", "fp64")
    code, told, err = hf.run(capsys, "judge", "plan", *words)
    assert code == 0 and "3 cells, 2 prompts" in told and "decoder is no arm of this model" in told, err
    code, told, err = hf.run(capsys, "judge", "run", *words, "-o", out)
    assert code == 0 and told.startswith("verdict: accept"), told + err
    assert "note: decoder is no arm of this model, so its cells do not run: it has no decoder half" in told
    assert "note: a task's cut is a character" in told
    before = out.read_bytes()
    assert hf.run(capsys, "judge", "run", *words, "-o", out)[0] == 0 and out.read_bytes() == before
    data = json.loads(hf.run(capsys, "judge", "verdict", out, "--json")[1])
    assert data["arms"] == {"encoder": "pass"} and str(talking) in data["cells"][-1]["command"]
    # The twin: a fault in one cell, whose name is given.
    cell = "chain.straddle/n70/suffix-none/out-short/x2/encoder/paper/task"
    for kind, says in (("overwrite", "cached entries changed in 2 of 2"), ("start+1", f"replayed {W - 1} tokens")):
        planted = ("--plant", f"{cell}=broken:{kind}", "-o", tmp_path / f"{kind[:5]}.jsonl")
        code, told, _ = hf.run(capsys, "judge", "run", *words, *planted)
        assert code == 1 and told.startswith("verdict: refuse") and says in told and f"fail  {cell}" in told


def test_own_tasks_are_asked_of_a_folder_and_a_planted_fault_is_found(talking, tmp_path, capsys):
    """Texts that the tiny tokenizer was trained on, as a file; cuts move to its tokens."""
    made = [make("chain", seed, 90, "straddle", "none", FILLER) for seed in range(2)]
    lines = [json.dumps({"prompt": one.prompt, "answer": one.answer, "cut": one.cut}) for one in made]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    contract, cell = tmp_path / "c.toml", "own/own/suffix-own/out-short/x2/encoder/paper/task"
    built_in = 'tasks = ["chain.straddle"]\nlengths = [70]\nsuffixes = ["none"]\n'
    assert built_in in CONTRACT
    contract.write_text(CONTRACT.replace(built_in, 'task_file = "mine.jsonl"\n'))
    words = (contract, "-m", talking, "--dtype", "fp64")
    code, told, err = hf.run(capsys, "judge", "run", *words, "-o", tmp_path / "r.jsonl")
    assert code == 0 and told.startswith("verdict: accept") and "note: a task's cut is a character" in told, told + err
    planted = ("--plant", f"{cell}=broken:overwrite", "-o", tmp_path / "p.jsonl")
    code, told, _ = hf.run(capsys, "judge", "run", *words, *planted)
    assert code == 1 and "cached entries changed in 2 of 2" in told and f"fail  {cell}" in told


def test_prompts_within_a_window_show_nothing_and_are_not_accepted(talking, tmp_path, capsys):
    contract, out = tmp_path / "c.toml", tmp_path / "r.jsonl"
    contract.write_text(CONTRACT + 'cuts = ["start"]\n')
    code, told, _ = hf.run(capsys, "judge", "run", contract, "-m", talking, "--dtype", "fp64", "-o", out)
    assert code == 1 and told.startswith("verdict: not enough evidence")
    assert "encoder: no hit is longer than what is replayed, so nothing can differ; give longer prompts" in told


def test_what_cannot_be_asked_is_refused_in_one_line(talking, tmp_path, capsys):
    plain, short = hf.folder("gemma-3"), tmp_path / "c.toml"
    long, alone = tmp_path / "long.toml", tmp_path / "alone.toml"
    short.write_text(CONTRACT)
    long.write_text(CONTRACT.replace("[70]", "[900]"))
    alone.write_text(CONTRACT.replace('["encoder"]', '["both", "decoder"]'))
    blind = tmp_path / "blind"
    shutil.copytree(plain, blind)
    hf.tokenizer(blind)
    for words, says in (
        # Of this family transformers makes a tokenizer of special tokens where there is none.
        ((alone, "-m", plain), "comes without a tokenizer"),
        ((short, "-m", blind), "writes the answer '0' as '<unk>'"),
        ((long, "-m", talking), "lengths: 900 comes to"),
        ((alone, "-m", talking), "has none of both, decoder: it has no decoder half"),
        ((alone, "-m", tmp_path), "no folder with a tokenizer"),
    ):
        out = tmp_path / "none.jsonl"
        code, told, err = hf.run(capsys, "judge", "run", *words, "-o", out)
        assert code == 2 and told == "" and says in err and err.count("\n") == 1 and not out.exists(), err
    plant = ("--plant", "*/encoder/*=broken:floor@6", "-o", tmp_path / "none.jsonl")
    code, _, err = hf.run(capsys, "judge", "run", short, "-m", talking, *plant)
    assert code == 2 and "has the layers 0 to 5" in err
