"""Every Triton form against its torch meaning: interpreted in a process of its own, compiled where there is a GPU."""

import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests import triton_cases
from tests.interpreter import interpreter

# E9 has bf16 inputs of its own; the rest of the table is read in fp32, which is what the interpreter gets right.
UPCAST = ("attention rows=6 heads=3 dim=24 window=4 picks=3", "row sums width=129", "logits vocab=33", "compressor")


@pytest.fixture(scope="module")
def worker():
    with interpreter() as pool:
        yield pool
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter must not leak into other tests"


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_interpreted(worker: ProcessPoolExecutor, name):
    worker.submit(triton_cases.run, name).result(timeout=600)


@pytest.mark.parametrize("name", UPCAST)
def test_interpreted_bf16_is_upcast(worker: ProcessPoolExecutor, name):
    worker.submit(triton_cases.run, name, dtype="bfloat16").result(timeout=600)


@pytest.mark.parametrize("fault", triton_cases.FAULTS)
def test_a_planted_fault_fails_the_same_case(worker: ProcessPoolExecutor, fault):
    name = triton_cases.FAULTS[fault][1]
    with pytest.raises(AssertionError):
        worker.submit(triton_cases.run, name, fault=fault).result(timeout=600)


@pytest.mark.gpu
@pytest.mark.parametrize("name", triton_cases.CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_cuda(dtype, name):
    triton_cases.run(name, "cuda", dtype)
