"""What a model caches, from its config alone: bytes of an entry, of a window slot, of entries that are still open.

The bytes of V4.1 are those of the serving formats, also for a config whose own states are wider: global KV e2m1 with
one e4m3 scale per 16 channels, index keys e2m1 with one ue8m0 scale per 32, window KV e4m3 with one ue8m0 per 32. Those
of Hugging Face models are keys and values in the checkpoint's dtype. No torch.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.inspector.geometry import window_layers
from replayscope.inspector.names import unknown
from replayscope.model.config import ModelConfig
from replayscope.model.hf_config import HFConfig, is_hf

_FP32 = 4
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Size:
    """Bytes, and the arithmetic that gives them (· is ×)."""

    bytes: int
    formula: str


@dataclass(frozen=True)
class Sources:
    """Layers of one ratio with global KV of their own.

    entry: bytes of one entry, which covers `ratio` tokens. state: what a layer keeps of an entry that is not complete.
    """

    layers: int
    ratio: int
    entry: Size
    state: Size


@dataclass(frozen=True)
class Windows:
    """Layers with window KV of their own, and what one token takes in each."""

    layers: int
    slot: Size


@dataclass(frozen=True)
class Cache:
    """main, index: bytes of an entry's KV and of its index key, None where entries are a token's keys and values.

    encoder: layers below the last kv source, or None where there is no decoder half. shared: layers that read another
    layer's KV and keep none. origin: where the sizes are from.
    """

    encoder: int | None
    window: int
    main: Size | None
    index: Size | None
    windows: tuple[Windows, ...]
    sources: tuple[Sources, ...]
    origin: str
    shared: int = 0

    @property
    def layers(self) -> int:
        """Layers with window KV of their own."""
        return sum(w.layers for w in self.windows)

    @property
    def per_token(self) -> Fraction:
        """Global bytes that a token adds in the long run."""
        return sum((Fraction(s.layers * s.entry.bytes, s.ratio) for s in self.sources), Fraction(0))

    @property
    def window_bytes(self) -> int:
        """Window KV of one request."""
        return sum(w.layers * self.window * w.slot.bytes for w in self.windows)

    @property
    def open_bytes(self) -> int:
        """Entries of one request that are not complete."""
        return sum(s.layers * s.state.bytes for s in self.sources)

    def global_bytes(self, tokens: int) -> int:
        """The complete global entries of one context of that many tokens."""
        return sum(s.layers * s.entry.bytes * (tokens // s.ratio) for s in self.sources)


@dataclass(frozen=True)
class V4Config:
    """The keys of a `deepseek_v4` config that its cache follows from; ratios are 0, 4 (indexed) and 128 (not)."""

    num_hidden_layers: int
    head_dim: int
    qk_rope_head_dim: int
    index_head_dim: int
    sliding_window: int
    compress_ratios: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = {key: value for key, value in asdict(self).items() if key != "compress_ratios"}
        if bad := [key for key, value in sizes.items() if not isinstance(value, int) or value < 1]:
            raise ValueError(f"{bad[0]} must be at least 1, got {sizes[bad[0]]}")
        if self.qk_rope_head_dim > self.head_dim:
            raise ValueError("qk_rope_head_dim must be at most head_dim")
        if len(self.compress_ratios) != self.num_hidden_layers or not set(self.compress_ratios) <= {0, 4, 128}:
            raise ValueError(f"compress_ratios must hold 0, 4 or 128 for each of {self.num_hidden_layers} layers")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "V4Config":
        """From an official `config.json`; ratios behind the model's layers belong to its drafter."""
        if missing := [key for key in cls.__annotations__ if key not in raw]:
            raise ValueError(f"config lacks {', '.join(missing)}")
        values = {key: raw[key] for key in cls.__annotations__}
        return cls(**{**values, "compress_ratios": tuple(raw["compress_ratios"][: raw["num_hidden_layers"]])})


Config = ModelConfig | V4Config | HFConfig


def presets() -> dict[str, Traversable]:
    """Configs inside the package: name → file. `v41-flash` and `v4-flash` come without weights."""
    found = [file for file in files("replayscope.model").iterdir() if file.name.endswith(".json")]
    return {file.name.removesuffix(".json").replace("_", "-"): file for file in sorted(found, key=lambda f: f.name)}


def load_config(model: str) -> Config:
    """The config of a preset, of a folder with a config.json, or of an id on the Hugging Face hub. Raises UsageError
    with one line."""
    known = presets()
    file = known.get(model) or Path(model) / "config.json"
    if model not in known and is_hf(model) and not _is_v4(file):
        return _load_hf(model)
    if model not in known and not file.is_file():
        if Path(model).is_dir():
            raise UsageError(f"{model} has no config.json; give a folder that has one, or a preset")
        raise unknown(
            "model", model, list(known), shown=f"{', '.join(known)}, a folder with a config.json, or OWNER/NAME"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return V4Config.from_dict(raw) if raw.get("model_type") == "deepseek_v4" else ModelConfig.from_dict(raw)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} is no config that can be used: {error}") from error


