"""The ledger: published sizes of V4.1-Flash and V4-Flash by hand, formulas that give their values, sums, bad input."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayscope.inspector import cli
from replayscope.inspector.cache_sizes import V4Config, cache_of, load_config, presets, scaled
from replayscope.inspector.ledger import Figure, Inputs, exact_replay, ledger, paged_replay, shown, weight_figures
from replayscope.model.config import ModelConfig
from replayscope.model.shapes import expected_shapes, stored, table_sizes

FIXTURE = Path(__file__).parent / "fixtures" / "v41" / "weights"


def by_key(figures: list[Figure]) -> dict[str, Figure]:
    found = {figure.key: figure for figure in figures}
    assert len(found) == len(figures)
    return found


def values(config, **inputs) -> dict[str, int | Fraction]:
    return {key: figure.value for key, figure in by_key(ledger(config, Inputs(**inputs))).items()}


def evaluated(formula: str) -> Fraction:
    """The formula as a calculator would take it, in exact fractions."""
    text = formula.replace("·", "*").replace("10**9", "1000000000")
    exact = re.sub(r"[0-9.]+", lambda number: f"Fraction('{number[0]}')", text)
    known = {"Fraction": Fraction, "min": min, "max": max, "ceil": math.ceil, "floor": math.floor}
    return Fraction(eval(exact, {"__builtins__": {}, **known}))


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    config = load_config("v41-flash")
    assert isinstance(config, ModelConfig)
    return config


V41 = {
    "main": 288,
    "index": 68,
    "entry_1": 356,
    "entry_2": 356,
    "global_token": 890,
    "slot": 528,
    "window_request": 2_703_360,
    "window_encoder": 1_351_680,
    "window_decoder": 1_351_680,
    "open_request": 12_288,
    "global_context": 890_000_000,
    "global_contexts": 7_120_000_000,
    "replayed_128": 128,
    "replayed_128_contexts": 1024,
    "replayed_128_exact": 1,
    "exact_encoder": 2541,
    "exact_decoder": 2541,
    "exact_decoder_after": 2414,
    "exact_model": 5081,
    "windows_encoder": 2560,
    "windows_model": 5120,
    "pages_64_encoder": 2560,
    "pages_256_encoder": 2816,
    "pages_64_model": 5120,
    "persistent": 8,
    "global_hours": 72,
    "host_share": 10,
}


def test_v41_flash_in_the_published_numbers(flash):
    got = values(flash)
    assert {key: got[key] for key in V41} == V41


def test_v41_flash_weights_agree_with_what_is_published(flash):
    """552 billion in the backbone and 16 active (arXiv 2609.19969); experts of 18.8 MB, Engram rows of 264 bytes."""
    got = values(flash)
    assert round((got["parameters"] - got["parameters_engram"]) / 1e9) == 552
    assert round(got["active"] / 1e9) == 16
    assert table_sizes(flash).keys() == {1, 14}
    assert [sum(table_sizes(flash)[layer]) for layer in (1, 14)] == [384_006_168, 384_016_682]
    shapes = expected_shapes(flash)
    table = "layers.1.engram.embed.weight"
    assert stored(table, shapes[table]).bytes == 264 * 384_006_168
    expert = sum(stored(name, shape).bytes for name, shape in shapes.items() if ".7.ffn.experts.5." in name)
    assert expert == 18_800_640
    assert 500e9 < got["bytes"] < 510e9  # 510 GB with vision and the drafter


def test_v4_flash_from_its_own_config():
    config = load_config("v4-flash")
    assert isinstance(config, V4Config)
    assert [config.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    got = values(config)
    assert (got["main"], got["index"], got["slot"]) == (584, 68, 584)
    assert got["global_token"] == Fraction(21 * 652, 4) + Fraction(20 * 584, 128) == Fraction("3514.25")
    assert got["window_request"] == 43 * 128 * 584
    assert (got["exact_model"], got["windows_model"], got["pages_256_model"]) == (5462, 5504, 5632)
    assert 3.9 < got["against_v41-flash"] < 4.0
    assert "exact_encoder" not in got and "persistent" not in got


@pytest.mark.parametrize("model", ["v41-flash", "v4-flash", "mini"])
@pytest.mark.parametrize("tokens", [1, 1001, 1_000_000])
def test_every_formula_gives_its_value_and_every_figure_its_origin(model, tokens):
    replay = (1, 128, 129, 6000)
    for figure in ledger(load_config(model), Inputs(tokens, 3, replay, given=frozenset({"tokens", "replay"}))):
        assert float(evaluated(figure.formula)) == pytest.approx(float(figure.value), rel=1e-12), figure
        assert figure.source.startswith(("config", "typed", "published", "assumed")), figure
        assert shown(figure)


def test_a_typed_input_says_so(flash):
    typed = Inputs(global_hours=5, host_memory=10**12, given=frozenset({"global_hours", "host_memory"}))
    sources = {key: figure.source for key, figure in by_key(ledger(flash, typed)).items()}
    assert sources["global_hours"] == sources["host_memory"] == "typed"
    assert sources["persistent"] == sources["host_share"] == "published"
    assert sources["window_minutes"].startswith("assumed")


def test_bytes_on_disk_are_those_of_a_checkpoint_in_the_official_layout():
    raw = (FIXTURE / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    config = ModelConfig.load(FIXTURE / "config.json")
    size = 0
    for name, tensor in header.items():
        if name != "__metadata__" and not name.endswith("bias_vl"):  # of image tokens, which the model has not
            size += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    assert by_key(weight_figures(config))["bytes"].value == size


def test_the_presets_load_and_v41_flash_goes_round():
    assert {"mini", "v41-flash", "v4-flash"} <= set(presets())
    config = load_config("v41-flash")
    assert isinstance(config, ModelConfig)
    assert config.activation_fake_quant and config.decoder_start == 20
    assert ModelConfig.from_dict(config.to_dict()) == config


@st.composite
def configs(draw) -> ModelConfig:
    """Small configs with window-only layers, pairs and a ratio-1 half."""
    alone, pairs, ones = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(0, 4))
    ratios = (0,) * alone + (2,) * pairs + (1,) * ones or (0,)
    sources = [alone] * bool(pairs) + [alone + pairs] * bool(ones)
    if pairs > 2:
        sources.insert(1, alone + 2)
    small = load_config("mini")
    assert isinstance(small, ModelConfig)
    return replace(
        small,
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=tuple(sources),
        index_source_layer_ids=tuple(sources),
        candidate_source_layer_id=-1,
        head_dim=draw(st.sampled_from([16, 40, 512])),
        index_head_dim=draw(st.sampled_from([8, 16, 128])),
        sliding_window=draw(st.integers(1, 200)),
        n_routed_experts=draw(st.integers(2, 5)),
    )


@given(configs(), st.integers(1, 10**7), st.integers(1, 1000), st.integers(1, 3000))
def test_figures_are_whole_and_sums_equal_their_parts(config, tokens, contexts, replay):
    figures = by_key(ledger(config, Inputs(tokens, contexts, (replay,))))
    got = {key: figure.value for key, figure in figures.items()}
    assert got["memory"] == got["global_contexts"] + got["window_contexts"] + got["open_contexts"]
    assert got["global_contexts"] == contexts * got["global_context"] <= contexts * tokens * got["global_token"]
    for total in ("parameters", "bytes"):
        assert got[total] == sum(value for key, value in got.items() if key.startswith(f"{total}_"))
    shapes = expected_shapes(config)
    assert got["parameters"] == sum(math.prod(shape) for shape in shapes.values())
    assert got["bytes"] == sum(stored(name, shape).bytes for name, shape in shapes.items())
    if "window_encoder" in got:
        assert got["window_request"] == got["window_encoder"] + got["window_decoder"]
    for figure in figures.values():
        assert float(evaluated(figure.formula)) == pytest.approx(float(figure.value), rel=1e-12), figure


@given(configs(), st.integers(1, 10**6), st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 100))
def test_more_tokens_and_more_contexts_never_take_less(config, tokens, contexts, more_tokens, more_contexts):
    less = values(config, tokens=tokens, contexts=contexts)
    more = values(config, tokens=tokens + more_tokens, contexts=contexts + more_contexts)
    W = config.sliding_window
    for key in ("global_context", "global_contexts", "window_contexts", "memory", "global_held", f"replayed_{W}"):
        assert less[key] <= more[key]
    assert less["global_token"] == more["global_token"] and less["exact_model"] == more["exact_model"]


@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 300))
def test_the_exact_length_is_the_shortest_that_makes_every_window_exact(layers, window, page):
    """By the rule itself: R - l·(W-1) of the replayed rows enter layer l exact, and the last output needs one more."""
    need = window
    for _ in range(layers - 1):
        need += window - 1
    assert exact_replay(layers, window) == need
    assert need <= paged_replay(layers, window, page) and paged_replay(layers, window, page) % page == 0


@given(configs(), st.integers(1, 1500))
def test_layers_with_an_exact_window_are_counted_by_the_same_rule(config, replay):
    W, L = config.sliding_window, config.num_hidden_layers
    got = values(config, tokens=10**6, contexts=1, replay=(replay,))
    counted = sum(replay - l * (W - 1) >= W for l in range(L))
    assert got[f"replayed_{replay}_exact"] == (L if W == 1 else counted)


def test_a_scale_covers_what_is_left_of_a_vector():
    assert (scaled(16, 4, 32).bytes, scaled(40, 4, 16).bytes, scaled(7, 4, 16).bytes) == (9, 23, 5)


def test_without_global_kv_there_is_nothing_to_keep(flash):
    config = replace(
        flash,
        num_hidden_layers=2,
        compress_ratios=(0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
    )
    cache = cache_of(config)
    assert (cache.per_token, cache.global_bytes(1000), cache.open_bytes, cache.encoder) == (0, 0, 0, None)


def test_the_command_prints_every_figure_with_formula_and_origin(capsys):
    assert cli.main("ledger --tokens 1000000 --contexts 8".split()) == 0
    out = capsys.readouterr().out
    for text in ("890 B", "3·356/2 + 356", "890 MB = 848.8 MiB", "7.12 GB", "2,703,360 B", "5,081 tokens", "published"):
        assert text in out
    assert len({line.index("config") for line in out.splitlines() if "  config" in line}) == 1


def test_the_command_as_json_and_what_is_typed(capsys):
    words = "ledger -m v4-flash --tokens 1001 --contexts 2 --replay W,exact --host-memory 1GiB --global-hours 1 --json"
    assert cli.main(words.split()) == 0
    told = json.loads(capsys.readouterr().out)
    got = {figure["key"]: figure for figure in told["figures"]}
    assert told["model"] == "v4-flash"
    assert got["global_token"]["value"] == 3514.25 and got["replayed_128"]["value"] == 128
    assert got["replayed_5462"]["value"] == 1001 and got["replayed_5462_exact"]["value"] == 43
    assert (got["host_memory"]["value"], got["host_memory"]["source"]) == (2**30, "typed")


BAD = {
    "--tokens 0": "--tokens '0' must be a whole number of at least 1",
    "--tokens 99999999999999999999999": "is too large; it may be at most 9223372036854775807",
    "--contexts x": "--contexts 'x'",
    "--host-share 101": "--host-share 101",
    "--replay grid": "replay length 'grid'",
    "--replay 0": "at least 1",
    "-m v41-flahs": "unknown model 'v41-flahs'; did you mean 'v41-flash'?",
    "-m empty": "empty has no config.json",
    "-m torn": "is no config that can be used",
    "-m list": "is no config that can be used",
    "-m partial": "config lacks vocab_size",
    "-m old": "config lacks head_dim",
    "-m wide": "compress_ratios must hold 0, 4 or 128",
}


@pytest.mark.parametrize("typed", BAD)
def test_bad_input_is_one_line_and_exit_2(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    v4 = json.loads(presets()["v4-flash"].read_text(encoding="utf-8"))
    texts = {
        "empty": None,
        "torn": '{"text_config": ',
        "list": "[1]",
        "partial": "{}",
        "old": '{"model_type": "deepseek_v4", "num_hidden_layers": 1}',
        "wide": json.dumps({**v4, "compress_ratios": [3] * 43}),
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
    assert cli.main(["ledger", *typed.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("replayscope: ") and BAD[typed] in told.err and "internal error" not in told.err


def test_the_ledger_imports_no_torch(tmp_path):
    script = (
        "import sys\nfrom replayscope.inspector.cli import main\ncode = main(['ledger'])\n"
        "assert not {'torch', 'plotly', 'gradio'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
