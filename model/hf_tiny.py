"""Tiny random models of the families that were tried, saved as any Hugging Face folder is."""

from pathlib import Path

import torch
import transformers

from replayscope.model.hf import auto_class
from replayscope.model.hf_families import FAMILIES

# Large enough that every layer moves the residual stream, and nothing saturates.
_SPREAD = 0.2


def save_tiny(family: str, folder: Path, seed: int = 0) -> None:
    """Write a model with random weights in fp64 into a folder. The same seed gives the same bytes."""
    tried = FAMILIES[family]
    config = getattr(transformers, tried.config)(**tried.arguments)
    config._experts_implementation = "eager"
    model = auto_class(config).from_config(config, dtype=torch.float64, attn_implementation="eager")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64) * _SPREAD
            # Norms keep what they were, nearly; matrices have no structure of their own.
            weight.copy_(noise if weight.ndim > 1 else weight + noise)
    model.save_pretrained(folder)