def _is_v4(file: Traversable) -> bool:
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("model_type") == "deepseek_v4"


def _load_hf(model: str) -> HFConfig:
    """Through transformers, since its classes know what a config.json leaves out."""
    try:
        from replayscope.model import hf
    except ImportError as error:
        raise UsageError(f"{model} needs {error.name}: pip install 'replayscope[hf]'") from error
    hf.say_less(0)
    try:
        return hf.read_config(model)[1]
    except ValueError as error:
        raise UsageError(str(error)) from error


def cache_of(config: Config) -> Cache:
    """The cache that follows from a config."""
    if isinstance(config, HFConfig):
        return _hf_cache(config)
    return _v4_cache(config) if isinstance(config, V4Config) else _v41_cache(config)


def _v41_cache(c: ModelConfig) -> Cache:
    D = c.head_dim
    main, index = scaled(D, 4, 16), scaled(c.index_head_dim, 4, 32)
    entry = Size(main.bytes + index.bytes, f"{main.bytes} + {index.bytes}")
    # An open pair keeps the content and the score of its first token; a ratio-1 entry is never open.
    state = {1: Size(0, "0"), 2: Size(2 * D * _FP32, f"({D} + {D})·{_FP32}")}
    ratios = sorted((c.compress_ratios[l] for l in c.kv_source_layer_ids), reverse=True)
    return Cache(
        encoder=c.decoder_start if c.kv_source_layer_ids else None,
        window=c.sliding_window,
        main=main,
        index=index,
        windows=(Windows(c.num_hidden_layers, scaled(D, 8, 32)),),
        sources=tuple(Sources(len(list(same)), r, entry, state[r]) for r, same in groupby(ratios)),
        origin="config; published formats",
    )


def _v4_cache(c: V4Config) -> Cache:
    D, di, rope = c.head_dim, c.index_head_dim, c.qk_rope_head_dim
    # The fp8_ds_mla record of vLLM: e4m3 with a ue8m0 scale per 64 channels, the scales padded to 8 bytes, and the RoPE
    # channels in bf16. Index keys are its MXFP4 form (#48993); in FP8 they take 132 bytes instead of 68.
    scales = math.ceil(math.ceil((D - rope) / 64) / 8) * 8
    main, index = Size(D + rope + scales, f"({D} - {rope}) + 2·{rope} + {scales}"), scaled(di, 4, 32)
    entries = {
        4: Size(main.bytes + index.bytes, f"{main.bytes} + {index.bytes}"),
        128: Size(main.bytes, f"{main.bytes}"),
    }
    # Ratio-4 entries overlap their neighbour: 2·4 rows of doubled content and score, for the KV and for the index key.
    states = {
        4: Size(2 * 4 * 2 * (2 * D + 2 * di) * _FP32, f"2·4·2·(2·{D} + 2·{di})·{_FP32}"),
        128: Size(128 * 2 * D * _FP32, f"128·({D} + {D})·{_FP32}"),
    }
    counts = {ratio: c.compress_ratios.count(ratio) for ratio in (4, 128)}
    return Cache(
        encoder=None,
        window=c.sliding_window,
        main=main,
        index=index,
        windows=(Windows(c.num_hidden_layers, main),),
        sources=tuple(Sources(n, ratio, entries[ratio], states[ratio]) for ratio, n in counts.items() if n),
        origin="config; formats assumed (vLLM, FP4 index)",
    )


def _hf_cache(c: HFConfig) -> Cache:
    width = _BYTES.get(c.dtype, 2)

    def groups(layers: Iterable[int]) -> list[tuple[int, Size]]:
        """How many of the layers keep KV of which size."""
        return [
            (len(list(same)), Size(width * heads * (dk + dv), f"{width}·{heads}·({dk} + {dv})"))
            for (heads, dk, dv), same in groupby(sorted(c.kv_sizes[l] for l in layers))
        ]

    return Cache(
        encoder=None,
        window=c.sliding_window,
        main=None,
        index=None,
        windows=tuple(Windows(n, size) for n, size in groups(window_layers(c))),
        sources=tuple(Sources(n, 1, size, Size(0, "0")) for n, size in groups(c.kv_source_layer_ids)),
        origin="config" if c.dtype in _BYTES else "config; 2 bytes a number assumed",
        shared=sum(source != l for l, source in enumerate(c.sources)),
    )


def scaled(channels: int, bits: int, block: int) -> Size:
    """A vector of `channels` numbers of `bits` bits with one byte of scale per `block` channels."""
    values = f"{channels}" if bits == 8 else _over(channels, 8 // bits)
    scales = _over(channels, block)
    return Size(math.ceil(channels * bits / 8) + math.ceil(channels / block), f"{values} + {scales}")


def _over(a: int, b: int) -> str:
    return f"ceil({a}/{b})" if a % b else f"{a}/{b}"
