"""The official checkpoint: every format decoded to the bit, what is skipped, what is refused and how it is said."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayscope.inspector.cli import main
from replayscope.model import manifest, weights
from replayscope.model.checkpoint import Table, first_layers, open_checkpoint
from replayscope.model.reference import dense_pass
from replayscope.model.weights import WeightsError
from tests import checkpoints

CONFIG = checkpoints.CONFIG
IDS = "ids:" + ",".join(str(i * 7 % 200) for i in range(24))
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint folder, and what its tensors decode to."""
    tensors, truth = checkpoints.pack(CONFIG)
    return checkpoints.write(tmp_path_factory.mktemp("official"), CONFIG, tensors), truth


@pytest.fixture
def folder(made, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(made[0], tmp_path / "m")


def differing(path, truth) -> set[str]:
    """Names of the tensors that do not decode to the truth, Engram tables by some rows."""
    checkpoint = open_checkpoint(path)
    bad = set()
    for name, want in truth.items():
        rows = torch.tensor([[0, 5], [len(want) - 1, 5]])
        if name.endswith("engram.embed.weight"):
            same = torch.equal(checkpoint.table(name, torch.float32)[rows], want[rows])
        else:
            same = torch.equal(checkpoint.read(name, torch.float32), want)
        if not same:
            bad.add(name)
    return bad


def edit(path, change):
    """Rewrite a shard with its tensors changed in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_every_tensor_decodes_to_what_was_packed(made):
    folder, truth = made
    assert not differing(folder, truth)
    dtypes = {e.dtype for e in open_checkpoint(folder).entries.values()}
    assert dtypes == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}


def test_a_wrong_nibble_order_is_seen(made, monkeypatch):
    folder, truth = made
    monkeypatch.setattr(weights, "_PAIRS", weights._PAIRS.flip(1))
    assert differing(folder, truth) == {name for name in truth if ".ffn.experts." in name}


def test_a_transposed_scale_tile_is_seen(made, folder):
    """Of a square matrix: nothing but the numbers can tell."""
    _, truth = made
    name = "layers.0.attn.wq_a.scale"

    def transpose(tensors):
        square = tensors[name].view(torch.uint8)[:, :2]
        tensors[name] = torch.cat((square.T, tensors[name].view(torch.uint8)[:, 2:]), 1).view(torch.float8_e8m0fnu)

    edit(folder / FIRST, transpose)
    assert differing(folder, truth) == {"layers.0.attn.wq_a.weight"}


def test_engram_tables_are_read_by_rows_only(made, monkeypatch):
    folder, truth = made
    checkpoint = open_checkpoint(folder)
    name = "layers.1.engram.embed.weight"
    model = checkpoint.resident(torch.float64)
    table = model.layers[1].engram.embed
    assert isinstance(table, Table) and model.layers[1].engram.token_map[1] == 7
    rows = torch.tensor([[3, 3, 200], [0, 1, 2]])
    assert torch.equal(table[rows], truth[name][rows].double())
    monkeypatch.setattr(type(checkpoint.entries[name]), "view", lambda self: pytest.fail("a whole tensor is read"))
    assert table[rows[:0]].shape == (0, 3, CONFIG.engram_head_dim) and table[rows].isfinite().all()


def test_vision_and_dspark_are_skipped_without_their_shard(made, folder):
    (folder / LAST).unlink()
    entries = open_checkpoint(folder).entries
    assert not [n for n in entries if n.startswith(("vision", "mtp", "image", "aligner", "layers.12.")) or "_vl" in n]


def test_one_error_names_every_kind_of_misfit(folder):
    def spoil(tensors):
        del tensors["layers.0.attn_norm.weight"], tensors["layers.0.ffn.experts.3.w1.scale"]
        tensors["layers.0.attn.q_norm.weight"] = torch.zeros(5)
        tensors["layers.0.ffn_norm.weight"] = torch.zeros(CONFIG.hidden_size, dtype=torch.int64)
        tensors["layers.0.attn.wq_c.weight"] = torch.zeros(2, 2)
        tensors["layers.0.attn.wq_a.scale"] = tensors["layers.0.attn.wq_a.scale"].view(torch.uint8)
        tensors["layers.0.ffn.experts.2.w1.scale"] = tensors["layers.0.ffn.experts.2.w1.scale"].T.contiguous()

    edit(folder / FIRST, spoil)
    index = json.loads((folder / manifest.INDEX).read_text())
    index["weight_map"]["layers.0.attn.wq_c.weight"] = FIRST
    (folder / manifest.INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError) as error:
        open_checkpoint(folder)
    missing, unknown, shapes, dtypes = str(error.value).partition("config: ")[2].split("; ")
    assert missing == "missing layers.0.attn_norm.weight, layers.0.ffn.experts.3.w1.scale"
    assert unknown == "unknown layers.0.attn.wq_c.weight"
    assert "misshapen layers.0.attn.q_norm.weight (5,) wants (40,)" in shapes and "experts.2.w1.scale (5, 72)" in shapes
    assert dtypes == "of a dtype that cannot be read layers.0.ffn_norm.weight I64, layers.0.attn.wq_a.scale U8"


def truncate(folder):
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-100])


def lie(folder):
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data.replace(b'"F8_E4M3","shape":[40,160]', b'"F8_E4M3","shape":[40,161]', 1))


def rename(folder):
    text = (folder / manifest.INDEX).read_text()
    (folder / manifest.INDEX).write_text(text.replace("00002-of", "00009-of"))


def poison(folder):
    def change(tensors):
        tensors["layers.0.ffn.experts.3.w2.scale"].view(torch.uint8)[4, 1] = 255

    edit(folder / FIRST, change)


def climb(folder):
    (folder / manifest.INDEX).write_text('{"weight_map": {"embed.weight": "../model.safetensors"}}')


FAULTS = {
    truncate: "is truncated",
    lie: "to a tensor [40, 161] of F8_E4M3",
    rename: "names model-00009-of-00003.safetensors, which is not there",
    climb: "must name files of its own folder",
    poison: "NaN or infinity: layers.0.ffn.experts.3.w2",
    lambda folder: (folder / "engram_token_map.json").write_text("[1, 2]"): "must hold 200 ids",
    lambda folder: (folder / manifest.INDEX).write_text("[]"): "is no index of shards",
    lambda folder: (folder / FIRST).write_bytes(b""): "cannot read weights",
    lambda folder: (folder / manifest.INDEX).unlink() or shutil.copy(folder / FIRST, folder / "x.safetensors"): "too:",
}


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["resident", "streamed"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: FAULTS[fault][:12])
def test_a_broken_checkpoint_is_one_line(folder, tmp_path, capsys, fault, stream):
    fault(folder)
    out = tmp_path / "t.h5"
    code = main(["record", "-m", str(folder), "-p", IDS, "--arms", "full", "-q", "-o", str(out), *stream])
    text, err = capsys.readouterr()
    assert code == 2 and text == "" and len(err.strip().splitlines()) == 1 and FAULTS[fault] in err, err
    assert not out.exists()


def test_the_first_layers_are_those_of_the_whole_model(made):
    ids = torch.arange(24)[None]
    whole = dense_pass(open_checkpoint(made[0]).resident(torch.float64), ids)
    model = open_checkpoint(made[0], layers=7).resident(torch.float64)
    assert model.config.compress_ratios == CONFIG.compress_ratios[:7]
    assert model.config.index_source_layer_ids == (2, 4, 6) and model.config.candidate_source_layer_id == 6
    frames = list(dense_pass(model, ids))
    assert [f.layer for f in frames] == [None, *range(7), None]
    for mine, theirs in zip(frames[:-1], whole, strict=False):
        assert all(torch.equal(mine.tensors[k], theirs.tensors[k]) for k in theirs.tensors)


def test_a_number_of_layers_without_a_valid_model_is_refused(made, tmp_path, capsys):
    assert [k for k in range(1, 13) if valid(k)] == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    for count, says in ((5, "try 4 or 7"), (13, "the model has 12 layers"), (0, "--layers-only")):
        words = ["record", "-m", str(made[0]), "-p", IDS, "--arms", "full", "-o", str(tmp_path / "t.h5"), "-q"]
        assert main([*words, "--layers-only", str(count)]) == 2
        _, err = capsys.readouterr()
        assert says in err and len(err.strip().splitlines()) == 1
    assert main([*words, "--layers-only", "3"]) == 0


def valid(count: int) -> bool:
    try:
        return first_layers(CONFIG, count).num_hidden_layers == count
    except WeightsError:
        return False


def test_a_large_checkpoint_is_known_by_a_sample(made, monkeypatch):
    whole = manifest.weights_hash(made[0])
    monkeypatch.setattr(manifest, "_HASHED_WHOLE", 1000)
    sampled = manifest.weights_hash(made[0])
    assert len(whole) == 64 and sampled.startswith("sampled:") and len(sampled) == 72
