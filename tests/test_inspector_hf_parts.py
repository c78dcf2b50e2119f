"""Parts of a Hugging Face model: its first layers only, and layers whose weights stay on the disk until they run."""

import gc
import shutil
from pathlib import Path

import pytest
import torch

from replayscope.model import hf as loader
from replayscope.traces.reader import TraceReader
from tests import hf

CPU = [torch.device("cpu")]
# Window and global layers with sinks and experts; KV shared between layers; a tower beside, and experts that the
# checkpoint holds in another form.
FAMILIES = ("gpt-oss", "gemma-4", "step-3.7")
families = pytest.mark.parametrize("family", FAMILIES)
ARMS = ("--arms", "full,hit,encoder,oracle:encoder", "--cuts", "20", "--dtype", "fp64", "--hooks", "layers.*.*,logits")


def recorded(capsys, family, out, *more) -> TraceReader:
    code, _, err = hf.run(capsys, "record", "-m", hf.folder(family), "-p", hf.PROMPT, *ARMS, "-o", out, *more)
    assert code == 0, err
    return TraceReader(out)


def same(a: TraceReader, b: TraceReader, names=None) -> bool:
    """Whether states of those names are equal in both, but for rounding: where weights lie in memory, products are
    grouped otherwise (measured on these models: 1e-15 of the largest number)."""
    pairs = [(a.state(r, n).values, b.state(r, n).values) for r, n in names or a.states()]
    return all(x.shape == y.shape and abs(x - y).max(initial=0) <= 1e-13 * abs(x).max(initial=0) for x, y in pairs)


@families
def test_layers_that_stay_on_the_disk_compute_the_same(family, tmp_path, capsys):
    whole, streamed = (
        recorded(capsys, family, tmp_path / "a.h5"),
        recorded(capsys, family, tmp_path / "b.h5", "--stream"),
    )
    assert whole.states() == streamed.states() and same(whole, streamed)
    assert streamed.provenance["options"]["stream"] and not whole.provenance["options"]["stream"]


@families
def test_the_first_layers_alone_compute_what_they_do_in_the_whole(family, tmp_path, capsys):
    whole, part = (
        recorded(capsys, family, tmp_path / "a.h5"),
        recorded(capsys, family, tmp_path / "b.h5", "--layers-only", "3"),
    )
    inside = [(run, name) for run, name in part.states() if name.startswith("layers.")]
    assert {name.split(".")[1] for _, name in inside} == {"0", "1", "2"} and same(part, whole, inside)
    assert part.config["replayscope"]["layers"] == whole.config["replayscope"]["layers"][:3]
    # Without the layers behind them the logits are others.
    assert not same(part, whole, [(0, "logits")])


def held(model: loader.HFModel) -> tuple[int, int]:
    """Numbers in memory, in the decoder's layers and elsewhere."""
    inside = {id(p) for layer in model.parts.layers for p in layer.layer.parameters()}
    sizes = [(id(p) in inside, p.numel()) for p in model.module.parameters() if p.device.type != "meta"]
    return sum(n for within, n in sizes if within), sum(n for within, n in sizes if not within)


@families
def test_only_what_runs_is_in_memory(family):
    name = str(hf.folder(family))
    inside, outside = held(loader.load(name, torch.float64, CPU)[0])
    streamed = loader.load(name, torch.float64, CPU, stream=True)[0]
    assert held(streamed) == (0, outside) and inside > 0
    assert streamed.device == streamed.home == torch.device("cpu")
    two, there = loader.load(name, torch.float64, CPU, layers=2)[0], loader.load(name, torch.float64, CPU)[0]
    assert len(two.parts.layers) == 2 and held(two)[0] == sum(
        p.numel() for part in there.parts.layers[:2] for p in part.layer.parameters()
    )


def test_the_folder_of_what_had_to_be_written_goes_with_the_model(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = loader.load(str(hf.folder("step-3.7")), torch.float64, CPU, stream=True)[0]
    made += list(tmp_path.iterdir())
    assert len(made) == 1 and any(made[0].iterdir())
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())


def refused(capsys, model: Path, *words) -> str:
    code, out, err = hf.run(capsys, "record", "-m", model, "-p", hf.PROMPT, *ARMS, *words)
    assert code == 2 and out == "" and err.count("\n") == 1, err
    return err


def test_what_cannot_be_is_refused_in_one_line(tmp_path, capsys):
    out = ("-o", tmp_path / "t.h5")
    folder = hf.folder("gpt-oss")
    assert "it has 6 layers, not 7" in refused(capsys, folder, "--layers-only", "7", *out)
    assert "--stream and --quantize do not go together" in refused(
        capsys, folder, "--stream", "--quantize", "8bit", *out
    )
    late = tmp_path / "late"
    shutil.copytree(hf.folder("ministral"), late)
    late = hf.edited("ministral", late, layer_types=["full_attention"] * 2 + ["sliding_attention"] * 4)
    assert "its first sliding-window layer is 2: keep more layers" in refused(capsys, late, "--layers-only", "2", *out)
    # What a checkpoint lacks is told of layers on the disk too, where nothing was read.
    deeper = tmp_path / "deeper"
    shutil.copytree(hf.folder("mistral"), deeper)
    err = refused(capsys, hf.edited("mistral", deeper, num_hidden_layers=6), "--stream", *out)
    assert "the checkpoint lacks 18 tensors" in err


def test_layers_spread_by_a_device_map_run_as_those_of_one_device(monkeypatch):
    """The path of several devices, on the only one that is here: accelerate's hooks around every module, some layers on
    the disk, states gathered in one place."""
    plain = loader.load(str(hf.folder("gemma-2")), torch.float64, CPU)[0]
    where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    where |= {f"model.layers.{l}": "cpu" if l % 2 else "disk" for l in range(6)}
    # With one place for everything accelerate has nothing to do.
    for at, hooks in (({"": "cpu"}, False), (where, True)):
        monkeypatch.setattr(loader, "placement", lambda devices, quantise, at=at: {"device_map": at})
        mapped = loader.load(str(hf.folder("gemma-2")), torch.float64, CPU)[0]
        assert hasattr(mapped.parts.layers[0].layer, "_hf_hook") == hooks and mapped.home == torch.device("cpu")
        assert float((logits(mapped) - logits(plain)).abs().max()) < 1e-13


def logits(model: loader.HFModel) -> torch.Tensor:
    with torch.no_grad():
        return model.module(input_ids=hf.IDS[None]).logits
