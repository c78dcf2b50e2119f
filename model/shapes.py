"""Names, shapes and stored formats of an official checkpoint's tensors, from the config alone. No torch."""

import math
from dataclasses import dataclass

from replayscope.model.config import ModelConfig

TILE = 32
PARTS: tuple[str, ...] = ("attention", "experts", "engram", "embeddings", "norms and mixes")
# Bytes of one stored number, without its scale.
FORMATS = {"fp4": 0.5, "fp8": 1, "bf16": 2, "f32": 4}

_FP8 = (
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "attn.indexer.wq_b.weight",
    "engram.wkv.weight",
)
_F32 = ("attn.attn_sink", "ffn.gate.bias", "attn.compressor.wkv.weight", "attn.compressor.wgate.weight")


@dataclass(frozen=True)
class Stored:
    """How a tensor lies on disk: a key of FORMATS, how many numbers, and how many one-byte e8m0 scales beside them."""

    format: str
    numbers: int
    scales: int

    @property
    def bytes(self) -> int:
        return int(self.numbers * FORMATS[self.format]) + self.scales


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Official name → logical shape of every tensor that the model reads (vision and DSpark are not)."""
    c = config
    d, D, h, n, f = c.hidden_size, c.head_dim, c.num_attention_heads, c.hc_mult, c.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (c.vocab_size, d),
        "head.weight": (c.vocab_size, d),
        "norm.weight": (d,),
    }
    tables = table_sizes(c)
    for i in c.layers:
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "ffn_norm.weight": (d,),
            "attn.wq_a.weight": (c.q_lora_rank, d),
            "attn.q_norm.weight": (c.q_lora_rank,),
            "attn.wq_b.weight": (h * D, c.q_lora_rank),
            "attn.wkv.weight": (D, d),
            "attn.kv_norm.weight": (D,),
            "attn.wo_a.weight": (c.o_groups * c.o_lora_rank, h * D // c.o_groups),
            "attn.wo_b.weight": (d, c.o_groups * c.o_lora_rank),
            "attn.attn_sink": (h,),
            "ffn.gate.weight": (c.n_routed_experts, d),
            "ffn.gate.bias": (c.n_routed_experts,),
        }
        for site in ("attn", "ffn"):
            layer |= {
                f"hc_{site}_fn": ((2 + n) * n, n * d),
                f"hc_{site}_base": ((2 + n) * n,),
                f"hc_{site}_scale": (3,),
            }
        for e in [f"experts.{j}" for j in range(c.n_routed_experts)] + ["shared_experts"]:
            layer |= {f"ffn.{e}.w1.weight": (f, d), f"ffn.{e}.w3.weight": (f, d), f"ffn.{e}.w2.weight": (d, f)}
        if i in c.kv_source_layer_ids:
            layer |= {"attn.compressor.wkv.weight": (D, d), "attn.compressor.norm.weight": (D,)}
            layer |= {
                "attn.indexer.wk.weight": (c.index_head_dim, D),
                "attn.indexer.k_norm.weight": (c.index_head_dim,),
            }
            if c.compress_ratios[i] == 2:
                layer["attn.compressor.wgate.weight"] = (D, d)
        if i in c.index_source_layer_ids:
            layer["attn.indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            layer["attn.indexer.weights_proj.weight"] = (c.index_n_heads, d)
        if i in c.engram_layer_ids:
            width = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
            layer |= {"engram.embed.weight": (sum(tables[i]), c.engram_head_dim)}
            layer |= {"engram.wkv.weight": ((n + 1) * d, width), "engram.q_weight": (n, d), "engram.k_weight": (n, d)}
        shapes |= {f"layers.{i}.{k}": v for k, v in layer.items()}
    return shapes


def table_sizes(config: ModelConfig) -> dict[int, list[int]]:
    """Engram layer → its table sizes, order-major, then head: ascending primes, none used twice across layers."""
    sizes: dict[int, list[int]] = {}
    candidate = config.engram_vocab_size
    for layer in config.engram_layer_ids:
        sizes[layer] = []
        for _ in range((config.engram_max_ngram_size - 1) * config.engram_n_heads):
            while not _is_prime(candidate):
                candidate += 1
            sizes[layer].append(candidate)
            candidate += 1
    return sizes


def part_of(name: str) -> str:
    """Which of PARTS the tensor called `name` belongs to."""
    if name in ("embed.weight", "head.weight"):
        return "embeddings"
    if ".engram." in name:
        return "engram"
    if ".attn." in name:
        return "attention"
    return "experts" if ".ffn." in name else "norms and mixes"


def stored(name: str, shape: tuple[int, ...]) -> Stored:
    """How the official checkpoint stores the tensor called `name`, of logical shape `shape`.

    Routed experts are packed e2m1 with a scale per 32 columns of a row, Engram tables e4m3 with the same scales, other
    large matrices e4m3 with a scale per 32 × 32 tile; the rest is bf16 or float32 and has none.
    """
    numbers = math.prod(shape)
    if ".ffn.experts." in name:
        return Stored("fp4", numbers, shape[0] * -(-shape[1] // TILE))
    if name.endswith("engram.embed.weight"):
        return Stored("fp8", numbers, shape[0] * -(-shape[1] // TILE))
    if name.endswith(_FP8) or ".ffn.shared_experts." in name:
        return Stored("fp8", numbers, -(-shape[0] // TILE) * -(-shape[1] // TILE))
    return Stored("f32" if name.endswith(_F32) or ".hc_" in name else "bf16", numbers, 0)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))
