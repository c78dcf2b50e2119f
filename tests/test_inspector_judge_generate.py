"""Sessions: what is continued from a kept state is what a fresh run would compute."""

from dataclasses import replace

import pytest
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.generate import Session, generate
from replayscope.inspector.judge_matrix import Run, next_turn
from replayscope.inspector.plan import Plan
from replayscope.inspector.pool import Pool
from replayscope.inspector.semantics import Shape, request
from tests import v41

# fp64 runs that are equal on paper differ by rounding in products of other shapes: measured 1e-14 on these weights.
EQUAL = 1e-12
N, STEPS = 30, 4
ANSWER, SAYS = (5, 6, 7), (8, 9, 10, 11)
POOL = Pool()


def session(ids, arms=("full", "hit", "encoder", "both"), end=N, cut=17, pool=None):
    total = len(ids)
    shape = Shape(v41.model().config, total, forced=total - end)
    requests = tuple(request(shape, a, cut if a not in ("full", "decoder") else None, suffix=None) for a in arms)
    requests = tuple(replace(r, chunk=None) for r in requests)
    return Session(v41.model(), Plan(requests), {"prompt": ids}, Executor(v41.model(), pool or POOL, keep_state=True))


def ids_of(total: int) -> torch.Tensor:
    return torch.arange(3, 3 + total) * 7 % 90


@pytest.mark.parametrize("end", [N, N - 1], ids=["even", "odd"])
def test_every_continuation_starts_over_from_the_prompts_end(end):
    one = session(ids_of(end + STEPS), end=end)
    greedy = one.decode(STEPS)
    one.decode(STEPS, temperature=1.0, seed=3)
    assert torch.equal(one.decode(STEPS).ids, greedy.ids)
    led, forced = one.follow([0, 0, 0, 0], STEPS)
    assert torch.equal(led.ids, greedy.ids), "what follows its leader is what is decoded alone"
    assert v41.relative(led.logits[1], greedy.logits[1]) <= EQUAL
    fresh = session(ids_of(end + STEPS), end=end, pool=Pool()).force(greedy.ids[[0, 0, 0, 0]])
    assert v41.relative(forced, fresh) <= EQUAL
    # With its own tokens forced on it a request has the logits that it chose them from.
    assert v41.relative(one.force(greedy.ids)[2], greedy.logits[2]) <= EQUAL
    assert one.executor.prefix_check.changed == [0] * 4


def test_decoding_runs_every_row_once():
    one, ran = session(ids_of(N + STEPS)), []
    one.executor.taps.append(lambda frame: ran.append([s.count for s in frame.spans.get("logits", ())]))
    one.decode(STEPS)
    # The first token comes of the prefill; from there on a row is a step (N is even, so nothing is rewound).
    assert [counts for counts in ran if counts] == [[1] * 4] * (STEPS - 1)
    assert one.executor.done == [N + STEPS - 1] * 4


def test_follow_decodes_those_that_leave_their_leader():
    """The twin of the shortcut: a leader with other tokens, so that nobody may share them to the end."""
    ids = ids_of(N + STEPS)
    other = ids.clone()
    other[:N] = other[:N].flip(0)
    shape = Shape(v41.model().config, N + STEPS, forced=STEPS)
    full = replace(request(shape, "full"), chunk=None)
    plan = Plan((full, replace(full, arm="other", tokens="other")))
    tokens = {"prompt": ids, "other": other}
    made, forced = Session(v41.model(), plan, tokens, Executor(v41.model(), POOL, keep_state=True)).follow(
        [0, 0], STEPS
    )
    alone = generate(v41.model(), plan, tokens, STEPS)
    assert torch.equal(made.ids, alone.ids) and not torch.equal(alone.ids[0], alone.ids[1])
    assert v41.relative(made.logits[1], alone.logits[1]) <= EQUAL
    assert v41.relative(forced[1], alone.logits[1]) > 1e-3


@pytest.mark.parametrize("end", [N, N - 1], ids=["even", "odd"])
def test_a_turn_over_an_exact_cache_is_the_turn_of_a_fresh_run(end):
    """full goes on as a cold prefill; an arm whose first turn was exact (cut 0) replays as one with full's cache."""
    closed = end + len(ANSWER)
    total = closed + len(SAYS) + STEPS
    ids = ids_of(total)
    ids[end : closed + len(SAYS)] = torch.tensor([*ANSWER, *SAYS])
    config = v41.model().config
    arms = ("full", "hit", "encoder", "decoder", "both")
    one = session(ids, arms=arms, end=end, cut=0)
    one.decode(STEPS)
    runs = [None, *(Run(a, "paper", "start") for a in arms[1:])]
    runs[3] = Run("decoder", "paper", None)
    made = [
        next_turn(config, r, run, closed, closed + len(SAYS))
        for r, run in zip(one.executor.plan.requests, runs, strict=True)
    ]
    one.turn([ANSWER] * 5, [SAYS] * 5, Plan(tuple(r for r, _ in made)), [at for _, at in made])
    fresh = session(ids, arms=arms, end=closed + len(SAYS), cut=closed, pool=Pool())
    for i, arm in enumerate(arms):
        if arm == "both":
            continue  # its first turn ran the decoder half on the tail alone: its state is its own
        assert v41.relative(one.last[i : i + 1], fresh.last[i : i + 1]) <= EQUAL, arm
    assert v41.relative(one.last[2:3], one.last[:1]) > 1e-6, "the replay of the second turn changes something"
    assert v41.relative(one.decode(STEPS).logits[2], fresh.decode(STEPS).logits[2]) <= EQUAL


def test_what_a_turn_left_in_the_cache_stays_there():
    """Errors compound: after a replay in the first turn the second differs from one over a clean cache."""
    closed = N + len(ANSWER)
    total = closed + len(SAYS) + STEPS
    ids = ids_of(total)
    ids[N : closed + len(SAYS)] = torch.tensor([*ANSWER, *SAYS])
    config = v41.model().config
    last = {}
    for cut in (0, 17):
        one = session(ids, arms=("full", "encoder"), cut=cut)
        made = [
            next_turn(config, r, run, closed, closed + len(SAYS))
            for r, run in zip(one.executor.plan.requests, (None, Run("encoder", "paper", "task")), strict=True)
        ]
        one.turn([ANSWER] * 2, [SAYS] * 2, Plan(tuple(r for r, _ in made)), [at for _, at in made])
        last[cut] = one.last[1:].clone()
    assert v41.relative(last[17], last[0]) > 1e-9


def test_a_session_refuses_what_leaves_no_room():
    one = session(ids_of(N + STEPS))
    with pytest.raises(ValueError, match="no room"):
        one.force(torch.zeros(4, STEPS + 1, dtype=torch.long))
    with pytest.raises(ValueError, match="keeps its state"):
        Session(v41.model(), one.executor.plan, {"prompt": ids_of(N + STEPS)}, Executor(v41.model()))
