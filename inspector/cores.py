"""Blocks of rows side by side on the cores of a CPU, and few rows on one of them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
# Multiplications in a product of rows with a square matrix below which one torch thread is the fastest, whatever the
# width: two threads gain from 2^23 on with 1,024 columns, from 2^25 on with 256 (on two cores, waiting threads asleep).
FEW = 1 << 23


def each(f: Callable[[T], R], items: Sequence[T], device: torch.device, alone: bool = False) -> list[R]:
    """f of every item, in order, on as many threads as torch has; without gradients. f must not depend on the order.

    Torch cuts every single op among its threads, which on blocks of some hundred rows costs as much as it gains. Here a
    thread takes whole blocks, and torch's threads are shared among those that run. alone: one torch thread each however
    few there are, so that an item's bits do not depend on how many run. On a GPU one item follows the other.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or (len(items) < 2 and not alone):
        return [f(item) for item in items]
    own = 1 if alone else max(threads // len(items), 1)

    def one(item: T) -> R:
        torch.set_num_threads(own)
        with torch.no_grad():
            return f(item)

    try:
        return list(_pool(threads).map(one, items))
    finally:
        # The number is partly the thread's and partly the process's (OpenMP's and MKL's).
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fitting(rows: int, width: int) -> AbstractContextManager[None]:
    """One torch thread meanwhile if the products of rows [rows, width] with square matrices are small: to wake another
    thread takes longer than it saves, and beside a busy process much longer."""
    return one_thread() if rows * width**2 < FEW else nullcontext()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "blocks")
