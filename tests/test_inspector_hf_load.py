"""From the command line to a Hugging Face model: its prompt, what it does not take, and what goes wrong on the way."""

import json
import shutil
import socket
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import replayscope.inspector
import replayscope.inspector.hf_load
from replayscope.model import hf as loader
from replayscope.model.hf_places import placement
from replayscope.traces.reader import TraceReader
from tests import hf

TEMPLATE = "{{ bos_token }}user : {{ messages[0]['content'] }} {% if add_generation_prompt %}<eos>{% endif %}"
CHEAP = ("--arms", "full,hit", "--cuts", "3", "--dtype", "fp64")


@pytest.fixture
def talking(tmp_path):
    """A tiny model with a tokenizer and a chat template."""
    target = tmp_path / "talking"
    loader_folder = hf.folder("mistral")
    target.mkdir()
    for file in loader_folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    hf.tokenizer(target, TEMPLATE)
    return target


def tokens(path):
    found = TraceReader(path).tokens
    return found.ids.tolist(), found.texts


def test_text_goes_through_the_models_own_tokenizer(talking, tmp_path, capsys):
    out = tmp_path / "t.h5"
    code, _, err = hf.run(capsys, "record", "-m", talking, "-p", "the cat sat the mat", *CHEAP, "-o", out)
    assert code == 0, err
    assert tokens(out) == ([1, 6, 7, 8, 6, 9], ["<bos>", "the", "cat", "sat", "the", "mat"])


def test_chat_puts_it_into_the_template(talking, tmp_path, capsys):
    out = tmp_path / "t.h5"
    code, _, err = hf.run(capsys, "record", "-m", talking, "-p", "the cat", "--chat", *CHEAP, "-o", out)
    assert code == 0, err
    # One <bos>: the template writes it, the tokenizer adds no second.
    assert tokens(out)[0] == [1, 4, 5, 6, 7, 2]


def test_ids_are_always_possible_and_texts_stand_beside_them(talking, tmp_path, capsys):
    with_texts, without = tmp_path / "a.h5", tmp_path / "b.h5"
    prompt = "ids:6,7,8,9,6"
    for model, out in ((talking, with_texts), (hf.folder("mistral"), without)):
        assert hf.run(capsys, "record", "-m", model, "-p", prompt, *CHEAP, "-o", out)[0] == 0
    assert tokens(with_texts) == ([6, 7, 8, 9, 6], ["the", "cat", "sat", "mat", "the"])
    assert tokens(without) == ([6, 7, 8, 9, 6], ["6", "7", "8", "9", "6"])


def refused(capsys, *words: object) -> str:
    code, out, err = hf.run(capsys, "record", *map(str, words))
    assert code == 2 and out == "" and err.startswith("replayscope: ") and err.count("\n") == 1, err
    return err


def test_what_is_refused_is_refused_in_one_line(talking, tmp_path, capsys):
    plain, out = hf.folder("mistral"), tmp_path / "t.h5"
    ends = ("-o", out)
    assert "without a tokenizer" in refused(capsys, "-m", plain, "-p", "the cat", *CHEAP, *ends)
    assert "--chat needs the prompt as text" in refused(capsys, "-m", talking, "-p", "ids:6,7", "--chat", *CHEAP, *ends)
    (talking / "chat_template.jinja").unlink()
    assert "no chat template" in refused(capsys, "-m", talking, "-p", "the cat", "--chat", *CHEAP, *ends)
    assert "outside the vocabulary" in refused(capsys, "-m", plain, "-p", "ids:6,97", *CHEAP, *ends)
    assert "takes 256" in refused(capsys, "-m", plain, "-p", "ids:" + ",".join(["5"] * 257), *CHEAP, *ends)
    assert "is for Hugging Face models" in refused(capsys, "-m", "mini", "--chat", *ends)
    for option in (
        ("--topk", "dense"),
        ("--experts", "frozen"),
        ("--reproducible",),
    ):
        err = refused(capsys, "-m", plain, "-p", hf.PROMPT, *CHEAP, *option, *ends)
        assert f"{option[0]} is not for a Hugging Face model" in err
    for arms in ("frozen:encoder", "decoder", "oracle:both", "broken:overwrite"):
        err = refused(capsys, "-m", plain, "-p", hf.PROMPT, "--arms", arms, "--cuts", "20", "--dtype", "fp64", *ends)
        assert "no arm of this model" in err
    assert not list(tmp_path.glob("*.h5*"))


