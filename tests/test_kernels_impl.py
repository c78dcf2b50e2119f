"""Which form of a kernel runs: as asked, or with the reason why not."""

from contextlib import contextmanager

import pytest
import torch

from replayscope.inspector import provenance
from replayscope.inspector.cli import main
from replayscope.inspector.options import RunOptions
from replayscope.kernels import impl
from replayscope.kernels.attention import packed_attention
from replayscope.kernels.divergence import row_sums
from replayscope.kernels.packed import WindowRows
from tests import v41

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "runs", "why"),
    [
        ("torch", CUDA, torch.float32, "torch", "as asked"),
        ("triton", CUDA, torch.bfloat16, "triton", "as asked"),
        ("auto", CUDA, torch.bfloat16, "triton", "compiles for cuda and takes bfloat16"),
        ("auto", CUDA, torch.float64, "torch", "float64 has no Triton form"),
        ("auto", CPU, torch.float32, "torch", "no backend for cpu"),
        ("auto", CUDA, torch.int64, "torch", "no kernel reads int64"),
    ],
)
def test_the_choice_and_its_reason(asked, device, dtype, runs, why):
    choice = impl.choose(asked, device, dtype)
    assert choice.impl == runs and why in choice.reason


def test_what_cannot_run_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match="no backend for cpu; use torch or auto"):
        impl.choose("triton", CPU, torch.float32)
    with pytest.raises(ValueError, match="float64 has no Triton form"):
        row_sums(torch.zeros(1, 1).double(), torch.zeros(1, 1).double(), impl="triton")
    with pytest.raises(ValueError, match="impl 'cuda' is none of auto, torch, triton"):
        impl.choose("cuda", CPU, torch.float32)
    monkeypatch.setattr(impl, "find_spec", lambda name: None)
    assert impl.choose("auto", CUDA, torch.float32) == ("torch", "triton is not installed")
    monkeypatch.undo()
    # The interpreter makes triton possible on a CPU, and auto does not take it.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert impl.choose("triton", CPU, torch.float32).impl == "triton"
    assert impl.choose("auto", CPU, torch.float32) == ("torch", "Triton's interpreter is for tests")


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    """Else layers on a second GPU would be computed by the first, with pointers that it cannot follow."""
    current = []

    @contextmanager
    def device(where):
        current.append(where)
        yield

    @impl.on_its_device
    def launch(x, more):
        return more, list(current)

    class Far:
        is_cuda, device = True, "cuda:1"

    monkeypatch.setattr(torch.cuda, "device", device)
    assert launch(torch.zeros(1), 3) == (3, []) and launch(Far(), more=4) == (4, ["cuda:1"])


def test_the_trace_says_what_ran_and_why():
    about = provenance.collect(RunOptions(), "mini", "", torch.arange(3), v41.model(), ["replayscope"])
    assert (about["impl"], about["options"]["impl"]) == ("torch", "auto")
    assert about["impl_reason"] == "float64 has no Triton form"


def test_the_command_line_refuses_in_one_line(capsys, tmp_path):
    words = ["record", "-m", "mini", "--tokens", "8", "--arms", "full", "--device", "cpu", "--impl", "triton"]
    assert main([*words, "-o", str(tmp_path / "t.h5")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "replayscope: --impl triton: Triton has no backend for cpu; use torch or auto"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sink", [float("inf"), float("-inf"), 0.0])
def test_a_sink_of_plus_infinity_takes_everything_in_torch_too(sink):
    at = torch.arange(3)
    rows = WindowRows(at, at * 0, at * 0, at * 0, at * 0)
    out = packed_attention(torch.ones(3, 1, 4), torch.ones(3, 4), rows, 2, None, None, torch.tensor([sink]))
    assert torch.isfinite(out).all() and (out == 0).all() == (sink == float("inf"))
