"""Experts that requests of a Hugging Face plan take from its first one, ``full``, in the layer that runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from replayscope.inspector.hf_cache import Rows
from replayscope.inspector.plan import Plan
from replayscope.model.hf_passes import States


class Choices:
    """every: all requests but the first take them, else those of the plan that are frozen."""

    def __init__(self, plan: Plan, every: bool) -> None:
        self.takes = tuple(i > 0 and (every or r.frozen) for i, r in enumerate(plan.requests))
        self._blocks: list[tuple[int, Tensor]] = []

    def begin(self) -> None:
        """Forget the layer before."""
        self._blocks.clear()

    def keep(self, batch: Sequence[Rows], found: States) -> None:
        """Remember what a pass of the first request chose; it runs alone, and before those that take it."""
        if batch[0].request == 0 and "router" in found:
            self._blocks.append((batch[0].first, found["router"]))

    def of(self, batch: Sequence[Rows]) -> Tensor | None:
        """What the rows of a pass take [B·rows, k]; None where they choose for themselves, or there are no experts."""
        if not self._blocks or not self.takes[batch[0].request]:
            return None
        first, chosen = self._blocks[0][0], torch.cat([ids for _, ids in self._blocks])
        return torch.cat([chosen[rows.first - first : rows.stop - first] for rows in batch])
