"""The architecture of a V4.1-shaped model, under its official configuration keys."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """YaRN in its frequency-only form (no mscale); used by every layer that has a compress ratio above 0."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and layer schedule. Raises ValueError, naming the key, for a schedule that cannot run.

    ``sliding_window`` is W and counts the query itself: query i sees window keys i-W+1 … i.
    ``compress_ratios[l]`` is 0 (window only), 2 (pairs) or 1 (every token is an entry).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    hc_mult: int
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 1
    n_shared_experts: int = 1
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    max_position_embeddings: int = 1048576
    engram_layer_ids: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    image_token_id: int = -1
    activation_fake_quant: bool = False

    def __post_init__(self) -> None:
        L = self.num_hidden_layers
        _check_types(self)
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.compress_ratios) != L:
            raise ValueError(f"compress_ratios has {len(self.compress_ratios)} entries for {L} layers")
        if any(r not in (0, 1, 2) for r in self.compress_ratios):
            raise ValueError(f"compress_ratios may hold 0, 1 and 2, got {sorted(set(self.compress_ratios))}")
        if not set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids):
            raise ValueError("kv_source_layer_ids must be a subset of index_source_layer_ids")
        for l in self.index_source_layer_ids:
            if not 0 <= l < L or self.compress_ratios[l] == 0:
                raise ValueError(f"layer {l} cannot be an index source: it has no global KV (compress ratio 0)")
        for l in range(L):
            if self.compress_ratios[l] and self.kv_source(l) is None:
                raise ValueError(f"layer {l} has ratio {self.compress_ratios[l]} and no kv source of it at or before")
        c = self.candidate_source_layer_id
        if c != -1:
            if c not in self.kv_source_layer_ids:
                raise ValueError(f"candidate_source_layer_id {c} is not a kv source")
            if (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1 < self.index_topk:
                # Below it public implementations disagree on what fills the top-k.
                raise ValueError(
                    "candidate pool too small: (candidate_topk_blocks - 1)·candidate_block_size + 1 must be at least "
                    f"index_topk = {self.index_topk}"
                )
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} % o_groups {self.o_groups} must be 0")
        if self.engram_layer_ids and not max(self.engram_layer_ids) < self.decoder_start:
            raise ValueError("engram_layer_ids must lie before the last kv source: later layers may not run every row")
        if self.engram_layer_ids and min(self.engram_vocab_size, self.engram_compressed_vocab_size) < 1:
            raise ValueError("engram_layer_ids needs engram_vocab_size and engram_compressed_vocab_size")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ValueError("qk_rope_head_dim must be even and at most head_dim and index_head_dim")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError("num_experts_per_tok exceeds n_routed_experts")

    @property
    def layers(self) -> range:
        return range(self.num_hidden_layers)

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last kv source, whose global KV every later layer reads."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def freezes(self) -> bool:
        """Top-k and experts can be taken from full."""
        return True

    def kv_source(self, layer: int) -> int | None:
        """The layer whose global KV ``layer`` reads, or None for a window-only layer."""
        return _last_at_or_before(self.kv_source_layer_ids, layer, self.compress_ratios)

    def window_source(self, layer: int) -> int | None:
        """The layer whose window KV ``layer`` reads: every layer writes its own."""
        return layer

    def has(self, point: str, layer: int) -> bool:
        """Whether a layer has the hook point: global KV only at its sources, top-k only where it is chosen."""
        if point in ("global_kv", "index_k"):
            return layer in self.kv_source_layer_ids
        return point != "topk" or layer in self.index_source_layer_ids

    def numbers(self, point: str) -> int:
        """How many numbers a row of the hook point has."""
        sizes = {"window_kv": self.head_dim, "global_kv": self.head_dim, "index_k": self.index_head_dim,
                 "topk": self.index_topk, "router": self.num_experts_per_tok, "logits": self.vocab_size,
                 "streams": self.hc_mult * self.hidden_size, "mix": self.hc_mult}  # fmt: skip
        return sizes.get(point, self.hidden_size)

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k ``layer`` uses, or None for a window-only layer."""
        return _last_at_or_before(self.index_source_layer_ids, layer, self.compress_ratios)

    def uses_candidates(self, layer: int) -> bool:
        """Whether the top-k of ``layer`` is limited to the candidate pool."""
        c = self.candidate_source_layer_id
        return c != -1 and layer > c and layer in self.index_source_layer_ids and self.kv_source(layer) == c

    def role(self, layer: int) -> str:
        """One word for tables and axes: window, full, reindex or reuse."""
        if self.compress_ratios[layer] == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON in the official layout (``text_config`` inside)."""
        text = asdict(self)
        quantised, image = text.pop("activation_fake_quant"), text.pop("image_token_id")
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "image_token_id": image,
            "text_config": {"model_type": "deepseek_v41_text", **text},
            "activation_fake_quant": quantised,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """From an official ``config.json``: the text part may be nested under ``text_config`` or flat.

        Keys that this model has no use for are ignored; missing ones, values of another type and variants that are not
        modelled raise ValueError by name.
        """
        if not isinstance(raw, dict) or not isinstance(raw.get("text_config", {}), dict):
            raise ValueError("config is not a JSON object")
        text = dict(raw.get("text_config", raw))
        _check_variant(raw, text)
        known = {f.name: f for f in fields(cls)}
        values = {k: v for k, v in text.items() if k in known}
        for key in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            if key in values:
                if not isinstance(values[key], (list, tuple)):
                    raise ValueError(f"{key} is not a list but {values[key]!r:.40}")
                values[key] = tuple(values[key])
        scaling = values.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise ValueError(f"rope_scaling is not a JSON object but {scaling!r:.40}")
        if scaling.get("rope_type", scaling.get("type", "yarn")) != "yarn":
            raise ValueError(f"rope_scaling.rope_type {scaling.get('rope_type')!r} is not modelled; valid: yarn")
        values["rope_scaling"] = RopeScaling(**{k: v for k, v in scaling.items() if k in RopeScaling.__annotations__})
        values["activation_fake_quant"] = bool(
            raw.get("activation_fake_quant", raw.get("_fixture", {}).get("activation_fake_quant", False))
        )
        values.setdefault("image_token_id", raw.get("image_token_id", -1))
        missing = [k for k in _REQUIRED if k not in values]
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            other = "" if "model_type" in raw else "; it names no model_type either: copy the model's own config.json"
            raise ValueError(f"config lacks {shown}{other}")
        # DSpark blocks carry ratios of their own behind the model's layers.
        values["compress_ratios"] = values["compress_ratios"][: values["num_hidden_layers"]]
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> "ModelConfig":
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


