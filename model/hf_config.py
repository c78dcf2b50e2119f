"""A Hugging Face config as a layer schedule: which layers are window, which global, whose KV each reads. No torch."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from replayscope.model.preset_files import presets

WINDOW, GLOBAL = "sliding_attention", "full_attention"
# Layer types that cannot be mapped: why.
_REFUSED = {
    "linear_attention": "recurrent layers, whose state is no KV that a window could rebuild",
    "conv": "convolution layers, whose state is no KV that a window could rebuild",
    "hybrid": "layers with a state-space half, whose state is no KV that a window could rebuild",
    "hybrid_sliding": "layers with a state-space half, whose state is no KV that a window could rebuild",
    "compressed_sparse_attention": "compressors, which are modelled only for DeepSeek-V4.1 checkpoints",
    "heavily_compressed_attention": "compressors, which are modelled only for DeepSeek-V4.1 checkpoints",
    "indexed_attention": "an indexer, which is modelled only for DeepSeek-V4.1 checkpoints",
    "minimax_m3_sparse": "an indexer, which is modelled only for DeepSeek-V4.1 checkpoints",
    "chunked_attention": "chunked attention, whose keys start anew at every chunk: it has no sliding window",
    "window_attention": "windows that do not slide",
    "reference_sliding_attention": "a window that slides over generated tokens only",
}
# Models whose code, and not their config, gives window layers more KV heads: how many times num_key_value_heads.
_MORE_HEADS = {"mimo_v2_flash": 2}
# Keys of configs that have state-space or recurrent layers and name no layer types.
_STATE_SPACE = ("block_types", "layers_block_type", "hybrid_override_pattern", "mamba_d_state", "ssm_state_size",
                "state_size", "attention_window_size")  # fmt: skip


def is_hf(name: str) -> bool:
    """Whether a name means a Hugging Face model: a folder whose config is of another type than ours, or an id."""
    if name in presets():
        return False
    if not Path(name).is_dir():
        return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    try:
        kind = json.loads((Path(name) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(kind, str) and not kind.startswith("deepseek_v41")


class UnmappedError(ValueError):
    """A model on which bounded replay cannot be run, with the reason in one line."""


@dataclass(frozen=True)
class HFConfig:
    """A Geometry. Raises UnmappedError for a schedule without a window layer.

    layer_types[l]: ``sliding_attention`` or ``full_attention``. sources[l]: the layer whose KV layer l reads.
    router_layers: layers with experts; ffn_layers: layers whose feed-forward is a module of its own (None: all).
    kv_sizes[l]: KV heads of layer l, and the numbers of a key and of a value of one head. dtype: of the checkpoint, as
    ``bfloat16``, empty where the config does not say. raw: the whole config as plain JSON.
    """

    model_type: str
    layer_types: tuple[str, ...]
    sources: tuple[int, ...]
    sliding_window: int
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    router_layers: tuple[int, ...] = ()
    ffn_layers: tuple[int, ...] | None = None
    kv_sizes: tuple[tuple[int, int, int], ...] = ()
    dtype: str = ""
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if WINDOW not in self.layer_types:
            raise UnmappedError(f"{self.model_type} has no sliding-window layer: bounded replay would change nothing")
        if self.sliding_window < 1:
            raise UnmappedError(f"{self.model_type} has sliding_window {self.sliding_window}; it must be at least 1")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def layers(self) -> range:
        return range(len(self.layer_types))

    @property
    def compress_ratios(self) -> tuple[int, ...]:
        """1 for a global layer, each of whose tokens is an entry; 0 for a window layer."""
        return tuple(int(kind == GLOBAL) for kind in self.layer_types)

    @property
    def kv_source_layer_ids(self) -> tuple[int, ...]:
        return tuple(l for l in self.layers if self.kv_source(l) == l)

    @property
    def decoder_start(self) -> int:
        """There is no decoder half."""
        return len(self.layer_types)

    @property
    def freezes(self) -> bool:
        """Its experts, where a layer has some."""
        return bool(self.router_layers)

    def first(self, layers: int) -> "HFConfig":
        """The same with its first so many layers only."""
        if layers > self.num_hidden_layers:
            raise UnmappedError(f"it has {self.num_hidden_layers} layers, not {layers}")
        if WINDOW not in self.layer_types[:layers]:
            raise UnmappedError(f"its first sliding-window layer is {self.layer_types.index(WINDOW)}: keep more layers")
        cut = {name: getattr(self, name)[:layers] for name in ("layer_types", "sources", "kv_sizes")}
        return replace(self, **cut)

    def kv_source(self, layer: int) -> int | None:
        return self.sources[layer] if self.layer_types[layer] == GLOBAL else None

    def window_source(self, layer: int) -> int | None:
        return self.sources[layer] if self.layer_types[layer] == WINDOW else None

    def role(self, layer: int) -> str:
        """One word for tables and axes: window or global."""
        return "window" if self.layer_types[layer] == WINDOW else "global"

    def has(self, point: str, layer: int) -> bool:
        if point == "window_kv":
            return self.window_source(layer) == layer
        if point == "global_kv":
            return self.kv_source(layer) == layer
        if point == "router":
            return layer in self.router_layers
        if point == "ffn_out":
            return self.ffn_layers is None or layer in self.ffn_layers
        return point in ("attn_in", "attn_out", "hidden")

    def numbers(self, point: str) -> int:
        experts = self.raw.get("text_config", self.raw).get("num_experts_per_tok") or 8
        kv = max((heads * (dk + dv) for heads, dk, dv in self.kv_sizes), default=0)
        sizes = {"window_kv": kv, "global_kv": kv, "router": experts, "logits": self.vocab_size}
        return sizes.get(point, self.hidden_size)

    def to_dict(self) -> dict[str, Any]:
        roles = [self.role(l) for l in self.layers]
        return {
            **self.raw,
            "replayscope": {"layers": roles, "kv_sources": list(self.sources), "window": self.sliding_window},
        }


def map_config(config: Any) -> HFConfig:
    """The schedule of a transformers config. Raises UnmappedError with the reason where there is none."""
    text = config.get_text_config(decoder=True)
    name = str(getattr(config, "model_type", "") or type(config).__name__)
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        raise UnmappedError(
            f"config.json says model_type {name!r}, but has no num_hidden_layers where such a model has it"
        )
    if text.num_hidden_layers < 1:
        raise UnmappedError(f"{name} has num_hidden_layers {text.num_hidden_layers}; it must be at least 1")
    if getattr(config, "is_encoder_decoder", False):
        raise UnmappedError(f"{name} is an encoder-decoder: only decoders are mapped")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or not getattr(text, "is_causal", True):
        raise UnmappedError(f"{name} attends in both directions: only causal decoders are mapped")
    types = _layer_types(name, text)
    sources = _sources(text, types)
    return HFConfig(
        model_type=name,
        layer_types=types,
        sources=sources,
        sliding_window=_window(name, text, types),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 1 << 31,
        kv_sizes=tuple(
            _kv_sizes(_of_layer(text, l), _MORE_HEADS.get(name, 1) if kind == WINDOW else 1)
            for l, kind in enumerate(types)
        ),
        dtype=str(getattr(text, "dtype", None) or getattr(config, "dtype", None) or "").removeprefix("torch."),
        raw=_plain(config.to_dict()),
    )


def _of_layer(text: Any, layer: int) -> Any:
    """The config as one layer sees it: heads and sizes may differ from layer to layer."""
    own = getattr(text, "per_layer_config", None)
    return text if own is None else own[layer]


def _window(name: str, text: Any, types: tuple[str, ...]) -> int:
    windows = {getattr(_of_layer(text, l), "sliding_window", None) for l, kind in enumerate(types) if kind == WINDOW}
    if len(windows) > 1:
        raise UnmappedError(f"{name} has windows of different lengths, {sorted(map(str, windows))}: one is mapped")
    window = windows.pop() if windows else 1
    if not isinstance(window, int):
        raise UnmappedError(f"{name} has sliding-window layers and no sliding_window in its config")
    return window


def _kv_sizes(layer: Any, times: int) -> tuple[int, int, int]:
    """KV heads of a layer, and the numbers of a key and of a value of one head. times: KV heads of the layer for one of
    the config."""
    heads = layer.num_attention_heads
    dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    kv_heads = times * (getattr(layer, "num_key_value_heads", None) or heads)
    return kv_heads, dim, getattr(layer, "v_head_dim", None) or dim


def _layer_types(name: str, text: Any) -> tuple[str, ...]:
    types = getattr(text, "layer_types", None)
    if not types:
        if found := [key for key in _STATE_SPACE if getattr(text, key, None)]:
            raise UnmappedError(f"{name} has {found[0]}: state-space or recurrent layers are not mapped")
        slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        return (WINDOW if slides else GLOBAL,) * text.num_hidden_layers
    for kind in dict.fromkeys(types):
        if kind not in (WINDOW, GLOBAL):
            raise UnmappedError(f"{name} has layers of type {kind}: {_REFUSED.get(kind, 'this type is not known')}")
    return tuple(types)


def _sources(text: Any, types: tuple[str, ...]) -> tuple[int, ...]:
    """Whose KV each layer reads: its own, or that of the last layer of its type that keeps its own."""
    modes = getattr(text, "kv_sharing_modes", None) or (None,) * len(types)
    owners: dict[str, int] = {}
    out = []
    for l, (kind, mode) in enumerate(zip(types, modes, strict=True)):
        if mode != "reuse":
            owners[kind] = l
        out.append(owners.get(kind, l))
    return tuple(out)


def _plain(value: Any) -> Any:
    """JSON values only: what JSON does not know is written as text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
