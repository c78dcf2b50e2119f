"""Decoding after each arm: every step is one more row of every request, over the state that the arm left."""

from dataclasses import dataclass

import torch
from torch import Tensor

from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.plan import Plan
from replayscope.model.streaming import StreamedModel
from replayscope.model.weights import Model


@dataclass(frozen=True)
class Generated:
    """ids [requests, steps]: the tokens produced; logits [requests, steps, V]: what each was chosen from."""

    ids: Tensor
    logits: Tensor

    def first_difference(self, request: int, reference: int = 0) -> int | None:
        """Step at which a request's tokens first differ from the reference's, or None."""
        apart = (self.ids[request] != self.ids[reference]).nonzero()
        return int(apart[0]) if len(apart) else None


def generate(
    model: Model,
    plan: Plan,
    tokens: dict[str, Tensor],
    steps: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    executor: Executor | None = None,
) -> Generated:
    """Prefill every request of the plan to its prompt_end, then decode ``steps`` tokens.

    The plan is made for N + steps tokens of which the last ``steps`` are forced (their ids are placeholders that the
    produced tokens replace). temperature 0 is greedy; above it, one uniform number per step is shared by all requests,
    so that arms with equal logits produce equal tokens. Raises ValueError if a request leaves no room,
    and UsageError for a streamed model.
    """
    if isinstance(model, StreamedModel):
        raise UsageError("generation reads every layer again for each token; give a model that fits into memory")
    ex = executor or Executor(model, keep_state=True)
    if not ex.settings.keep_state or ex.settings.frozen:
        raise ValueError("generation needs an executor that keeps its state and chooses for itself")
    for r in plan.requests:
        if r.stop - r.prompt_end < steps:
            raise ValueError(f"{r.name} ends at {r.stop}: no room for {steps} tokens after {r.prompt_end}")
    draws = torch.rand(steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ex.start(plan, tokens)
    stops = [r.prompt_end for r in plan.requests]
    ids, logits = [], []
    for step in range(steps):
        last = _last_logits(ex, stops)
        chosen = last.argmax(-1) if temperature == 0 else _sample(last, temperature, float(draws[step]))
        for i, token in enumerate(chosen.tolist()):
            ex.ids[i][stops[i]] = token
        ids.append(chosen.cpu())
        logits.append(last)
        stops = [s + 1 for s in stops]
    return Generated(torch.stack(ids, 1), torch.stack(logits, 1))


def _last_logits(ex: Executor, stops: list[int]) -> Tensor:
    """Advance to ``stops`` and return the logits [requests, V] of every request's last row."""
    for frame in ex.advance(stops, frozenset({"logits"})):
        if "logits" in frame.tensors:
            rows = [s.at + s.count - 1 for s in frame.spans["logits"]]
            return frame.tensors["logits"][rows].clone()
    raise AssertionError("the executor's last frame holds the logits")


def _sample(logits: Tensor, temperature: float, draw: float) -> Tensor:
    """Inverse of the cumulative distribution, in order of token id, at ``draw`` in [0, 1)."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return (cumulative < draw * cumulative[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
