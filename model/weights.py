"""Weights under their official names (bf16, FP8 with 32 × 32 scale tiles, packed FP4), and the model in memory."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.engram import Engram
from replayscope.model.ops import Experts, Mix
from replayscope.model.shapes import TILE, expected_shapes

# Engram's map from token ids to compressed ids, a JSON list; it is derived from the tokenizer, not from the weights.
TOKEN_MAP = "engram_token_map.json"
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class WeightsError(ValueError):
    """A checkpoint that cannot be used; the message names the file or the tensors."""


@dataclass(frozen=True)
class Compressor:
    """wkv [D, d] and, for ratio 2, wgate [D, d]; norm [D]; index key projection wk [di, D] and its norm [di]."""

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class Indexer:
    """wq_b [hi·di, q_lora], weights_proj [hi, d]."""

    wq_b: Tensor
    weights_proj: Tensor


@dataclass(frozen=True)
class Layer:
    """One layer's tensors; linear weights are [out, in]."""

    attn_norm: Tensor
    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    wo_a: Tensor
    wo_b: Tensor
    sink: Tensor
    ffn_norm: Tensor
    hc_attn: Mix
    hc_ffn: Mix
    experts: Experts
    compressor: Compressor | None
    indexer: Indexer | None
    engram: Engram | None = None