_REQUIRED = [f.name for f in fields(ModelConfig)][:20]
_POSITIVE = [n for n in _REQUIRED if not n.endswith(("_ids", "ratios"))]


def _last_at_or_before(sources: tuple[int, ...], layer: int, ratios: tuple[int, ...]) -> int | None:
    if ratios[layer] == 0:
        return None
    at = [s for s in sources if s <= layer and ratios[s] == ratios[layer]]
    return at[-1] if at else None


# What a config may ask for besides sizes, and the one variant modelled; other values would measure another model.
_VARIANTS = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
}


def _check_variant(raw: dict[str, Any], text: dict[str, Any]) -> None:
    for key, modelled in _VARIANTS.items():
        if key in text and text[key] != modelled:
            raise ValueError(f"{key} {text[key]!r:.40} is not modelled; valid: {modelled!r}")
    kind = raw.get("model_type", "deepseek_v41")
    if kind not in ("deepseek_v41", "deepseek_v41_text"):
        raise ValueError(f"model_type {kind!r:.40} is not modelled; valid: deepseek_v41")
    method = (raw.get("quantization_config") or {}).get("quant_method", "fp8")
    if method != "fp8":
        raise ValueError(f"quantization_config.quant_method {method!r:.40} is not modelled; valid: fp8")


def _check_types(config: ModelConfig) -> None:
    """Whole numbers where sizes are meant, finite numbers elsewhere: JSON also has true, "64", 64.5 and NaN."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, tuple):
            wrong = [v for v in value if type(v) is not int]
            if wrong:
                raise ValueError(f"{f.name} holds {wrong[0]!r:.40}, which is no whole number")
        elif f.type is int:
            if type(value) is not int:
                raise ValueError(f"{f.name} must be a whole number, got {value!r:.40}")
            if value > _LARGEST:
                raise ValueError(f"{f.name} {value} is larger than {_LARGEST}")
        elif f.type is float and (type(value) not in (int, float) or not math.isfinite(value) or value < 0):
            raise ValueError(f"{f.name} must be a finite number of 0 or more, got {value!r:.40}")
    if config.sliding_window > config.max_position_embeddings:
        raise ValueError(f"sliding_window {config.sliding_window} exceeds {config.max_position_embeddings} positions")
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(config, name) <= 1:
            raise ValueError(f"{name} must be larger than 1, got {getattr(config, name)}")


_LARGEST = 2**31
