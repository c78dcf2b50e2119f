"""Weights under their official names (bf16, FP8 with 32 × 32 scale tiles, packed FP4), and the model in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.engram import Engram
from replayscope.model.ops import Experts, Mix
from replayscope.model.shapes import TILE, expected_shapes

# Engram's map from token ids to compressed ids, a JSON list; it is derived from the tokenizer, not from the weights.
TOKEN_MAP = "engram_token_map.json"
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_ROWS = 256
# byte → its two numbers, the low nibble's first [256, 2].
_PAIRS = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), 1)


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

    @property
    def device(self) -> torch.device:
        """Where the layer runs: rows are carried to its weights."""
        return self.attn_norm.device


@dataclass(frozen=True)
class Model:
    """A whole model in memory. embed, head [V, d]; norm [d].

    Layers may lie on several devices, one contiguous block on each: embed with the first, norm and head with the last.
    """

    config: ModelConfig
    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: Sequence[Layer]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where a pass begins."""
        return self.embed.device

    @property
    def kernel_devices(self) -> tuple[torch.device, ...]:
        """The devices that layers lie on, each once: kernels run there, and states are compared there."""
        return tuple(dict.fromkeys(layer.device for layer in self.layers))


def decode(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A stored tensor as new float32: plain floats as they are, e4m3 by 32 × 32 tiles (or 1 × 32), int8 as two e2m1.

    weight [out, in] (or [out, in/2] int8, low nibble = even column); scale e8m0, one number per tile.
    """
    if weight.dtype == torch.int8:
        if scale is None:
            raise WeightsError("packed FP4 weight has no scale")
        pairs, byte = _PAIRS.to(weight.device), weight.view(torch.uint8)
        value = torch.empty(len(byte), byte.shape[1] * 2, device=weight.device)
        # Some rows at a time: an index into the pairs takes eight bytes for each of theirs.
        for part, source in zip(value.split(_ROWS), byte.split(_ROWS), strict=True):
            part.copy_(pairs[source.int()].flatten(1))
    else:
        value = weight.to(torch.float32, copy=True)
        if scale is None:
            return value
    rows = 1 if scale.shape[0] == value.shape[0] else TILE
    grown = scale.float().to(value.device).repeat_interleave(rows, 0)[: len(value)]
    whole = value.shape[1] // TILE
    # In place and by columns of tiles: an expert is decoded for every use, so no scale of its full size is made.
    value[:, : whole * TILE].unflatten(1, (whole, TILE)).mul_(grown[:, :whole, None])
    value[:, whole * TILE :].mul_(grown[:, whole : whole + 1])
    return value


def build(config: ModelConfig, tensors: dict[str, Tensor], token_map: Tensor | None = None) -> Model:
    """The model from decoded tensors by official name. Raises WeightsError naming what is missing, misshapen, NaN."""
    check_token_map(config, token_map)
    want = expected_shapes(config)
    missing = [k for k in want if k not in tensors]
    wrong = [
        f"{k} {tuple(tensors[k].shape)} wants {s}"
        for k, s in want.items()
        if k in tensors and tuple(tensors[k].shape) != s
    ]
    if missing or wrong:
        parts = [f"missing {some(missing)}"] * bool(missing) + [f"misshapen {some(wrong)}"] * bool(wrong)
        raise WeightsError("weights do not fit the config: " + "; ".join(parts))
    bad = [k for k in want if not torch.isfinite(tensors[k]).all()]
    if bad:
        raise WeightsError(f"weights hold NaN or infinity: {some(bad)}")

    def layer(i: int) -> Layer:
        def stack(part: str) -> Tensor:
            return torch.stack(
                [tensors[f"layers.{i}.ffn.experts.{j}.{part}.weight"] for j in range(config.n_routed_experts)]
            )

        return make_layer(config, i, lambda name: tensors[f"layers.{i}.{name}"], stack, token_map)

    return Model(
        config,
        tensors["embed.weight"],
        tensors["head.weight"],
        tensors["norm.weight"],
        tuple(map(layer, config.layers)),
    )


def make_layer(
    config: ModelConfig,
    i: int,
    get: Callable[[str], Tensor],
    stack: Callable[[str], Tensor],
    token_map: Tensor | None,
) -> Layer:
    """Layer i. get: a tensor by its name behind ``layers.{i}.``; stack: the routed experts' w1, w2 or w3 by number."""
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


def all_finite(value: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # The sum is finite only if all are, and takes no memory; it may overflow where they are.
    return bool(value.sum().isfinite()) or bool(torch.isfinite(value).all())


def check_token_map(config: ModelConfig, token_map: Tensor | None) -> None:
    """Raise WeightsError if Engram is on and its map from token ids is missing or does not fit."""
    if not config.engram_layer_ids:
        return
    if token_map is None:
        raise WeightsError(f"Engram needs the map from token ids to compressed ids: put {TOKEN_MAP} beside config.json")
    if token_map.shape != (config.vocab_size,) or int(token_map.max()) >= config.engram_compressed_vocab_size:
        raise WeightsError(f"{TOKEN_MAP} must hold {config.vocab_size} ids below {config.engram_compressed_vocab_size}")


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