def test_a_model_that_cannot_be_mapped_is_refused_before_its_weights_are_read(tmp_path, capsys):
    target = hf.edited("gemma-2", tmp_path / "m", layer_types=["full_attention"] * 6)
    err = refused(capsys, "-m", target, "-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5")
    assert "gemma2 has no sliding-window layer: bounded replay would change nothing" in err


def test_a_config_whose_modules_say_otherwise_is_refused():
    """The mapping is held against the windows of the attention modules, so that neither can be wrong alone."""
    module = transformers.AutoModelForCausalLM.from_pretrained(hf.folder("gemma-2"), dtype=torch.float64)
    mapped = hf.model("gemma-2").config
    module.model.layers[2].self_attn.sliding_window = 9
    with pytest.raises(ValueError, match="layer 2 is mapped as window, but its attention has sliding_window 9"):
        loader.placed(module, mapped, torch.float64)


@pytest.fixture
def offline(monkeypatch):
    """No connection can be made."""

    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_local_folder_needs_no_network(offline, talking, tmp_path, capsys):
    out = tmp_path / "t.h5"
    assert hf.run(capsys, "record", "-m", talking, "-p", "the cat sat", *CHEAP[:4], "-o", out)[0] == 0


def test_an_id_that_cannot_be_fetched_gives_one_line(offline, monkeypatch, tmp_path, capsys):
    # Its client tries for minutes to connect unless it is told that there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    err = refused(capsys, "-m", "nobody/no-such-model", "-p", "ids:1,2,3,4,5", *CHEAP, "-o", tmp_path / "t.h5")
    assert "model nobody/no-such-model is no folder here and could not be fetched from the hub" in err


def test_a_folder_without_weights_gives_one_line(tmp_path, capsys):
    target = hf.edited("mistral", tmp_path / "m")
    err = refused(capsys, "-m", target, "-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5")
    assert f"model {target} cannot be loaded" in err


def copied(target, family: str = "mistral", **changes: object):
    """A tiny model with its weights, and keys of its config changed."""
    shutil.copytree(hf.folder(family), target)
    return hf.edited(family, target, **changes)


def resaved(target, change):
    """Pass the tensors of a folder's checkpoint through a function that changes the dict."""
    path = target / "model.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path, metadata={"format": "pt"})


def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path, capsys):
    """Never filled at random, and no layer left out: 9 tensors a layer, 3 besides, of 4 layers."""
    ends = ("-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5")
    for name, key, value, says in (
        ("deeper", "num_hidden_layers", 6, "lacks 18 tensors (model.layers.4.input_layernorm.weight, "),
        ("flatter", "num_hidden_layers", 3, "has more layers: 9 tensors (model.layers.3.input_layernorm.weight, "),
        ("wider", "intermediate_size", 40, "has 12 tensors (model.layers.0.mlp.down_proj.weight, "),
    ):
        err = refused(capsys, "-m", hf.edited("mistral", copied(tmp_path / name), **{key: value}), *ends)
        assert f"model {tmp_path / name} does not fit its config: the checkpoint {says}" in err
        assert err.count("model.layers.") == 3
    headless = copied(tmp_path / "headless")
    resaved(headless, lambda held: held.pop("lm_head.weight"))
    assert "lacks 1 tensor (lm_head.weight);" in refused(capsys, "-m", headless, *ends)
    assert not list(tmp_path.glob("*.h5*"))


