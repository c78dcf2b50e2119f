"""The public fixtures: a tiny V4.1 with expected activations, and what the tests ask of them."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.plan import Plan, Request
from replayscope.inspector.semantics import Shape
from replayscope.model.checkpoint import read_tensors
from replayscope.model.config import ModelConfig
from replayscope.model.weights import Model, build

ROOT = Path(__file__).parent / "fixtures" / "v41"
TOKENS, PROMPT_END = 68, 56


@cache
def config(variant: str = "plain") -> ModelConfig:
    return ModelConfig.load(ROOT / variant / "config.json")


@cache
def model(dtype: torch.dtype = torch.float64, variant: str = "plain", device: str = "cpu") -> Model:
    """plain: no rounding, no Engram; released: both."""
    token_map = torch.tensor(arrays("full", "released")["engram_token_map"]).long()
    return build(config(variant), read_tensors(ROOT / "weights", config(variant), dtype, device), token_map)


@cache
def arrays(name: str, variant: str = "plain") -> dict[str, np.ndarray]:
    with np.load(ROOT / variant / f"{name}.npz") as z:
        return dict(z)


def ids() -> torch.Tensor:
    return torch.tensor(arrays("full")["input_ids"])


def shape(forced: int = 0, tokens: int = TOKENS) -> Shape:
    return Shape(config(), tokens, forced)


def rows(
    executor: Executor,
    requests: list[Request],
    want: tuple[str, ...] = ("hidden", "logits", "attn_out"),
    tokens: dict | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Per request: hook point → its rows, after running the requests as one plan."""
    out: list[dict[str, torch.Tensor]] = [{} for _ in requests]
    for frame in executor.run(Plan(tuple(requests)), tokens or {"prompt": ids()}, frozenset(want)):
        for point, spans in frame.spans.items():
            for s in spans:
                out[s.request][frame.name(point)] = frame.tensors[point][s.rows].clone()
    return out


def relative(a: torch.Tensor, r: torch.Tensor) -> float:
    """Largest relative L2 of a row of a against r."""
    a, r = a.flatten(1).double(), r.flatten(1).double()
    return float(((a - r).norm(dim=1) / r.norm(dim=1).clamp(min=1e-300)).max()) if len(a) else 0.0
