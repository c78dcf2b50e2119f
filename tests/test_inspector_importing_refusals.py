"""Hostile and unusable dumps: one line, exit code 2, and nothing written; packed cache slots of a whole dump."""

import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from replayscope.inspector import cli
from replayscope.inspector.checks import steps
from replayscope.inspector.errors import UsageError
from replayscope.inspector.name_maps import load_map, shipped
from replayscope.traces import TraceReader
from tests.sglang_dump import by_layout
from tests.test_inspector_unpack import ROUND, drawn, pack

N, WIDTH = 12, 8
ROOT = Path(__file__).parents[1]
CONFIG = {"model_type": "other", "num_hidden_layers": 3, "hidden_size": WIDTH, "vocab_size": 20, "sliding_window": 4}
WHO = ["--engine", "e", "--engine-version", "1", "--engine-commit", "c"]


@pytest.fixture
def work(tmp_path, capsys):
    """Import a folder `dump` with a map: (exit code, stdout, stderr)."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "dump").mkdir()

    def call(*more, fmt="sglang-dump", names="v41", source=None, prompt=True):
        words = ["import", source or tmp_path / "dump", "--format", fmt, "--map", names, *WHO, "-m", tmp_path / "model"]
        words += ["-p", "ids:" + ",".join(map(str, range(N)))] if prompt else []
        code = cli.main([str(word) for word in (*words, "-o", tmp_path / "t.h5", *more)])
        return code, *capsys.readouterr()

    return call


def refused(work, tmp_path, says, **how):
    code, out, err = work(**how)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("replayscope: "), err
    assert says in err, err
    assert "internal error" not in err
    assert not list(tmp_path.glob("t.h5*"))


def hidden(rows=N, layer=0, **tags):
    return ("hidden", torch.ones(rows, WIDTH), {"layer_id": layer} | tags)


def where(tmp_path) -> list:
    return list((tmp_path / "dump").glob("*.pt"))


def dump(tmp_path, *dumped, **how):
    folder = by_layout(tmp_path, [list(dumped)], **how)
    for path in folder.iterdir():
        path.rename(tmp_path / "dump" / path.name)


def test_the_plain_case_is_taken_and_nothing_is_left_beside_it(work, tmp_path):
    dump(tmp_path, hidden())
    code, out, err = work()
    assert code == 0, err
    assert str(tmp_path / "t.h5") in out and [p.name for p in tmp_path.glob("t.h5*")] == ["t.h5"]
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.config == CONFIG and trace.runs[0].window == 4 and trace.states() == [(0, "layers.0.hidden")]
    code, _, err = work()
    assert code == 2 and "exists; add --force" in err
    assert cli.main(["show", str(tmp_path / "t.h5"), "--verify"]) == 0


def test_names_of_modules_that_the_dumper_hooks_by_itself(work, tmp_path):
    """Of a module it writes what enters and what leaves, under the module's name and behind a prefix of its own."""
    prefix = "non_intrusive__model.layers.1"
    dump(tmp_path, ("positions", torch.arange(N), {}))
    for name, value in ((f"{prefix}.output", 2.0), (f"{prefix}.inputs.0", 1.0), (f"{prefix}.mlp.output", 3.0)):
        dump(tmp_path, (name, torch.full((N, WIDTH), value), {"layer_id": 1}))
    code, out, err = work("--json", names="huggingface")
    assert code == 0 and json.loads(out)["unused"] == 1, err
    trace = TraceReader(tmp_path / "t.h5")
    assert [trace.state(0, f"layers.1.{point}").values[0, 0] for point in ("ffn_out", "hidden")] == [3.0, 2.0]


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_that_calls_something_is_not_run(work, tmp_path):
    proof = tmp_path / "proof"
    for value in ({"value": Attack(proof), "meta": {}}, Attack(proof)):
        dump(tmp_path, hidden())
        torch.save(value, where(tmp_path)[0])
        refused(work, tmp_path, "is not a file of plain tensors, and nothing in it is run")
        where(tmp_path)[0].write_bytes(pickle.dumps(value))
        refused(work, tmp_path, "is not a file of plain tensors")
    assert not proof.exists()