def test_tied_weights_and_layers_that_predict_further_tokens_are_no_fault(tmp_path):
    """A checkpoint without the head of a tied model is whole, and so is one with a layer behind those that run."""
    cpu = [torch.device("cpu")]
    tied = copied(tmp_path / "tied", tie_word_embeddings=True)
    resaved(tied, lambda held: held.pop("lm_head.weight"))
    model = loader.load(str(tied), torch.float64, cpu)[0].module
    assert model.lm_head.weight is model.model.embed_tokens.weight
    further = copied(tmp_path / "further", num_hidden_layers=3, num_nextn_predict_layers=1)
    assert loader.load(str(further), torch.float64, cpu)[0].config.num_hidden_layers == 3


def test_other_tensors_that_are_not_used_give_a_warning(tmp_path, capsys):
    target, out = copied(tmp_path / "m"), tmp_path / "t.h5"
    # A tower's layer may have a number that the decoder's have not.
    resaved(target, lambda held: held.update({"tower.layers.7.self_attn.q_proj.weight": torch.zeros(2)}))
    code, _, err = hf.run(capsys, "record", "-m", target, "-p", hf.PROMPT, *CHEAP, "-o", out)
    assert code == 0 and "not used of its checkpoint: 1 tensor (tower.layers.7.self_attn.q_proj.weight)" in err


