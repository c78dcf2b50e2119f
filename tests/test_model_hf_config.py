"""Which Hugging Face configs are mapped, and how; the others are refused with the reason, before a weight is read."""

import dataclasses

import numpy as np
import pytest
import transformers

from replayscope.inspector.exact import exact_rows
from replayscope.inspector.semantics import Shape, arm_names, exact_replay, request, unsuited
from replayscope.model.hf_config import GLOBAL, WINDOW, HFConfig, UnmappedError, is_hf, map_config
from replayscope.model.hf_families import FAMILIES

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_mapped_by_their_config(family):
    tried = FAMILIES[family]
    config = map_config(getattr(transformers, tried.config)(**tried.arguments))
    assert config.sliding_window == 8 and WINDOW in config.layer_types
    assert config.num_hidden_layers == (tried.arguments.get("text_config") or tried.arguments)["num_hidden_layers"]


def test_layers_are_inferred_where_the_config_names_none():
    pure = map_config(transformers.MistralConfig(**SMALL, sliding_window=16))
    assert pure.layer_types == (WINDOW,) * 4 and pure.sliding_window == 16 and not any(pure.compress_ratios)


def test_a_window_that_counts_only_what_lies_before_the_query_is_one_longer():
    """MiMo's own key counts the tokens before the query; transformers adds the query, and W here is with it."""
    given = FAMILIES["mimo-v2-flash"].arguments
    assert map_config(transformers.MiMoV2FlashConfig(**given | {"sliding_window_size": 7})).sliding_window == 8


REFUSED = {
    "no window": (lambda: transformers.LlamaConfig(**SMALL), "no sliding-window layer"),
    "window off": (lambda: transformers.MistralConfig(**SMALL, sliding_window=None), "no sliding-window layer"),
    "state space": (lambda: transformers.MambaConfig(num_hidden_layers=2), "recurrent layers"),
    "recurrent": (lambda: transformers.RecurrentGemmaConfig(num_hidden_layers=3), "recurrent layers"),
    "hybrid": (lambda: transformers.Qwen3NextConfig(), "recurrent layers"),
    "compressors": (lambda: transformers.DeepseekV4Config(), "compressors"),
    "chunks": (lambda: transformers.Llama4TextConfig(**SMALL), "chunked attention"),
    "encoder-decoder": (lambda: transformers.T5Config(), "encoder-decoder"),
    "both ways": (lambda: transformers.Gemma3TextConfig(use_bidirectional_attention=True), "both directions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_with_the_reason(case):
    make, reason = REFUSED[case]
    with pytest.raises(UnmappedError, match=reason) as refused:
        map_config(make())
    assert "\n" not in str(refused.value)


def test_shared_layers_read_the_last_layer_of_their_kind_that_keeps_its_own():
    tried = FAMILIES["gemma-4"]
    config = map_config(transformers.Gemma4TextConfig(**tried.arguments))
    assert config.sources == (0, 1, 2, 3, 2, 3)
    assert [config.window_source(l) for l in config.layers] == [0, None, 2, None, 2, None]
    assert config.kv_source_layer_ids == (1, 3)
    assert [config.has("window_kv", l) for l in config.layers] == [True, False, True, False, False, False]


def schedule(text: str, window: int = 4, sources: tuple[int, ...] | None = None) -> HFConfig:
    """w and g are a window and a global layer."""
    types = tuple(WINDOW if c == "w" else GLOBAL for c in text)
    return HFConfig("test", types, sources or tuple(range(len(text))), window, 10, 8, 100)


@pytest.mark.parametrize(
    ("layers", "sources"),
    [("wwww", None), ("wgwg", None), ("gwgw", None), ("ggw", None), ("wgwgwg", (0, 1, 2, 3, 2, 3))],
)
@pytest.mark.parametrize("cut", [3, 4, 5, 17, 30])
def test_exact_replay_is_exactly_long_enough(layers, sources, cut):
    """One row less and the last row before the cut is no longer owed, wherever the replay does not begin at 0."""
    config = schedule(layers, sources=sources)
    shape = Shape(config, 40)
    enters, leaves = exact_rows(config, request(shape, "exact", cut))
    first = max(0, cut - exact_replay(config))
    assert leaves[-1][cut - 1 - first :].all()
    windows = [l for l in config.layers if config.window_source(l) == l]
    assert all(enters[l][max(cut - config.sliding_window, 0) - first : cut - first].all() for l in windows)
    shorter = exact_replay(config) - 1
    if cut > shorter and shorter:
        _, less = exact_rows(config, request(shape, "encoder", cut, shorter))
        assert not less[-1][shorter - 1]


def test_a_global_layer_spreads_what_the_suffix_got_wrong():
    """Rows from the cut on write entries; once one of them is off, no later row of a global layer is exact."""
    config = schedule("wgwgw")
    _, leaves = exact_rows(config, request(Shape(config, 40), "encoder", 20, 4))
    reach = [np.flatnonzero(row) for row in leaves]
    # Layer 0 loses 3 rows; the global layer 1 none, since the rows below the cut read clean entries.
    assert reach[0][0] == reach[1][0] == 3
    # Layer 2 loses 3 more, two of them behind the cut; so global layer 3 is exact nowhere behind its first wrong entry.
    assert reach[2][0] == 6 and not leaves[3][4:].any()


def test_arms_that_a_model_cannot_have_are_named():
    pure, mixed = schedule("ww"), schedule("wg")
    assert unsuited(pure, "broken:overwrite") and not unsuited(mixed, "broken:overwrite")
    assert all(unsuited(mixed, arm) for arm in arm_names() if "frozen:" in arm or arm.endswith(("decoder", "both")))


def test_names_that_mean_a_hugging_face_model(tmp_path):
    assert is_hf("openai/gpt-oss-20b") and not is_hf("mini") and not is_hf("a model") and not is_hf(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    assert is_hf(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    assert not is_hf(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert not is_hf(str(tmp_path))


def test_a_window_below_one_is_no_window():
    with pytest.raises(UnmappedError, match="at least 1"):
        dataclasses.replace(schedule("wg"), sliding_window=0)
