"""The oracle of an arm: the same semantics as one full-length pass with dense masks. No cache, no packing, no plan.

It repeats in three lines what the plans, slots and blocks of the executor say in many: rows from s on see no window
key below s; in the decoder half rows from t on see none below t; global entries of the prefix are full's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.reference import Frame, Rules, dense_pass
from replayscope.model.weights import Model


def boundary(config: ModelConfig, arm: str, cut: int | None, replay: int | None, prompt_end: int, layer: int) -> int:
    """Position from which on rows of ``layer`` see no window key below it."""
    W = config.sliding_window
    s = max(0, (cut or 0) - (replay or 0)) if arm in ("encoder", "exact", "both") else 0
    if arm in ("decoder", "both") and layer >= config.decoder_start:
        return max(s, prompt_end - W)
    return s


@dataclass
class Frozen(Mapping[int, Tensor]):
    """layer → full's ids [1, stop, k], read from a shared mapping that fills as the layers go by."""

    source: Mapping[int, Tensor]
    stop: int

    def __getitem__(self, layer: int) -> Tensor:
        return self.source[layer][:, : self.stop]

    def __iter__(self) -> Iterator[int]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


@dataclass
class Oracles:
    """Oracle passes walked in step: ``full`` first, whose global entries the others take for their prefix.

    choices: layer → (top-k, experts) of the executor's full, [1, N, k] each, if discrete choices are frozen.
    """

    model: Model
    ids: Tensor
    topk: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    _entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _passes: list[Iterator[Frame]] = field(default_factory=list)

    def add(self, arm: str, cut: int | None, replay: int | None, prompt_end: int, stop: int) -> None:
        """Another pass over ids[:stop]; the first one added must be ``full`` over all tokens."""
        if not self._passes and arm != "full":
            raise ValueError("the first oracle is that of full: the others read its global entries")
        c = self.model.config
        rules = Rules(
            boundary=lambda layer: boundary(c, arm, cut, replay, prompt_end, layer),
            prefix=_Prefix(self._entries, c, cut or 0) if cut else {},
            topk=Frozen(self.topk, stop),
            experts=Frozen(self.experts, stop),
        )
        self._passes.append(dense_pass(self.model, self.ids[None, :stop], rules))

    @torch.no_grad()
    def step(self) -> list[Frame]:
        """The next frame of every pass, in the order in which they were added."""
        frames = []
        for i, one in enumerate(self._passes):
            frame = next(one)
            if i == 0 and "global_kv" in frame.tensors and frame.layer is not None:
                self._entries[frame.layer] = frame.tensors["global_kv"], frame.tensors["index_k"]
            frames.append(frame)
        return frames


@dataclass
class _Prefix(Mapping[int, tuple[int, Tensor, Tensor]]):
    """kv source → (entries wholly below the cut, full's global KV, full's index keys)."""

    entries: Mapping[int, tuple[Tensor, Tensor]]
    config: ModelConfig
    cut: int

    def __getitem__(self, layer: int) -> tuple[int, Tensor, Tensor]:
        kv, key = self.entries[layer]
        return self.cut // self.config.compress_ratios[layer], kv, key

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
