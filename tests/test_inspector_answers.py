"""The demo's table of answers: what is looked up outlives every replay, what is carried only those that reach back."""

import pytest
import torch

from replayscope.inspector import answers_text as answers
from replayscope.inspector.executor import Executor
from replayscope.model import presets


@pytest.fixture(scope="module")
def told():
    model, _ = presets.load_any("mini", torch.float32)
    return answers.answers_text(Executor(model))


def test_what_is_looked_up_is_kept_and_what_is_carried_is_lost_until_the_replay_reaches_it(told):
    _, data = told
    passkey, relay = data["right"]["passkey"], data["right"]["relay"]
    assert set(passkey.values()) == {answers.PROMPTS}
    # The number lies more than two windows of 32 before the cut, and less than five.
    assert min(relay["full"], relay["hit"], relay["encoder R=160"]) >= answers.PROMPTS - 1
    # A tenth is guessed; 5 of 12 or more have a chance of 0.4 %.
    assert max(relay["encoder R=32"], relay["encoder R=64"], relay["both R=32"]) < 5


def test_the_table_says_what_the_data_say(told):
    text, data = told
    head, _, *rows = text.splitlines()
    assert len(rows) == len(data["right"]) == 2
    for row, (task, right) in zip(rows, data["right"].items(), strict=True):
        assert row.startswith(f"{task}: ")
        assert row.split()[-len(right) :] == [str(n) for n in right.values()]
        assert len(row) == len(head)
