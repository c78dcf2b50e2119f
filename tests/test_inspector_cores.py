"""Blocks on several cores: order, errors, thread counts, and the executor's bits with and without them."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from replayscope.inspector import step
from replayscope.inspector.cores import each
from replayscope.inspector.executor import Executor
from replayscope.inspector.pool import Pool
from replayscope.inspector.semantics import request
from tests import v41

CPU = torch.device("cpu")


@pytest.fixture
def threads() -> Iterator[int]:
    """Two torch threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_results_come_in_order_whichever_is_done_first(threads):
    seen = []

    def slow_first(i: int) -> int:
        time.sleep(0.05 if i == 0 else 0)
        seen.append(i)
        return i * i

    assert each(slow_first, range(4), CPU) == [0, 1, 4, 9]
    assert seen[0] != 0, "nothing ran beside the first"


def test_torch_threads_are_shared_and_given_back(threads):
    counts = each(lambda i: (torch.get_num_threads(), torch.is_grad_enabled()), range(3), CPU)
    assert counts == [(1, False)] * 3 and torch.get_num_threads() == threads
    assert each(lambda i: torch.get_num_threads(), [0], CPU) == [2]
    assert each(lambda i: torch.get_num_threads(), [0], CPU, alone=True) == [1]
    with pytest.raises(ZeroDivisionError):
        each(lambda i: 1 // i, range(3), CPU)
    assert torch.get_num_threads() == threads


def test_one_thread_needs_no_other(threads):
    torch.set_num_threads(1)
    assert each(lambda i: threading.current_thread(), range(3), CPU) == [threading.current_thread()] * 3


ARMS = [("full", None), ("encoder", 16), ("encoder", 41), ("hit", 40), ("encoder", 23)]


def states(
    count: int, pool: Pool | None = None, tokens: dict | None = None, frozen_experts: bool = False
) -> list[dict[str, torch.Tensor]]:
    torch.set_num_threads(count)
    executor = Executor(v41.model(torch.float32), pool, block=8, reproducible=True, frozen_experts=frozen_experts)
    return v41.rows(executor, [request(v41.shape(), arm, cut) for arm, cut in ARMS], tokens=tokens)


def test_reproducible_bits_do_not_depend_on_the_cores(threads):
    one, two = states(1), states(2)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)


def test_frozen_choices_wait_for_those_of_full(threads, monkeypatch):
    """The twin: with all blocks at once, the last first, rows copy what another prompt has left in the pool."""
    pool, other = Pool(), {"prompt": v41.ids().flip(0)}
    states(2, pool, other)
    right = states(2, pool, frozen_experts=True)
    assert torch.equal(right[1]["layers.4.router"], right[0]["layers.4.router"][10:])
    states(2, pool, other)
    monkeypatch.setattr(step.Step, "_in_order", lambda self, run: [run[::-1]])
    wrong = states(2, pool, frozen_experts=True)
    assert not torch.equal(wrong[1]["layers.4.router"], wrong[0]["layers.4.router"][10:])
