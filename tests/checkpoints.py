"""Synthetic checkpoints in the official layout: shards with an index, every number format, vision and DSpark besides.

What a tensor decodes to is worked out here, from the numbers before they are packed.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.mini import initial_tensors
from replayscope.model.shapes import TILE, expected_shapes, stored

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# V4.1-Flash with most sizes divided by 32, so that tiles are partial where they are not in the real model.
CONFIG = ModelConfig(
    vocab_size=200,
    hidden_size=160,
    num_hidden_layers=12,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=8,
    q_lora_rank=40,
    o_lora_rank=32,
    o_groups=2,
    sliding_window=6,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8, 10),
    candidate_source_layer_id=6,
    candidate_topk_blocks=6,
    candidate_block_size=2,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=8,
    n_routed_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=72,
    hc_mult=4,
    hc_sinkhorn_iters=4,
    engram_layer_ids=(1, 4),
    engram_vocab_size=60,
    engram_n_heads=2,
    engram_head_dim=64,
    engram_compressed_vocab_size=150,
    activation_fake_quant=True,
)
# Larger than what a layer may take: ten times as many bytes lie in the experts of all layers as in one layer.
LARGE = replace(
    CONFIG, hidden_size=256, moe_intermediate_size=256, n_routed_experts=64, hc_mult=2, engram_vocab_size=12000
)


def pack_fp4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [out, in/2], e8m0 scales [out, in/32] and what they stand for, of value [out, in]."""
    codes, scales, truth = [], [], []
    for columns in value.split(TILE, 1):
        scale = torch.exp2((columns.abs().amax(1, keepdim=True) / 6).clamp(min=2**-100).log2().ceil())
        near = (columns.abs()[..., None] / scale[..., None] - GRID).abs().argmin(-1)
        codes.append(near + 8 * (columns < 0))
        scales.append(scale)
        truth.append(GRID[near] * torch.where(columns < 0, -1.0, 1.0) * scale)
    code = torch.cat(codes, 1)
    packed = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, torch.cat(scales, 1).to(torch.float8_e8m0fnu), torch.cat(truth, 1)


def pack_fp8(value: Tensor, rows: int = TILE) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 [out, in], e8m0 scales [out/rows, in/32] and what they stand for; rows 1 is the format of Engram tables."""
    out, width = -(-value.shape[0] // rows), -(-value.shape[1] // TILE)
    stored_, scale, truth = torch.empty(value.shape, dtype=torch.float8_e4m3fn), torch.empty(out, width), value.clone()
    for i in range(out):
        for j in range(width):
            at = (slice(i * rows, (i + 1) * rows), slice(j * TILE, (j + 1) * TILE))
            scale[i, j] = torch.exp2((value[at].abs().max() / 448).clamp(min=2**-100).log2().ceil())
            stored_[at] = (value[at] / scale[i, j]).to(torch.float8_e4m3fn)
            truth[at] = stored_[at].float() * scale[i, j]
    return stored_, scale.to(torch.float8_e8m0fnu), truth


def pack(config: ModelConfig, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stored tensors of a random model, scales included, and name → what each decodes to."""
    files, truth = {}, {}
    for name, value in initial_tensors(config, seed).items():
        kind = stored(name, tuple(value.shape)).format
        if kind in ("fp4", "fp8"):
            rows = 1 if name.endswith("engram.embed.weight") else TILE
            weight, scale, truth[name] = pack_fp4(value) if kind == "fp4" else pack_fp8(value, rows)
            files |= {name: weight, name.removesuffix(".weight") + ".scale": scale}
        else:
            files[name] = value.to(torch.bfloat16 if kind == "bf16" else torch.float32)
            truth[name] = files[name].float()
    return files, truth


def noise(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Stored tensors of a random model, quickly: packed numbers and table rows are drawn as bytes."""
    small, _ = pack(replace(config, n_routed_experts=config.num_experts_per_tok, engram_vocab_size=2), seed)
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in expected_shapes(config).items():
        kind = stored(name, shape).format
        beside = name.removesuffix(".weight") + ".scale"
        if kind == "fp4" or name.endswith("engram.embed.weight"):
            packed = kind == "fp4"
            raw = torch.randint(0, 256 if packed else 64, (shape[0], shape[1] // (1 + packed)), generator=rng)
            out[name] = raw.to(torch.uint8).view(torch.int8 if packed else torch.float8_e4m3fn)
            scale = torch.full((shape[0], -(-shape[1] // TILE)), 127 - 6, dtype=torch.uint8)
            out[beside] = scale.view(torch.float8_e8m0fnu)
        elif small[name].shape == shape:
            out |= {k: small[k] for k in (name, beside) if k in small}
        else:
            out[name] = torch.randn(shape, generator=rng).mul_(0.05).to(small[name].dtype)
    return out


def others(config: ModelConfig) -> dict[str, Tensor]:
    """Tensors that a checkpoint holds besides: vision, DSpark, the routers' bias for images."""
    names = (
        "vision.blocks.0.attn.qkv.weight",
        "aligner.fc1.weight",
        "image_start",
        "image_newline",
        "mtp.0.norm.weight",
    )
    behind = f"layers.{config.num_hidden_layers}"
    names += (f"{behind}.attn_norm.weight", f"{behind}.ffn.experts.0.w1.weight", "mtp.0.ffn.experts.0.w1.scale")
    out = {name: torch.full((3, 5), float("nan"), dtype=torch.bfloat16) for name in names}
    return out | {f"layers.{i}.ffn.gate.bias_vl": torch.zeros(config.n_routed_experts) for i in config.layers}


def config_json(config: ModelConfig) -> dict:
    """config.json with the official keys: the ratios of DSpark's layers behind the model's, quantisation, vision."""
    out = config.to_dict()
    out["text_config"]["compress_ratios"] = [*config.compress_ratios, 0, 0, 0]
    return out | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"},
        "vision_config": {"hidden_size": 5},
    }


def write(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], shards: int = 3) -> Path:
    """A checkpoint folder: config, token map, tensors in shards; the last shard holds what is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    ids = [i * 7 % config.engram_compressed_vocab_size for i in range(config.vocab_size)]
    (folder / "engram_token_map.json").write_text(json.dumps(ids))
    names, places = list(tensors), {}
    step = -(-len(names) // (shards - 1))
    groups = [{n: tensors[n] for n in names[i * step : (i + 1) * step]} for i in range(shards - 1)] + [others(config)]
    for i, group in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(group, folder / file)
        places |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
