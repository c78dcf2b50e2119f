"""Families of Hugging Face models that were tried, each with a tiny config of its own class. No torch.

Any model is mapped by its config; this table only says for which of them the arms were held against their oracles.
"""

from dataclasses import dataclass, field
from typing import Any

TRIED_WITH = "5.24.0"  # transformers
WINDOW = 8
_SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
          "sliding_window": WINDOW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_TWO = ("sliding_attention", "full_attention")
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """config: the class in transformers. has: what sets it apart, all of it done by its own code. tiny: arguments of a
    small config besides the common sizes. vision: those of its image tower, which text does not pass."""

    config: str
    has: str
    tiny: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the tiny config."""
        text = _SIZES | self.tiny
        return text if self.vision is None else {"text_config": text, "vision_config": self.vision}


FAMILIES = {
    "gpt-oss": Family(
        "GptOssConfig", "sinks, experts", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "gemma-2": Family("Gemma2Config", "softcaps", {"head_dim": 8}),
    "gemma-3": Family("Gemma3TextConfig", "QK norm, two RoPE bases", {"head_dim": 8, "layer_types": _MIXED}),
    "gemma-4": Family(
        "Gemma4TextConfig",
        "KV shared between layers, per-layer inputs, experts",
        {"head_dim": 8, "global_head_dim": 16, "layer_types": [*_TWO, *_TWO, *_TWO], "num_kv_shared_layers": 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "enable_moe_block": True, "num_experts": 4,
         "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "mistral": Family("MistralConfig", "window layers only", {"num_hidden_layers": 4}),
    "ministral": Family("MinistralConfig", "mixed layers", {"head_dim": 8, "layer_types": _MIXED}),
    "olmo-3": Family("Olmo3Config", "norms behind attention, QK norm, two RoPEs", {"layer_types": _MIXED}),
    "cohere-2": Family("Cohere2Config", "no RoPE in global layers, parallel feed-forward", {"layer_types": _MIXED}),
    "exaone-4": Family("Exaone4Config", "no RoPE in global layers, QK norm", {"layer_types": _MIXED}),
    "phi-3": Family("Phi3Config", "fused projections, window layers only", {"num_hidden_layers": 4}),
    "mimo-v2-flash": Family(
        "MiMoV2FlashConfig",
        "sinks in window layers, values of another size, partial RoPE, grouped experts",
        {"head_dim": 8, "v_head_dim": 4, "layer_types": _MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"]},
    ),
    "step-3.7": Family(
        "Step3p7Config",
        "gated heads, QK norm, experts with a shared one",
        {"head_dim": 8, "layer_types": _MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"]},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
         "max_position_embeddings": 4},
    ),
    "qwen-3": Family("Qwen3Config", "QK norm", {"head_dim": 8, "layer_types": _MIXED, "use_sliding_window": True}),
    "starcoder-2": Family("Starcoder2Config", "window layers only", {"num_hidden_layers": 4}),
}  # fmt: skip

# A public checkpoint of each, for those who have the room; none was run here.
CHECKPOINTS = {
    "gpt-oss": "openai/gpt-oss-20b",
    "gemma-2": "google/gemma-2-2b",
    "gemma-3": "google/gemma-3-1b-it",
    "gemma-4": "google/gemma-4-e2b-it",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "ministral": "mistralai/Ministral-8B-Instruct-2410",
    "olmo-3": "allenai/Olmo-3-7B-Instruct",
    "cohere-2": "CohereLabs/c4ai-command-r7b-12-2024",
    "exaone-4": "LGAI-EXAONE/EXAONE-4.0-32B",
    "phi-3": "microsoft/Phi-3-mini-4k-instruct",
    "mimo-v2-flash": "XiaomiMiMo/MiMo-V2-Flash",
    "step-3.7": "stepfun-ai/Step-3.7-Flash",
    "starcoder-2": "bigcode/starcoder2-3b",
}