@pytest.mark.parametrize(
    "value",
    [{"value": "text", "meta": {}}, {"value": [1, 2]}, {"value": torch.ones(2), "meta": [1]}, "text", {"meta": {}}],
)
def test_a_file_without_a_tensor(value, work, tmp_path):
    dump(tmp_path, hidden())
    torch.save(value, where(tmp_path)[0])
    refused(work, tmp_path, "holds no tensor")


@pytest.mark.parametrize("damage", ["empty", "cut", "zip", "flipped"])
def test_a_damaged_file(damage, work, tmp_path):
    dump(tmp_path, hidden())
    path = where(tmp_path)[0]
    data = bytearray(path.read_bytes())
    if damage == "zip":
        with zipfile.ZipFile(path, "w") as out:
            out.writestr("x", "y")
    else:
        if damage == "flipped":
            data[data.index(b"PK", 4) + 1] ^= 0xFF
            del data[len(data) // 2 :]
        path.write_bytes(data[: {"empty": 0, "cut": 300}.get(damage, len(data))])
    refused(work, tmp_path, "is not a file of plain tensors")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "holds nothing that --format sglang-dump reads"),
        ([("unheard", torch.ones(N, WIDTH), {})], "knows none of the 1 names in the dump; among them: unheard"),
        ([hidden(0)], "layers.0.hidden holds no number: [0, 8] is what is left of step=0___rank=0"),
        ([hidden(), hidden(0, layer=1)], "layers.1.hidden holds no number: [0, 8] is what is left of"),
        ([hidden(), ("topk", torch.ones(N, 0, dtype=torch.int32), {"layer_id": 2})], "layers.2.topk holds no number"),
        ([("positions", torch.full((N,), -1), {}), hidden()], "positions fall at row 1 of step 0"),
        ([hidden(N + 1)], "layers.0.hidden holds position 12; the prompt has 12 tokens"),
        ([hidden(layer=3)], "the source has a layer 3 for layers.{layer}.hidden; the model has layers 0 to 2"),
        ([("hidden", torch.ones(N, WIDTH), {})], "needs a layer, and neither the name nor a tag"),
        ([("hidden", torch.ones(N, 4), {"layer_id": 0})], "hidden_size is 8; is it a shard of several?"),
        ([("hidden", torch.ones(N), {"layer_id": 0})], "has rows of [], hidden_size is 8"),
        ([("hidden", torch.tensor(1.0), {"layer_id": 0})], "is a single number"),
        ([("hidden", torch.ones(N, WIDTH, dtype=torch.uint8), {"layer_id": 0})], "name its dtype or its packed layout"),
        ([("hidden", torch.ones(N, WIDTH) * 1j, {"layer_id": 0})], "that is no plain array"),
        ([("hidden", torch.ones(N, WIDTH).to_sparse(), {"layer_id": 0})], "that is no plain array"),
        ([("hidden", torch.ones(1).expand(1 << 20, 1 << 20), {"layer_id": 0})], "claims 4398046511104 bytes and"),
        ([("topk", torch.ones(N, 2), {"layer_id": 0})], "holds float32, not ids from -1 up"),
        ([hidden(), hidden()], "is a second tensor of rank 0; was it dumped twice?"),
        ([("positions", torch.arange(5), {}), hidden()], "has 12 rows, and there are 5 positions"),
        ([("positions", torch.ones(N), {}), hidden()], "not one whole number per row"),
        ([("positions", torch.tensor([*range(8), *range(4)]), {}), hidden()], "positions fall at row 8 of step 0"),
        ([("positions", torch.arange(N) - 1, {}), hidden()], None),
        ([("input_ids", torch.arange(N) + 1, {}), hidden()], "the prompts differ: position 0 is 1 in the dump, 0 in"),
        ([("input_ids", torch.arange(N + 1), {}), hidden()], "a token at position 12; the prompt has 12 tokens"),
    ],
)  # fmt: skip
def test_dumps_that_do_not_fit(rows, says, work, tmp_path):
    if rows:
        dump(tmp_path, *rows)
    if says is None:
        # Rows at position -1 are empty slots.
        assert work()[0] == 0 and TraceReader(tmp_path / "t.h5").state(0, "layers.0.hidden").positions[0] == 0
    else:
        refused(work, tmp_path, says)


