"""Forward passes of one model, walked in step: each stops at the end of every layer until it is its turn again."""

from collections.abc import Callable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from replayscope.model.hf_wide import widened

States = dict[str, Tensor]


class Pass(greenlet):
    """One forward. ``step`` runs it to the end of the next layer and returns what was captured, by point [B, rows, …].

    First what came before layer 0, then every layer, then what comes behind the last. forward: calls the model and
    returns its logits. want: points to capture. A greenlet, not a thread: one runs at a time, on the same stack of
    torch's modes, so that ``no_grad`` and fp64 hold for all.
    """

    def __init__(self, forward: Callable[[], Tensor], dtype: torch.dtype, want: frozenset[str]) -> None:
        super().__init__()
        self.forward, self.dtype, self.want = forward, dtype, want
        self.states: States = {}
        # Where each layer of this pass runs, and what scores its router chose by.
        self.layer: int | None = None
        self.scores: Tensor | None = None
        # Experts that its rows take in the next layer instead of their own choice, ascending [B·rows, k].
        self.forced: Tensor | None = None

    def run(self) -> States:
        logits = self.forward()
        self.keep("logits", logits)
        return self._taken()

    def step(self) -> States:
        """Raises whatever the model raises."""
        self.parent = getcurrent()
        with torch.no_grad(), widened(self.dtype):
            return self.switch()

    def keep(self, point: str, value: Tensor) -> None:
        """Store a copy: what the model holds may be written over before the layer ends."""
        if point in self.want:
            self.states[point] = value.detach().clone()

    def hand_over(self) -> None:
        """Called from inside the forward when a layer is done: the others have their turn."""
        assert self.parent is not None
        self.parent.switch(self._taken())

    def close(self) -> None:
        """Leave the forward where it stands."""
        if self and not self.dead:
            self.throw(GreenletExit)

    # What the hooks ask of a pass; the passes of arms answer with the masks of their cache.
    def mask(self, layer: int, device: torch.device) -> Tensor | None:
        return None

    def _taken(self) -> States:
        taken, self.states = self.states, {}
        return taken


def current() -> Pass | None:
    """The pass whose forward is running, or None where the model is called by someone else."""
    running: Any = getcurrent()
    return running if isinstance(running, Pass) else None
