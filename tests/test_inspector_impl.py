"""The form of the kernels goes by where tensors lie, not by where a run begins; the trace says which ran where."""

import inspect
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from replayscope.inspector import entries, fold, hf_load, provenance, step
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.fold import Fold, Group, Piece, Side
from replayscope.inspector.options import RunOptions
from replayscope.inspector.prompts import parse_prompt
from replayscope.inspector.usecases import write_trace
from replayscope.kernels import impl
from replayscope.model.checkpoint import open_checkpoint
from replayscope.traces.reader import TraceReader
from tests import checkpoints, hf, v41
from tests.devices import devices
from tests.test_inspector_fold import runs
from tests.test_model_streaming import differences

CPU, FAR = torch.device("cpu"), torch.device("meta")
CONFIG = replace(checkpoints.CONFIG, n_routed_experts=3, num_experts_per_tok=2, hc_sinkhorn_iters=2)
# Every op that has two forms, by where the executor and the fold take it from.
OPS = [(step, "packed_attention"), (step, "index_scores"), (step, "topk_entries"), (entries, "compress_pairs"),
       (fold, "row_sums"), (fold, "logits_rows")]  # fmt: skip
OURS, SUMS = {name for _, name in OPS}, {"row_sums", "logits_rows"}
IDS = ",".join(str(i * 7 % 90 + 3) for i in range(15))
Seen = dict[str, set[tuple[str, str]]]