def test_files_of_another_making(work, tmp_path):
    torch.save(torch.ones(1), tmp_path / "dump" / "x.pt")
    refused(work, tmp_path, "x.pt is no file of SGLang's dumper")
    where(tmp_path)[0].rename(tmp_path / "dump" / "step=x___name=hidden.pt")
    refused(work, tmp_path, "step is 'x', not a number")
    where(tmp_path)[0].unlink()
    dump(tmp_path, hidden())
    where(tmp_path)[0].rename(tmp_path / "dump" / "step=0___rank=0___name=hidden___layer_id=1___step=2.pt")
    refused(work, tmp_path, "was renamed: its step is '0'")


def test_without_a_prompt_the_dump_must_hold_every_token(work, tmp_path):
    dump(tmp_path, hidden())
    refused(work, tmp_path, "does not hold the token of every position", prompt=False)
    where(tmp_path)[0].unlink()
    dump(tmp_path, ("input_ids", torch.arange(N), {}), hidden())
    assert work(prompt=False)[0] == 0 and TraceReader(tmp_path / "t.h5").tokens.ids.tolist() == list(range(N))


def npy(path, shape, data=b""):
    header = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data)


def test_folders_of_broken_files(work, tmp_path):
    points = [{"from": "h.{layer}", "to": "layers.{layer}.hidden"}]
    names = tmp_path / "map.json"
    names.write_text(json.dumps({"points": points}))
    file = tmp_path / "dump" / "h.0.npy"
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    refused(work, tmp_path, "is no plain .npy array", fmt="folder", names=names)
    npy(file, (1 << 40, 1 << 10))
    refused(work, tmp_path, "is no plain .npy array", fmt="folder", names=names)
    file.write_bytes(b"")
    refused(work, tmp_path, "is no plain .npy array", fmt="folder", names=names)
    np.save(file, np.array(["a"]))
    refused(work, tmp_path, "which a trace cannot hold", fmt="folder", names=names)
    np.save(file, np.ones((N, WIDTH), ">f4"))
    assert work(fmt="folder", names=names)[0] == 0
    (tmp_path / "t.h5").unlink()
    save_file({"h.0": torch.ones(N, WIDTH)}, tmp_path / "dump" / "x.safetensors")
    refused(work, tmp_path, "h.0 is in h.0.npy and in x.safetensors; which one", fmt="folder", names=names)
    file.unlink()
    whole = (tmp_path / "dump" / "x.safetensors").read_bytes()
    for bad in (b"", whole[:20], whole[:-4], struct.pack("<Q", 1 << 50) + whole[8:]):
        (tmp_path / "dump" / "x.safetensors").write_bytes(bad)
        refused(work, tmp_path, "is no safetensors file", fmt="folder", names=names)
    refused(work, tmp_path, "no tmp to import", source="tmp", fmt="folder", names=names)


