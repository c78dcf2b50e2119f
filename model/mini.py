"""The shape of `mini`, how it starts, and how its trained weights are stored."""

import torch
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.tokenizer import VOCAB_SIZE
from replayscope.model.weights import Model, build, expected_shapes

# Every V4.1 role in 12 layers. The top-k of 32 is small against the 1024 (ratio 2) and 2048 (ratio 1) entries that a
# prompt of 2048 tokens has, and so is the candidate pool of 16 · 8 = 128.
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    num_hidden_layers=12,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    sliding_window=32,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8, 10),
    candidate_source_layer_id=6,
    candidate_topk_blocks=16,
    candidate_block_size=8,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    hc_mult=2,
    max_position_embeddings=4096,
)
EXPERT_PARTS = ("w1", "w2", "w3")
# Parts of the names whose tensors stay float32 in the file, as in the official layout.
WIDE = ("attn_sink", "gate.bias", "hc_", "compressor.w")


def initial_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random weights under official names, fp32: fan-in scaled, outputs into the residual stream near zero."""
    rng = torch.Generator().manual_seed(seed)
    n = config.hc_mult
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=rng)
        if name.endswith("norm.weight"):
            value = torch.ones(shape)
        elif name.endswith(("attn_sink", "gate.bias")):
            value = torch.zeros(shape)
        elif name == "embed.weight":
            value = 0.5 * noise
        elif name == "head.weight":
            value = 0.02 * noise
        elif name.endswith("_scale"):
            value = torch.full(shape, 0.1)
        elif name.endswith("_base"):
            # Reading and writing weights a little apart for each stream, streams mostly kept to themselves.
            value = torch.cat((0.5 * noise[: 2 * n], 3 * torch.eye(n).flatten()))
        elif name.endswith(("wo_b.weight", "w2.weight")):
            value = noise * shape[-1] ** -0.5 * (2 * config.num_hidden_layers) ** -0.5
        else:
            value = noise * shape[-1] ** -0.5
        tensors[name] = value
    return tensors


def trainable(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[Model, dict[str, Tensor]]:
    """The model, and its tensors by name: leaves that want a gradient, and the router biases, which are only nudged.

    The experts of a layer are one leaf [E, out, in] for each of w1, w2, w3, under ``layers.{i}.ffn.experts.w1`` ….
    """
    tensors = {k: v.clone() for k, v in tensors.items()}
    model = build(config, tensors)
    params = {k: v for k, v in tensors.items() if ".experts." not in k}
    for i, layer in enumerate(model.layers):
        params |= {f"layers.{i}.ffn.experts.{p}": getattr(layer.experts, p) for p in EXPERT_PARTS}
    for name, value in params.items():
        value.requires_grad_(not name.endswith("gate.bias"))
    return model, params


def official_tensors(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `trainable` under official names, experts one by one, in the dtypes of the file."""
    tensors = {}
    for name, value in params.items():
        stem, _, part = name.rpartition(".")
        if stem.endswith(".experts"):
            tensors |= {f"{stem}.{j}.{part}.weight": w for j, w in enumerate(value)}
        else:
            tensors[name] = value
    return {
        k: v.detach().to(torch.float32 if any(p in k for p in WIDE) else torch.bfloat16).contiguous()
        for k, v in tensors.items()
    }