@pytest.fixture(autouse=True)
def one_thread():
    """The stand-in for another device watches its own thread only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def far_is_a_gpu(monkeypatch):
    """``meta`` stands for a device that Triton compiles for, under the name of which nothing else is."""
    real = impl._hindrance
    monkeypatch.setattr(impl, "_hindrance", lambda d, t: real(torch.device("cuda") if d == FAR else d, t))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.fixture
def seen(monkeypatch) -> Seen:
    """Op → (kind of device that its tensors lie on, form that runs there). Where that is Triton, torch does its work;
    where Triton is asked for and cannot run, it is refused as ever."""
    found: Seen = defaultdict(set)

    def watched(name, op):
        def call(*args, **more):
            given = inspect.signature(op).bind(*args, **more)
            given.apply_defaults()
            form = "triton" if impl.use_triton(given.arguments["impl"], args[0]) else "torch"
            found[name].add((args[0].device.type, form))
            given.arguments["impl"] = "torch"
            return op(*given.args, **given.kwargs)

        return call

    for module, name in OPS:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("official"), CONFIG, checkpoints.pack(CONFIG)[0])


def sweep(model, out, **more) -> TraceReader:
    base = RunOptions(model=str(model), prompt=parse_prompt(f"ids:{IDS}"), arms=("full", "encoder", "oracle:encoder"),
                      cuts="13", dtype="fp32", device="cpu", verbosity=-1, out=out)  # fmt: skip
    return TraceReader(write_trace(replace(base, **more)))


@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("order", [(FAR, CPU), (CPU, FAR)], ids=str)
def test_a_layer_runs_in_the_form_of_its_own_device(folder, tmp_path, seen, stream, order):
    """And is compared in it. With both orders, so that neither first nor last device decides for the other."""
    with devices():
        trace = sweep(folder, tmp_path / "t.h5", devices=tuple(map(str, order)), stream=stream)
    assert seen.keys() == OURS
    assert set.union(*seen.values()) == {("meta", "triton"), ("cpu", "torch")}
    # Pairs are pooled below the decoder only, logits are those of the last device.
    assert seen["packed_attention"] == seen["row_sums"] == {("meta", "triton"), ("cpu", "torch")}
    forms = {FAR: "triton on meta", CPU: "torch on cpu"}
    whys = {FAR: "on meta: Triton compiles for meta and takes float32", CPU: "on cpu: Triton has no backend for cpu"}
    assert trace.provenance["impl"] == ", ".join(forms[d] for d in order)
    assert trace.provenance["impl_reason"] == "; ".join(whys[d] for d in order)
    assert not differences(trace, sweep(folder, tmp_path / "one.h5", stream=stream))


@pytest.mark.parametrize(("asked", "form"), [("auto", "triton"), ("triton", "triton"), ("torch", "torch")])
def test_one_kind_of_device_runs_what_it_ran(folder, tmp_path, seen, asked, form):
    with devices():
        trace = sweep(folder, tmp_path / "t.h5", device="meta", impl=asked, layers_only=9)
    assert set.union(*seen.values()) == {("meta", form)}
    assert trace.provenance["impl"] == form
    assert trace.provenance["impl_reason"] == (
        "as asked" if asked != "auto" else "Triton compiles for meta and takes float32"
    )


def test_what_all_devices_run_alike_is_said_once(folder):
    with devices():
        model = open_checkpoint(folder).resident(torch.float32, [FAR, CPU])
    options = RunOptions(devices=("meta", "cpu"), impl="torch")
    about = provenance.collect(options, "m", "", torch.arange(3), model, ["replayscope"])
    assert (about["impl"], about["impl_reason"]) == ("torch", "as asked")


def apart(monkeypatch, family: str):
    """A Hugging Face model in fp32 that takes its input on one device and has its states gathered on the CPU, as one
    that is spread over several has. Its modules all lie on the CPU; what it is given is carried there, as accelerate's
    hooks do."""
    real = hf_load.hf.load

    def load(name, dtype, *args, **more):
        model, origin = real(name, dtype, [CPU], **more)

        def carry(module, args, given):
            return args, {k: x.to(CPU) if isinstance(x, torch.Tensor) else x for k, x in given.items()}

        model.module.register_forward_pre_hook(carry, with_kwargs=True)
        return replace(model, device=FAR, home=CPU), origin

    monkeypatch.setattr(hf_load.hf, "load", load)
    return hf.folder(family)


def test_states_are_compared_in_the_form_of_where_they_are_gathered(tmp_path, monkeypatch, seen):
    """The Hugging Face model on several GPUs: its input goes to one of them, its states to the CPU."""
    plain = sweep(hf.folder("gemma-2"), tmp_path / "1.h5")
    seen.clear()
    with devices():
        trace = sweep(apart(monkeypatch, "gemma-2"), tmp_path / "2.h5", device="meta")
    assert seen.keys() == SUMS and set.union(*seen.values()) == {("cpu", "torch")}
    assert not differences(plain, trace)
    assert trace.provenance["impl"] == "torch on cpu"
    assert trace.provenance["impl_reason"] == "on cpu: Triton has no backend for cpu"
    assert plain.provenance["impl"] == "torch" and plain.provenance["impl_reason"] == "Triton has no backend for cpu"


def test_the_fold_goes_by_the_tensors_it_is_given(seen):
    """One fold, whose layers lie on two kinds of device."""
    made = Fold(runs(), 2, np.full(40, -1), torch.float32, impl="auto")
    pairs = made.pairs([Piece((0,), 0, 0, np.arange(4))])
    with devices():
        for layer, device in enumerate((FAR, CPU)):
            side = Side(torch.ones(4, 3).to(device))
            made.add(layer, [Group("full", pairs, np.ones(4, bool), {"hidden": (side, side)})])
    assert seen["row_sums"] == {("meta", "triton"), ("cpu", "torch")}


REFUSED = "impl triton: Triton has no backend for cpu; use torch or auto"


@pytest.mark.parametrize("names", [("meta", "cpu"), ("cpu", "meta"), ("meta", "cpu", "meta")], ids=",".join)
@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
def test_triton_is_refused_if_any_device_cannot_run_it(folder, tmp_path, seen, names, stream):
    with devices(), pytest.raises(UsageError) as refused:
        sweep(folder, tmp_path / "t.h5", devices=names, impl="triton", stream=stream)
    assert str(refused.value) == f"--{REFUSED}"
    assert not seen and not list(tmp_path.iterdir())


def test_triton_is_refused_where_states_are_gathered_elsewhere(tmp_path, monkeypatch, seen):
    """On a device that was not asked for, so the refusal says what it is for."""
    with devices(), pytest.raises(UsageError) as refused:
        sweep(apart(monkeypatch, "gemma-2"), tmp_path / "t.h5", device="meta", impl="triton")
    assert str(refused.value) == f"--{REFUSED} (the states of this model are compared on cpu)"
    assert not seen and not list(tmp_path.iterdir())


def test_an_executor_refuses_it_too(folder):
    with devices():
        model = open_checkpoint(folder).resident(torch.float32, [FAR, CPU])
        with pytest.raises(ValueError, match=f"^{REFUSED}$"):
            Executor(model, impl="triton")
        Executor(model, impl="auto")
    with pytest.raises(ValueError, match="float64 has no Triton form"):
        Executor(v41.model(), impl="triton")