@dataclass(frozen=True)
class Model:
    """A whole model in memory. embed, head [V, d]; norm [d]."""

    config: ModelConfig
    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[Layer, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device


def decode(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A stored tensor as float32: plain floats as they are, e4m3 by 32 × 32 tiles (or 1 × 32), int8 as two e2m1 each.

    weight [out, in] (or [out, in/2] int8, low nibble = even column); scale e8m0, one number per tile.
    """
    if weight.dtype == torch.int8:
        if scale is None:
            raise WeightsError("packed FP4 weight has no scale")
        byte = weight.view(torch.uint8).long()
        value = torch.stack((_E2M1[byte & 15], _E2M1[byte >> 4]), -1).flatten(-2)
        return value * scale.float().repeat_interleave(TILE, 1)[:, : value.shape[1]]
    value = weight.float()
    if scale is None:
        return value
    rows = 1 if scale.shape[0] == value.shape[0] else TILE
    grown = scale.float().repeat_interleave(rows, 0).repeat_interleave(TILE, 1)
    return value * grown[: value.shape[0], : value.shape[1]]


def build(config: ModelConfig, tensors: dict[str, Tensor], token_map: Tensor | None = None) -> Model:
    """The model from decoded tensors by official name. Raises WeightsError naming what is missing, misshapen, NaN."""
    if config.engram_layer_ids and token_map is None:
        raise WeightsError(f"Engram needs the map from token ids to compressed ids: put {TOKEN_MAP} beside config.json")
    if token_map is not None and config.engram_layer_ids:
        if len(token_map) != config.vocab_size or int(token_map.max()) >= config.engram_compressed_vocab_size:
            raise WeightsError(
                f"{TOKEN_MAP} must hold {config.vocab_size} ids below {config.engram_compressed_vocab_size}"
            )
    want = expected_shapes(config)
    missing = [k for k in want if k not in tensors]
    wrong = [
        f"{k} {tuple(tensors[k].shape)} wants {s}"
        for k, s in want.items()
        if k in tensors and tuple(tensors[k].shape) != s
    ]
    if missing or wrong:
        parts = [f"missing {_some(missing)}"] * bool(missing) + [f"misshapen {_some(wrong)}"] * bool(wrong)
        raise WeightsError("weights do not fit the config: " + "; ".join(parts))
    bad = [k for k in want if not torch.isfinite(tensors[k]).all()]
    if bad:
        raise WeightsError(f"weights hold NaN or infinity: {_some(bad)}")

    def layer(i: int) -> Layer:
        def get(name: str) -> Tensor:
            return tensors[f"layers.{i}.{name}"]

        def stack(name: str) -> Tensor:
            return torch.stack([get(f"ffn.experts.{j}.{name}.weight") for j in range(config.n_routed_experts)])

        compressor = indexer = engram = None
        if i in config.kv_source_layer_ids:
            pair = config.compress_ratios[i] == 2
            compressor = Compressor(
                wkv=get("attn.compressor.wkv.weight"),
                wgate=get("attn.compressor.wgate.weight") if pair else None,
                norm=get("attn.compressor.norm.weight"),
                wk=get("attn.indexer.wk.weight"),
                k_norm=get("attn.indexer.k_norm.weight"),
            )
        if i in config.index_source_layer_ids:
            indexer = Indexer(get("attn.indexer.wq_b.weight"), get("attn.indexer.weights_proj.weight"))
        if i in config.engram_layer_ids:
            assert token_map is not None
            engram = Engram(
                embed=get("engram.embed.weight"),
                wkv=get("engram.wkv.weight"),
                q_weight=get("engram.q_weight"),
                k_weight=get("engram.k_weight"),
                token_map=token_map,
            )
        return Layer(
            attn_norm=get("attn_norm.weight"),
            wq_a=get("attn.wq_a.weight"),
            q_norm=get("attn.q_norm.weight"),
            wq_b=get("attn.wq_b.weight"),
            wkv=get("attn.wkv.weight"),
            kv_norm=get("attn.kv_norm.weight"),
            wo_a=get("attn.wo_a.weight"),
            wo_b=get("attn.wo_b.weight"),
            sink=get("attn.attn_sink"),
            ffn_norm=get("ffn_norm.weight"),
            hc_attn=Mix(get("hc_attn_fn"), get("hc_attn_base"), get("hc_attn_scale")),
            hc_ffn=Mix(get("hc_ffn_fn"), get("hc_ffn_base"), get("hc_ffn_scale")),
            experts=Experts(
                gate=get("ffn.gate.weight"),
                bias=get("ffn.gate.bias"),
                w1=stack("w1"),
                w2=stack("w2"),
                w3=stack("w3"),
                s1=get("ffn.shared_experts.w1.weight"),
                s2=get("ffn.shared_experts.w2.weight"),
                s3=get("ffn.shared_experts.w3.weight"),
            ),
            compressor=compressor,
            indexer=indexer,
            engram=engram,
        )

    return Model(
        config,
        tensors["embed.weight"],
        tensors["head.weight"],
        tensors["norm.weight"],
        tuple(map(layer, config.layers)),
    )


# Kept in float32 whatever the model's dtype: stored so, and they enter float32 arithmetic (sink, mixes, router bias).
_WIDE = (
    "attn_sink",
    "gate.bias",
    "hc_attn_fn",
    "hc_attn_base",
    "hc_attn_scale",
    "hc_ffn_fn",
    "hc_ffn_base",
    "hc_ffn_scale",
)
_WIDE_PARTS = ("compressor.wkv", "compressor.wgate")


def read_tensors(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Decoded tensors of a safetensors file or of a folder's shards, in ``dtype`` (wide ones in at least float32)."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise WeightsError(f"no .safetensors file in {path}")
    want = expected_shapes(config)
    out: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as f:
                names = set(f.keys())
                for name in names & want.keys():
                    scale_name = name.removesuffix(".weight") + ".scale"
                    scale = f.get_tensor(scale_name) if scale_name in names else None
                    wide = name.endswith(_WIDE) or any(p in name for p in _WIDE_PARTS)
                    to = torch.promote_types(dtype, torch.float32) if wide else dtype
                    out[name] = decode(f.get_tensor(name), scale).to(device, to)
        except (SafetensorError, OSError) as e:
            raise WeightsError(f"cannot read weights {file}: {str(e).splitlines()[0]}") from e
    return out


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
) -> Model:
    """A model from a folder with config.json and safetensors. Raises WeightsError with one line."""
    path = Path(path)
    if config is None:
        file = path / "config.json"
        try:
            config = ModelConfig.load(file)
        except FileNotFoundError:
            raise WeightsError(f"{path} has no config.json") from None
        except (json.JSONDecodeError, ValueError, TypeError, UnicodeDecodeError) as e:
            raise WeightsError(f"{file}: {e}") from e
    return build(config, read_tensors(path, config, dtype, device), read_token_map(path))


def read_token_map(folder: Path) -> Tensor | None:
    """token id → compressed id [vocab], from the file beside the config; None if there is none."""
    file = folder / TOKEN_MAP
    if not file.is_file():
        return None
    try:
        return torch.tensor(json.loads(file.read_text(encoding="utf-8")), dtype=torch.long)
    except (ValueError, TypeError, UnicodeDecodeError) as e:
        raise WeightsError(f"{file} is not a JSON list of ids: {e}") from e


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
