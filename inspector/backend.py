"""What the use cases ask of whoever computes a model. Our own executor meets it, and that of Hugging Face models."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from replayscope.inspector.frame import Frame
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.layout import PrefixCheck
from replayscope.inspector.plan import Plan
from replayscope.model import reference


class Runnable(Protocol):
    """A loaded model."""

    @property
    def config(self) -> Geometry: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def kernel_devices(self) -> tuple[torch.device, ...]:
        """Where its tensors meet our kernels, each device once."""
        ...


class OraclePasses(Protocol):
    """Oracle passes walked in step with an engine. topk, experts: layer → full's choices, for those frozen to them."""

    topk: dict[int, Tensor]
    experts: dict[int, Tensor]

    def add(
        self, arm: str, cut: int | None, replay: int | None, prompt_end: int, stop: int, semantics: str = "paper",
        chunks: int | tuple[int, ...] | None = None, frozen: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Another pass; the first one is that of ``full``."""
        ...

    def step(self) -> list[reference.Frame]:
        """The next frame of every pass."""
        ...


class Engine(Protocol):
    """Runs the requests of a plan layer by layer. taps: called with every frame."""

    taps: list[Callable[[Frame], None]]

    @property
    def model(self) -> Runnable: ...
    @property
    def prefix_check(self) -> PrefixCheck: ...

    def run(self, plan: Plan, tokens: dict[str, Tensor], want: frozenset[str] = frozenset()) -> Iterator[Frame]:
        """A frame of ``embed``, of each layer, and of ``final`` and ``logits``."""
        ...

    def oracles(self, ids: Tensor, dense: bool) -> OraclePasses:
        """Oracles over ids [N]; dense: attention over every visible entry."""
        ...


class Decoder(Engine, Protocol):
    """An engine that goes on where it stands: prefill, then decoding, token by token or forced, then further turns.

    ids: per request the tokens that it runs; those behind a prompt may be written between two calls. done: the row at
    which each stands, which may be moved back: what is run again is written anew. decodes: False if it keeps no state.
    """

    ids: list[Tensor]
    done: list[int]
    plan: Plan

    @property
    def decodes(self) -> bool: ...

    def start(self, plan: Plan, tokens: dict[str, Tensor]) -> None:
        """Take up a plan; nothing has run."""
        ...

    def advance(
        self, stops: list[int], want: frozenset[str] = frozenset(), *, tail: int | None = None
    ) -> Iterator[Frame]:
        """Run request i up to row stops[i]; of each request the logits of the last ``tail`` rows, or of all."""
        ...

    def go_on(self, plan: Plan, done: list[int]) -> None:
        """Swap the rules of the requests over the state that they have; each stands at done[i]."""
        ...
