"""Scores of arms: a forced pass says what greedy decoding would produce, and a window forgotten is seen."""

import json

import pytest
import torch

from replayscope.inspector import task_files
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.generate import generate
from replayscope.inspector.plan import Plan
from replayscope.inspector.scoring import Way, answers, scored
from replayscope.inspector.semantics import Shape, request
from replayscope.model import tasks, tokenizer
from tests import v41

WAYS = (Way("hit"), Way("encoder"), Way("exact"), Way("decoder"), Way("broken:start+1"))


@pytest.fixture(scope="module")
def model():
    return v41.model(torch.float64)


@pytest.fixture(scope="module")
def ids():
    return v41.ids()


def test_an_answer_is_exact_if_greedy_decoding_produces_it(model, ids):
    count, cut = 4, 40
    shape = Shape(model.config, len(ids), count)
    plan = Plan(tuple(request(shape, w.arm, cut, w.replay) for w in (Way("full"), Way("encoder"))))
    made = generate(model, plan, {"prompt": ids}, count, executor=Executor(model, keep_state=True))
    greedy = {"full": made.ids[0], "encoder": made.ids[1]}
    for said, tokens in greedy.items():
        forced = torch.cat((ids[:-count], tokens))
        found = answers(model, forced, count, cut, (Way("encoder"),))
        for way, answer in found.items():
            assert answer.exact == torch.equal(greedy[way.arm], tokens), (said, way)
        # Planted: another last token is no longer what greedy decoding would say.
        forced[-1] = (forced[-1] + 1) % model.config.vocab_size
        assert not answers(model, forced, count, cut, ())[Way("full")].exact


def test_divergence_of_the_answer_is_zero_where_the_arms_are_equal(model, ids):
    found = answers(model, ids, 3, 41, WAYS)
    assert found[Way("full")].kl == 0.0
    # Equal on paper: what is left is rounding in fp64.
    for arm in ("hit", "exact"):
        assert found[Way(arm)].kl_max < 1e-14
        assert found[Way(arm)].log_p == pytest.approx(found[Way("full")].log_p, abs=1e-10)
    for arm in ("encoder", "decoder", "broken:start+1"):
        assert found[Way(arm)].kl > 1e-9
        assert found[Way(arm)].kl <= found[Way(arm)].kl_max
    assert found[Way("encoder")].kl != found[Way("broken:start+1")].kl


def test_the_log_probability_is_that_of_the_dense_pass(model, ids):
    from replayscope.model import reference

    *_, last = reference.dense_pass(model, ids[None])
    log_p = last.tensors["logits"][0].log_softmax(-1)
    want = sum(float(log_p[i - 1, ids[i]]) for i in range(len(ids) - 3, len(ids)))
    assert answers(model, ids, 3, 20, ())[Way("full")].log_p == pytest.approx(want, abs=1e-9)


def test_samples_are_cut_where_their_text_is_cut(model):
    made = [tasks.make("mode", seed, 120, "touch", "none", "Some words. ", level=1) for seed in range(2)]
    for sample, length, found in scored(model, made, tokenizer.encode, (Way("encoder"),)):
        assert length == 120 + len(sample.answer)
        assert set(found) == {Way("full"), Way("encoder")}


def samples_of(path):
    return [sample for task in task_files.load(path).tasks.values() for sample in task.values()]


def line(**changes):
    return json.dumps({"prompt": "a = 1. a? ", "answer": "1", "cut": 5} | changes)


def test_a_task_file_gives_its_samples(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(line() + "\n\n" + line(task="mine", cut=10) + "\n")
    one, two = samples_of(path)
    assert (one.task, one.prompt, one.answer, one.cut, one.seed) == ("own", "a = 1. a? ", "1", 5, 1)
    assert (two.task, two.cut, two.seed) == ("mine", 10, 3)
    assert tasks.score(one, "1, of course").exact


@pytest.mark.parametrize(("text", "says"), [
    ("", "is empty"),
    ("{", ":1: no JSON"),
    ("[1]", ":1: one object per line"),
    (line(cut=11), "outside the prompt's 10 characters"),
    (line(cut=-1), "outside"),
    (line(cut=True), "cut must be given as a number"),
    (line(answer=""), "an empty answer"),
    (line(prompt=""), "an empty prompt"),
    (line(prompt=3), "prompt must be given as text"),
    (line(place="x"), "unknown field 'place'"),
    (line() + "\n" + '{"prompt": "x"}', ":2: answer must be given"),
    ('{"cut": DIGITS}', ":1: no JSON that can be used"),
    ("DEEP", ":1: no JSON that can be used"),
    (line(cut=10**30), "cut 10000000000000000000 is outside"),
    (line(HUGE=1), "unknown field 'xxx.* .5,000,000 characters.'; there are prompt"),
])  # fmt: skip
def test_a_faulty_task_file_is_refused_by_line_and_field(tmp_path, text, says):
    path = tmp_path / "own.jsonl"
    path.write_text(text.replace("HUGE", "x" * 5_000_000).replace("DIGITS", "9" * 5000).replace("DEEP", "[" * 100_000))
    with pytest.raises(UsageError, match=says) as error:
        samples_of(path)
    assert len(str(error.value)) < 500


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(line(), encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf" and samples_of(path)[0].prompt == "a = 1. a? "


def test_a_missing_or_binary_task_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        samples_of(tmp_path / "none.jsonl")
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        samples_of(tmp_path / "b")