def test_two_requests_of_vllm_are_not_one(work, tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / "dump" / f"{name}.safetensors")
    names = tmp_path / "map.json"
    names.write_text('{"layers": [1]}')
    refused(work, tmp_path, "holds 2 safetensors files; give the one", fmt="vllm-hidden", names=names)
    one = tmp_path / "dump" / "a.safetensors"
    refused(
        work, tmp_path, "has no hidden_states and token_ids; it holds x", source=one, fmt="vllm-hidden", names=names
    )
    refused(work, tmp_path, "give a map with layers", source=one, fmt="vllm-hidden")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not an object with a list 'points'"),
        ("{}", "names no points"),
        ('{"point": []}', "did you mean 'points'"),
        ('{"layers": [1, 1]}', "layers is not a list of different layer ids"),
        ('{"points": [1]}', "point 0 is not an object"),
        ('{"points": [{"from": "a", "to": "layers.{layer}.hiden"}]}', "did you mean 'layers.{layer}.hidden'"),
        ('{"points": [{"from": "a", "to": "layers.0.hidden"}]}', "unknown hook point 'layers.0.hidden'"),
        ('{"points": [{"from": "a", "to": "embed", "pack": "main"}]}', "did you mean 'packed'"),
        ('{"points": [{"from": "a", "to": "embed", "packed": "mian"}]}', "did you mean 'main'"),
        ('{"points": [{"from": "a", "to": "embed", "page": 4}]}', "page is for packed rows"),
        ('{"points": [{"from": "a", "to": "embed", "packed": "main", "page": 0}]}', "page is 0"),
        ('{"points": [{"from": "a", "to": "embed", "dtype": "bf16"}]}', "unknown dtype 'bf16'"),
        ('{"points": [{"to": "embed"}]}', "needs either from or sum"),
        ('{"points": [{"from": ["a", 1], "to": "embed"}]}', "from is not a name or a list of names"),
        ('{"points": [{"from": "{layer}{layer}", "to": "embed"}]}', "has a field twice"),
    ],
)
def test_maps_that_cannot_be_used(text, says, tmp_path):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UsageError) as raised:
        load_map(str(tmp_path / "m.json"))
    assert says in str(raised.value)


def test_shipped_maps_can_be_read_and_others_are_named(tmp_path):
    assert set(shipped()) == {"huggingface", "v41"} and all(load_map(name).points for name in shipped())
    with pytest.raises(UsageError, match="did you mean 'v41'"):
        load_map("v40")


@pytest.mark.parametrize("missing", WHO[::2])
def test_the_engine_its_version_and_its_commit_are_required(missing, work, tmp_path, capsys):
    dump(tmp_path, hidden())
    at = WHO.index(missing)
    words = ["import", str(tmp_path / "dump"), "--format", "sglang-dump", "--map", "v41", "-m", "mini"]
    rest = ["-o", str(tmp_path / "t.h5")]
    assert cli.main([*words, *WHO[:at], *WHO[at + 2 :], *rest]) == 2
    assert f"required: {missing}" in capsys.readouterr().err
    assert cli.main([*words, *WHO[:at], missing, " ", *WHO[at + 2 :], *rest]) == 2
    assert f"{missing} is empty" in capsys.readouterr().err
    assert not list(tmp_path.glob("t.h5*"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--arm", "hit"], "arm hit needs --cut"),
        (["--cut", "4"], "arm full has no --cut"),
        (["--arm", "encoder", "--cut", "4"], "arm encoder is one of a V4.1 config"),
        (["--arm", "hit", "--cut", "4", "--replay", "2"], "arm hit has no --replay"),
        (["--semantics", "papr"], "did you mean 'paper'"),
        (["--format", "sglang"], "did you mean 'sglang-dump'"),
        (["--steps", "3:2"], "--steps '2' must be a whole number of at least 4"),
        (["--against", "none.h5"], "give either --model with --prompt, or --against"),
    ],
)
def test_options_that_do_not_go_together(more, says, work, tmp_path):
    dump(tmp_path, hidden())
    code, _, err = work(*more)
    assert code == 2 and says in err and not list(tmp_path.glob("t.h5*")), err


def test_the_dumpers_own_positions_are_used_with_any_map(work, tmp_path):
    dump(tmp_path, ("positions", torch.arange(5, 9), {}), ("non_intrusive__model.layers.1", torch.ones(4, WIDTH), {}))
    assert work(names="huggingface")[0] == 0
    assert TraceReader(tmp_path / "t.h5").state(0, "layers.1.hidden").positions.tolist() == [5, 6, 7, 8]


def test_steps():
    assert (steps("3"), steps("3:5"), steps("3:")) == ((3, 4), (3, 5), (3, None))


# --- packed slots -------------------------------------------------------------------------------------------------