BROKEN = {
    "wrong type": ({"hidden_size": "abc"}, "'hidden_size' expected int, got str"),
    "no RoPE": ({"rope_parameters": 5}, "Validation error for field 'rope_parameters': "),
    "no heads": ({"num_key_value_heads": 0}, "division or modulo by zero"),
    "no layers": ({"num_hidden_layers": 0}, "mistral has num_hidden_layers 0; it must be at least 1"),
    "no words": ({"vocab_size": 0}, "cannot be loaded: "),
    "activation": ({"hidden_act": "zzz"}, "KeyError 'zzz'"),
    "unknown layers": ({"layer_types": ["foo"] * 6}, "ValueError: The `layer_types` entries must be in"),
    "too few layer types": ({"layer_types": ["sliding_attention"] * 4}, "must be equal to the number of `layer_types`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_config_gives_one_line(case, tmp_path, capsys):
    changes, says = BROKEN[case]
    # A mistral's config knows no layer types.
    family = "ministral" if "layer_types" in changes else "mistral"
    target = hf.edited(family, copied(tmp_path / "m", family), **changes)
    err = refused(capsys, "-m", target, "-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5")
    assert f"model {target}" in err and says in err and "internal error" not in err
    assert len(err) < len(str(target)) + 260


@pytest.mark.parametrize(
    ("file", "held"),
    [("model.safetensors", b""), ("model.safetensors", b"zzzz" * 99), ("model.safetensors.index.json", b"{}"),
     ("model.safetensors.index.json", b"{"), ("config.json", b'{"model_type": "mistral",')],
)  # fmt: skip
def test_a_broken_file_gives_one_line(file, held, tmp_path, capsys):
    target = copied(tmp_path / "m")
    if file.endswith("index.json"):
        (target / "model.safetensors").unlink()
    (target / file).write_bytes(held)
    err = refused(capsys, "-m", target, "-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5")
    assert str(target) in err and "internal error" not in err
    assert file == "config.json" or f"model {target} cannot be loaded: " in err
    words = ("-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5", "--debug")
    code, _, told = hf.run(capsys, "record", "-m", target, *words)
    assert code == 2 and told.startswith("Traceback") and told.endswith(err)
    assert "direct cause of the following exception" in told, "--debug shows where it broke"


def test_several_devices_are_cuda_devices(tmp_path, capsys):
    words = ("-p", hf.PROMPT, *CHEAP, "--devices", "cpu,cpu", "-o", tmp_path / "t.h5")
    err = refused(capsys, "-m", hf.folder("mistral"), *words)
    assert "--devices cpu,cpu: a Hugging Face model is spread over CUDA devices only" in err


def test_without_the_extra_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.delitem(sys.modules, "replayscope.inspector.hf_load")
    monkeypatch.delattr(replayscope.inspector, "hf_load")
    monkeypatch.delitem(sys.modules, "replayscope.inspector.hf_executor")
    monkeypatch.setitem(sys.modules, "replayscope.model.hf", None)
    err = refused(capsys, "-m", hf.folder("mistral"), "-p", hf.PROMPT, *CHEAP, "-o", tmp_path / "t.h5")
    assert "pip install 'replayscope[hf]'" in err


def test_devices_and_bits_are_handed_to_transformers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (1000 + d.index, 2000))
    cpu, gpus = [torch.device("cpu")], [torch.device("cuda:0"), torch.device("cuda:1")]
    assert placement(cpu, None) == {}
    assert placement(gpus[:1], None) == {"device_map": {"": gpus[0]}}
    assert placement(gpus, None) == {"device_map": "balanced", "max_memory": {0: 1000, 1: 1001}}
    assert placement(cpu, "4bit")["quantization_config"].load_in_4bit
    assert placement(gpus, "8bit")["quantization_config"].load_in_8bit


def test_record_keeps_states_under_their_names(tmp_path, capsys):
    """Every hook point of every layer, with the shapes that are promised, window and global told apart."""
    out = tmp_path / "t.h5"
    words = ("-m", hf.folder("gpt-oss"), "-p", hf.PROMPT, "--arms", "full,encoder,oracle:encoder", "--cuts", "20")
    code, _, err = hf.run(capsys, "record", *words, "--hooks", "*", "--dtype", "fp64", "-o", out)
    assert code == 0, err
    trace = TraceReader(out)
    stored = {name for run, name in trace.states() if run == 1}
    roles = trace.config["replayscope"]["layers"]
    assert roles == ["window", "global"] * 3
    for l, role in enumerate(roles):
        kept = {name.rsplit(".", 1)[1] for name in stored if name.startswith(f"layers.{l}.")}
        assert kept == {"attn_in", f"{role}_kv", "attn_out", "router", "ffn_out", "hidden"}
    assert {"embed", "final", "logits"} <= stored
    window, entries = trace.state(1, "layers.0.window_kv"), trace.state(1, "layers.1.global_kv")
    # Rows from s on; entries from the cut on. Two heads of eight numbers, keys beside values.
    assert window.positions.tolist() == list(range(12, 40)) and window.values.shape == (28, 2, 16)
    assert entries.positions.tolist() == list(range(20, 40))
    assert trace.state(1, "layers.3.router").values.shape == (28, 2)
    oracle = next(r.index for r in trace.runs if r.arm == "oracle:encoder")
    for name in stored - {name for name in stored if name.endswith("global_kv")}:
        ours, theirs = trace.state(1, name), trace.state(oracle, name)
        assert (ours.positions == theirs.positions).all() and abs(ours.values - theirs.values).max() < 1e-12
    assert hf.run(capsys, "compare", out, out, "--tol", "*=rel_l2<=0")[0] == 0
    assert json.loads(json.dumps(trace.config))["model_type"] == "gpt_oss"
    assert trace.provenance["versions"]["transformers"] == transformers.__version__


def test_the_other_commands_work_on_such_a_trace(tmp_path, capsys):
    out = tmp_path / "t.h5"
    words = ("-m", hf.folder("ministral"), "-p", hf.PROMPT, "--cuts", "8,9,20", "--dtype", "fp64", "-o", out)
    assert hf.run(capsys, "sweep", *words)[0] == 0
    code, text, _ = hf.run(capsys, "show", out, "--verify")
    assert code == 0 and "ministral" in text and "verified" in text
    assert hf.run(capsys, "plot", out, "--figure", "all", "-o", tmp_path / "f.html")[0] == 0
    assert hf.run(capsys, "report", out, "-o", tmp_path / "r.html")[0] == 0
