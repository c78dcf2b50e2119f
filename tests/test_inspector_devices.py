"""Layers on several devices: nothing meets across them unasked, and the numbers are the same."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from replayscope.inspector.cli import main
from replayscope.inspector.layout import Layout
from replayscope.inspector.options import RunOptions
from replayscope.inspector.prompts import parse_prompt
from replayscope.inspector.step import Step
from replayscope.inspector.usecases import write_trace
from replayscope.model.checkpoint import open_checkpoint
from replayscope.model.placement import place
from replayscope.model.reference import State
from replayscope.traces.reader import TraceReader
from tests import checkpoints
from tests.devices import Elsewhere, devices
from tests.test_model_streaming import differences

# The schedule of layers is what matters here, not how many experts they have.
CONFIG = replace(checkpoints.CONFIG, n_routed_experts=3, num_experts_per_tok=2, hc_sinkhorn_iters=2)
CPUS = [torch.device("cpu", i) for i in range(4)]
# Together they use owners, prefixes, floors, frozen choices, copies of a prefix, and oracles.
ARMS = ("full", "both", "frozen:encoder", "broken:overwrite", "oracle:both")
IDS = ",".join(str(i * 7 % 200) for i in range(15))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The stand-in for several devices watches its own thread only; on a CPU the executor's blocks have others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("official"), CONFIG, checkpoints.pack(CONFIG)[0])


def options(folder, out, **more) -> RunOptions:
    base = RunOptions(model=str(folder), prompt=parse_prompt(f"ids:{IDS}"), arms=ARMS, cuts="13", dtype="fp64",
                      device="cpu", hooks=("layers.*.hidden",), verbosity=-1, out=out)  # fmt: skip
    return replace(base, **more)


def sweep(*args, **more) -> TraceReader:
    return TraceReader(write_trace(options(*args, **more)))


@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
def test_every_layer_runs_where_it_lies(folder, tmp_path, stream):
    """And to the same bits, since the devices are all the CPU."""
    # Up to the last source of entries and layers behind it that read its candidates.
    few = {"stream": stream, "layers_only": 9}
    one = sweep(folder, tmp_path / "1.h5", **few)
    with devices() as seen:
        three = sweep(folder, tmp_path / "3.h5", **few, devices=("cpu:0", "cpu:1", "cpu:2"))
    assert not differences(one, three)
    between = {pair for pair in seen.transfers if "cpu" not in pair}
    # Entries of a source on the first device are read on the third: they come from home, not by way of the second.
    assert between >= {("cpu:0", "cpu:1"), ("cpu:1", "cpu:2")} and between <= {*between, ("cpu:0", "cpu:2")}
    assert all(seen.ops[str(d)] > 1000 for d in CPUS[:3])
    assert three.provenance["device"] == "cpu:0, cpu:1, cpu:2"


def forget(name: str):
    """Step.move without one of the tensors that it carries."""

    def move(self: Step, device: torch.device, whole=Step.move) -> None:
        kept = getattr(self, name)
        whole(self, device)
        setattr(self, name, kept)

    return move


@pytest.mark.parametrize(
    "name", ["position", "request", "streams", "mix", "topk", "topk_margin", "candidates", "now", "entries"]
)
def test_what_stays_behind_is_seen(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Step, "move", forget(name))
    with devices(), pytest.raises(Elsewhere):
        sweep(folder, tmp_path / "t.h5", arms=("full", "oracle:full"), devices=("cpu:0", "cpu:1"))


@pytest.mark.parametrize("fault", ["entries", "oracle"])
def test_entries_and_oracles_that_stay_behind_are_seen(folder, tmp_path, monkeypatch, fault):
    if fault == "entries":
        monkeypatch.setattr(Layout, "entries", lambda self, s: self._stored(s, self._home.get(s, self.device)))
    else:
        monkeypatch.setattr(State, "move", lambda self, device: None)
    with devices(), pytest.raises(Elsewhere):
        sweep(folder, tmp_path / "t.h5", arms=("full", "oracle:full"), devices=("cpu:0", "cpu:1"))


def test_entries_are_copied_once_for_each_device(folder, tmp_path, monkeypatch):
    copied: Counter[tuple[int, int, torch.device]] = Counter()
    stored = Layout._stored

    def count(self: Layout, source: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        copied[id(self), source, self.device] += device != self.device
        return stored(self, source, device)

    monkeypatch.setattr(Layout, "_stored", count)
    with devices():
        sweep(folder, tmp_path / "t.h5", arms=("full", "encoder"), devices=tuple(map(str, CPUS)))
    places = open_checkpoint(folder).places(CPUS)
    wanted = {
        (s, places[l]) for l in CONFIG.layers if (s := CONFIG.kv_source(l)) is not None and places[s] != places[l]
    }
    assert len(wanted) > 1 and max(copied.values()) == 1
    assert {key[1:] for key, n in copied.items() if n} == wanted


def test_blocks_of_layers_are_even_in_bytes():
    a, b, c = CPUS[:3]
    assert place([1, 1, 1, 1], [a, b]) == (a, a, b, b)
    assert place([9, 1, 1, 1], [a, b]) == (a, b, b, b)
    assert place([1, 1, 1, 9], [a, b, c])[-1] == c and set(place([1, 1, 1, 9], [a, b, c])) == {a, b, c}
    assert place([4, 1, 1, 4, 4, 1], [a, b, c]) == (a, a, b, b, c, c)
    assert place([5, 5], "cpu") == (torch.device("cpu"),) * 2
    with pytest.raises(ValueError, match="3 devices for 2 layers"):
        place([1, 1], CPUS[:3])


def test_several_on_the_command_line(folder, tmp_path, capsys):
    """Placed twice on the one CPU, a run is the run it was, bit by bit."""
    words = ["sweep", "-q", "-m", str(folder), "-p", f"ids:{IDS}", "--cuts", "13", "--arms", "full,encoder", "-o"]
    assert main([*words, str(tmp_path / "1.h5"), "--device", "cpu", "--reproducible"]) == 0
    assert main([*words, str(tmp_path / "2.h5"), "--devices", "cpu,cpu", "--reproducible"]) == 0
    assert not differences(TraceReader(tmp_path / "1.h5"), TraceReader(tmp_path / "2.h5"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--device", "cpu", "--devices", "cpu,cpu"], "--device and --devices both say where to run; give one of them"),
        (["--devices", "cpu,auto"], "argument --devices: auto is one device; name each, as cuda:0,cuda:1"),
        (["--devices", "cpu,"], "unknown device ''; valid: auto, cpu, cuda, cuda:N"),
        (["--devices", ",".join(["cpu"] * 13)], "13 devices for 12 layers; name no more devices than layers"),
        pytest.param(["--devices", "cuda:0,cuda:1"], "device cuda:0 is not here; use --device cpu",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it has CUDA")),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_devices_that_cannot_be_are_one_line(folder, tmp_path, capsys, given, says):
    out = tmp_path / "t.h5"
    assert main(["sweep", "-m", str(folder), "-p", f"ids:{IDS}", "-o", str(out), *given]) == 2
    printed, err = capsys.readouterr()
    assert printed == "" and len(err.splitlines()) == 1 and says.split(": ", 1)[-1] in err and not out.exists()
