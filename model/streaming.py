"""A model of which one layer at a time is in memory: for checkpoints that are larger than it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, cast, overload

import torch
from torch import Tensor

from replayscope.model.checkpoint import Checkpoint
from replayscope.model.manifest import expert_name
from replayscope.model.placement import Where
from replayscope.model.weights import Layer, Model


@dataclass(frozen=True)
class StreamedModel(Model):
    """A model whose layers and head are read when they are asked for, and only the last one read is kept.

    It is as fast as it is walked layer by layer, by everything that runs in step.
    """

    @property
    def kernel_devices(self) -> tuple[torch.device, ...]:
        """The devices that layers lie on, each once, without reading a layer."""
        assert isinstance(self.layers, _Layers)
        return tuple(dict.fromkeys(self.layers.places))


def streamed(checkpoint: Checkpoint, dtype: torch.dtype, where: Where = "cpu") -> StreamedModel:
    """The model of a checkpoint, streamed. Raises WeightsError, here or when a layer is read, for values not finite."""
    current, places = _Current(checkpoint), checkpoint.places(where)
    return StreamedModel(
        config=checkpoint.config,
        embed=checkpoint.table("embed.weight", dtype, places[0]),
        head=cast(Tensor, _Head(current, dtype, places[-1])),
        norm=checkpoint.read("norm.weight", dtype, places[-1]),
        layers=_Layers(current, dtype, places),
    )


class _Current:
    """The one part of the model that is decoded: a layer by its number, or the head."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.key: int | str | None = None
        self.value: Any = None

    def take(self, key: int | str, load: Callable[[], Any]) -> Any:
        if key != self.key:
            # The old part goes first, so that two never stand beside each other.
            self.key = self.value = None
            self.checkpoint.release()
            self.value, self.key = load(), key
        return self.value


@dataclass(frozen=True)
class _Layers(Sequence[Layer]):
    """Layer l is decoded when it is asked for, its routed experts one by one when rows are routed to them."""

    current: _Current
    dtype: torch.dtype
    places: tuple[torch.device, ...]

    def __len__(self) -> int:
        return self.current.checkpoint.config.num_hidden_layers

    @overload
    def __getitem__(self, at: int) -> Layer: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Layer]: ...
    def __getitem__(self, at: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(at, slice):
            raise TypeError("a streamed model hands out one layer at a time")
        l = range(len(self))[at]
        return self.current.take(l, lambda: self._load(l))

    def _load(self, l: int) -> Layer:
        c = self.current.checkpoint
        if l + 1 < len(self):
            # In a thread: where the disk is slow the call itself waits for it.
            Thread(target=c.read_ahead, args=(c.layer_names(l + 1),), daemon=True).start()
        c.check_scales(n for n in c.layer_names(l) if ".ffn.experts." in n)

        def stack(part: str) -> Tensor:
            return cast(Tensor, StoredExperts(partial(self._expert, l, part)))

        return c.layer(l, self.dtype, self.places[l], stack)

    def _expert(self, l: int, part: str, e: int) -> Tensor:
        checkpoint, name = self.current.checkpoint, expert_name(l, e, part)
        value = checkpoint.read(name, self.dtype, self.places[l])
        checkpoint.release(name)
        return value


@dataclass(frozen=True)
class StoredExperts:
    """Stands in for a layer's w1, w2 or w3 [E, out, in]: ``stored[e]`` decodes expert e."""

    read: Callable[[int], Tensor]

    def __getitem__(self, e: int) -> Tensor:
        return self.read(e)


@dataclass(frozen=True)
class _Head:
    """Stands in for the head [V, d], of which only ``to`` is asked."""

    current: _Current
    dtype: torch.dtype
    device: torch.device

    def to(self, dtype: torch.dtype) -> Tensor:
        head = self.current.take("head", lambda: self.current.checkpoint.read("head.weight", self.dtype, self.device))
        return head.to(dtype)