def packed_dump(tmp_path, shuffle=True):
    """A window of 8 rows in two pages of a pool, its slots in disorder, one slot empty; 6 index keys in rows."""
    data, scales = pack(drawn("window"), "window")
    order = np.array([3, 0, 7, 1, 6, 2, 5, 4]) if shuffle else np.arange(8)
    page = np.concatenate([data[:8][order].reshape(2, -1), scales[:8][order].reshape(2, -1)], 1)
    tags = torch.tensor([row + 4 for row in order])
    tags[0] = -1
    index = np.concatenate(pack(drawn("index")[:6], "index"), 1)
    dump(
        tmp_path, ("window_pages", torch.tensor(page), {"layer_id": 1}), ("tags", tags, {}),
        ("index_packed", torch.tensor(index), {"layer_id": 1}),
    )  # fmt: skip
    points = [
        {"from": "window_pages", "to": "layers.{layer}.window_kv", "packed": "window", "page": 4, "positions": "tags"},
        {"from": "index_packed", "to": "layers.{layer}.index_k", "packed": "index"},
    ]
    (tmp_path / "map.json").write_text(json.dumps({"points": points}))
    return tmp_path / "map.json"


def test_packed_slots_of_a_pool_become_rows_by_position(work, tmp_path):
    code, _, err = work(names=packed_dump(tmp_path))
    assert code == 0, err
    trace = TraceReader(tmp_path / "t.h5")
    window, index = trace.state(0, "layers.1.window_kv"), trace.state(0, "layers.1.index_k")
    assert window.positions.tolist() == [4, 5, 6, 8, 9, 10, 11]  # slot 0 held row 3, and is empty
    want = ROUND["window"](drawn("window")).numpy()
    assert np.array_equal(window.values, want[[0, 1, 2, 4, 5, 6, 7]])
    assert index.positions.tolist() == list(range(6))
    assert np.array_equal(index.values, ROUND["index"](drawn("index")[:6]).numpy())


def test_slots_say_where_each_row_lies(work, tmp_path):
    rows = np.concatenate(pack(drawn("main"), "main"), 1)
    slots = torch.tensor([5, 2, 9])
    dump(tmp_path, ("pool", torch.tensor(rows), {"layer_id": 0}), ("slots.0", slots, {}))
    points = [
        {"from": "pool", "to": "layers.{layer}.global_kv", "packed": "main", "slots": "slots.{layer}", "first": 2}
    ]
    names = tmp_path / "map.json"
    names.write_text(json.dumps({"points": points}))
    assert work(names=names)[0] == 0
    state = TraceReader(tmp_path / "t.h5").state(0, "layers.0.global_kv")
    assert state.positions.tolist() == [2, 3, 4]
    assert np.array_equal(state.values, ROUND["main"](drawn("main")).numpy()[[5, 2, 9]])
    (tmp_path / "t.h5").unlink()
    for path in where(tmp_path):
        path.unlink()
    dump(tmp_path, ("pool", torch.tensor(rows[:9]), {"layer_id": 0}), ("slots.0", slots, {}))
    refused(work, tmp_path, "has 9 slots, and slots.{layer} asks for 9", names=names)


def test_a_point_of_entries_may_be_empty_only_where_none_is_complete(work, tmp_path):
    """One token of a model whose layer 2 makes an entry of two rows, and layer 6 of one."""
    (tmp_path / "model" / "config.json").write_text((ROOT / "model" / "mini.json").read_text())
    one = ("-p", "ids:1")
    state, none = ("hidden", torch.ones(1, 128), {"layer_id": 0}), torch.ones(0, 32)
    dump(tmp_path, state, ("global_kv", none, {"layer_id": 2}))
    code, _, err = work(*one, prompt=False)
    assert code == 0 and TraceReader(tmp_path / "t.h5").state(0, "layers.2.global_kv").values.shape == (0, 32), err
    (tmp_path / "t.h5").unlink()
    for path in where(tmp_path):
        path.unlink()
    dump(tmp_path, ("global_kv", none, {"layer_id": 2}))
    code, _, err = work(*one, prompt=False)
    assert code == 2 and "layers.2.global_kv holds no number" in err and not list(tmp_path.glob("t.h5*"))
    dump(tmp_path, state, ("global_kv", none, {"layer_id": 6}))
    code, _, err = work(*one, prompt=False)
    assert code == 2 and "layers.6.global_kv holds no number" in err and not list(tmp_path.glob("t.h5*"))
