"""The ledger of Hugging Face models: sizes by hand, and against the keys and values that the models do write."""

import json

import pytest
import torch
import transformers

from replayscope.inspector import cli
from replayscope.inspector.cache_sizes import cache_of, load_config
from replayscope.inspector.capture import Capture
from replayscope.inspector.exact import exact_rows
from replayscope.inspector.hf_executor import HFExecutor
from replayscope.inspector.ledger import Figure, Inputs, exact_replay, ledger
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import Shape, request
from replayscope.model.hf_config import HFConfig
from replayscope.model.hf_families import FAMILIES
from tests import hf
from tests.test_inspector_ledger import by_key, evaluated


def saved(folder, config) -> str:
    config.save_pretrained(folder)
    return str(folder)


def told(model: str, **inputs) -> dict[str, Figure]:
    return by_key(ledger(load_config(model), Inputs(**inputs)))


def test_gpt_oss_by_hand(tmp_path):
    """18 of 36 layers have a window of 128; 8 KV heads of 64, keys and values of 2 bytes: 2,048 bytes a token."""
    got = told(saved(tmp_path, transformers.GptOssConfig(dtype="bfloat16")), tokens=100_000, contexts=4)
    by_hand = {
        "window_layers": 18,
        "global_layers": 18,
        "shared_layers": 0,
        "entry_1": 2_048,
        "slot": 2_048,
        "global_token": 36_864,
        "window_request": 4_718_592,
        "global_context": 3_686_400_000,
        "window_contexts": 18_874_368,
        "memory": 14_764_474_368,
        "replayed_128": 128,
        "replayed_128_exact": 1,
        "exact_model": 2_287,
        "windows_model": 2_304,
        "pages_256_model": 2_560,
        # Of 100,000 tokens all but the last may be cached; blocks of 128 end at 99,968, pairs at 99,998.
        "again_paper_128": 129,
        "again_vllm-0.33_128": 160,
        "again_sglang-0.5.23_128": 130,
        "again_tokenspeed_128": 160,
    }
    assert {key: got[key].value for key in by_hand} == by_hand
    assert got["global_token"].source == "config" and "open_contexts" not in got and "persistent" not in got


def test_shared_layers_keep_nothing_and_lose_nothing_more(tmp_path):
    """Layers 4 and 5 read the KV of 2 and 3. Two heads; of 8 numbers in window layers, of 16 in global ones; fp64."""
    got = told(str(hf.folder("gemma-4")), tokens=1_000, contexts=1, replay=(8, 15, 16, 100))
    by_hand = {
        "window_layers": 2,
        "global_layers": 2,
        "shared_layers": 2,
        "slot": 256,
        "entry_1": 512,
        "global_token": 1_024,
        "window_request": 2 * 8 * 256,
        "exact_model": 15,
        "replayed_8_exact": 1,
        "replayed_15_exact": 2,
        "replayed_100_share": 10,
        "again_paper_15": 16,
        # 896 is the last block end with a token behind it; a hit of at most R tokens would run cold.
        "again_vllm-0.33_15": 1_000 - 896 + 15,
    }
    assert {key: got[key].value for key in by_hand} == by_hand


def test_a_dtype_that_the_config_does_not_say_is_assumed_and_said(tmp_path):
    got = told(saved(tmp_path, transformers.Gemma2Config()))
    assert got["slot"].formula == "2·4·(256 + 256)" and "2 bytes a number assumed" in got["slot"].source


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sizes_are_those_of_the_keys_and_values_that_the_model_writes(family):
    model = hf.model(family)
    executor, points = HFExecutor(model), frozenset(("window_kv", "global_kv"))
    names = [f"layers.{l}.{p}" for l in model.config.layers for p in points if model.config.has(p, l)]
    with Capture(executor, names) as kept:
        for _ in executor.run(Plan((request(Shape(model.config, hf.N), "full"),)), {"prompt": hf.IDS}, points):
            pass
    written = {"window_kv": 0, "global_kv": 0}
    for (_, name), state in kept.states.items():
        written[name.rsplit(".", 1)[1]] += state.values[0].numel() * torch.float64.itemsize
    config = load_config(str(hf.folder(family)))
    cache = cache_of(config)
    assert cache.per_token == written["global_kv"]
    assert cache.window_bytes == written["window_kv"] * config.sliding_window > 0


@pytest.mark.parametrize("family", ["gemma-4", "gemma-3"])
def test_layers_with_an_exact_window_are_those_of_the_exact_region(family):
    """One row less than `exact` leaves the last window layer's window off, W leave only the first one's right."""
    config = load_config(str(hf.folder(family)))
    assert isinstance(config, HFConfig)
    W, n = config.sliding_window, cache_of(config).layers
    for R in (W, 2 * W, exact_replay(n, W) - 1, exact_replay(n, W)):
        enters, _ = exact_rows(config, request(Shape(config, 200), "encoder", 150, R))
        windows = [enters[l][R - W : R].all() for l in config.layers if config.window_source(l) == l]
        got = told(str(hf.folder(family)), tokens=10**6, contexts=1, replay=(R,))
        assert got[f"replayed_{R}_exact"].value == sum(windows)


def test_formulas_give_their_values_and_sums_their_parts():
    for family in ("gemma-4", "mistral"):
        figures = told(str(hf.folder(family)), tokens=777, contexts=3, replay=(1, 8, 900))
        for figure in figures.values():
            assert float(evaluated(figure.formula)) == pytest.approx(float(figure.value), rel=1e-12), figure
            assert figure.source.startswith(("config", "typed", "published", "assumed")), figure
        got = {key: figure.value for key, figure in figures.items()}
        assert got["memory"] == got["global_contexts"] + got["window_contexts"]
    assert got["global_layers"] == got["global_token"] == 0 and "against_v41-flash" not in got


def test_the_command_takes_a_folder_without_weights_and_refuses_in_one_line(tmp_path, capsys):
    model = saved(tmp_path / "g", transformers.GptOssConfig(dtype="bfloat16"))
    assert cli.main(["ledger", "-m", model, "--replay", "W,exact", "--json"]) == 0
    keys = {figure["key"] for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert {"replayed_128", "replayed_2287", "again_paper_2287"} <= keys and not any("parameters" in k for k in keys)
    for name, config, says in (
        ("llama", transformers.LlamaConfig(), "llama has no sliding-window layer"),
        ("mamba", transformers.MambaConfig(), "recurrent layers"),
    ):
        assert cli.main(["ledger", "-m", saved(tmp_path / name, config)]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
