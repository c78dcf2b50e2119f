"""Blocks on several cores: order, errors, thread counts, and the executor's bits with and without them."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from replayscope.inspector import cores, step
from replayscope.inspector.cores import each, fitting
from replayscope.inspector.executor import Executor
from replayscope.inspector.oracle import Oracles
from replayscope.inspector.pool import Pool
from replayscope.inspector.semantics import request
from replayscope.model import reference
from tests import v41

CPU = torch.device("cpu")


@pytest.fixture
def threads(monkeypatch) -> Iterator[int]:
    """Two torch threads, whatever the machine has and however few rows there are."""
    monkeypatch.setattr(cores, "FEW", 0)
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


def test_few_rows_take_one_thread_and_give_the_others_back(threads, monkeypatch):
    monkeypatch.setattr(cores, "FEW", 100 * 8**2)
    for rows, wanted in ((1, 1), (99, 1), (100, 2), (1000, 2)):
        with fitting(rows, 8):
            assert torch.get_num_threads() == wanted, rows
        assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError), fitting(1, 8):
        _ = 1 // 0
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("few", "wanted"), [(1 << 40, {1}), (0, {1, 2})])
def test_layers_and_oracles_of_few_rows_run_on_one_thread(threads, monkeypatch, few, wanted):
    """The twin: where no number of rows counts as few, ops see both counts."""
    seen = {"executor": set(), "oracle": set()}

    def watched(where: str, call):
        def counted(*given, **named):
            seen[where].add(torch.get_num_threads())
            return call(*given, **named)

        return counted

    monkeypatch.setattr(cores, "FEW", few)
    monkeypatch.setattr(step.Step, "_project", watched("executor", step.Step._project))
    monkeypatch.setattr(step, "packed_attention", watched("executor", step.packed_attention))
    monkeypatch.setattr(reference, "_run_layer", watched("oracle", reference._run_layer))
    model, ids = v41.model(torch.float32), v41.ids()
    states(2)
    oracles = Oracles(model, ids)
    oracles.add("full", None, None, len(ids), len(ids))
    for _ in range(1 + model.config.num_hidden_layers):
        oracles.step()
        assert torch.get_num_threads() == threads
    assert seen["executor"] == wanted and seen["oracle"] == {1 if few else 2}


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
