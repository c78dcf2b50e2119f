"""A process in which Triton interprets: the variable must be set before triton is imported, and nowhere else."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    # The interpreter keeps the program it is at in globals, and the executor runs blocks on as many threads as torch.
    torch.set_num_threads(1)


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """One worker process that interprets kernels; what is submitted is imported there, after the variable is set."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_start) as pool:
        yield pool
