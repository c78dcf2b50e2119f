"""The oracle of an arm: the same semantics as one full-length pass with dense masks. No cache, no packing, no plan.

It repeats in a few lines what the plans, slots and blocks of the executor say in many: rows from s on see no window
key below s; in the decoder half rows from t on see none below t; global entries of the prefix are full's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from replayscope.inspector.cores import fitting
from replayscope.inspector.geometry import Geometry
from replayscope.model.reference import Frame, Rules, State, dense_pass
from replayscope.model.weights import Model


def hit_used(cut: int | None, replay: int | None, semantics: str) -> int:
    """Tokens of the hit that an arm builds on: vLLM drops a hit that the replay would cover whole."""
    dropped = semantics == "vllm-0.33" and (cut or 0) <= (replay or 0)
    return 0 if dropped else cut or 0


def boundary(
    config: Geometry,
    arm: str,
    cut: int | None,
    replay: int | None,
    prompt_end: int,
    layer: int,
    semantics: str = "paper",
    chunks: int | tuple[int, ...] | None = None,
) -> int | list[int]:
    """Position from which on rows of ``layer`` see no window key below it, or, if the prompt came in chunks, the lowest
    key of each row [prompt_end]."""
    W = config.sliding_window
    s = max(0, hit_used(cut, replay, semantics) - (replay or 0)) if arm in ("encoder", "exact", "both") else 0
    source_is_whole = semantics in ("vllm-0.33", "sglang-day0")
    if arm not in ("decoder", "both") or layer < config.decoder_start + source_is_whole:
        return s
    if chunks is None or semantics in ("paper", "tokenspeed"):
        return max(s, prompt_end - W)
    inner = range(s + chunks, prompt_end, chunks) if isinstance(chunks, int) else chunks
    lowest = [s] * min(s, prompt_end)
    for first, end in pairwise([s, *(e for e in inner if s < e < prompt_end), prompt_end]):
        short = semantics == "vllm-0.33" and end - first <= W
        lowest += [s if short else max(s, end - W)] * (end - first)
    return lowest


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

    selection: "sparse" (top-k) or "dense" (every visible entry). topk, experts: layer → choices of the executor's full
    [1, N, k], which passes take whose choices are frozen. states: where each pass stands.
    """

    model: Model
    ids: Tensor
    selection: str = "sparse"
    topk: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    _entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    _passes: list[Iterator[Frame]] = field(default_factory=list)

    @torch.no_grad()
    def add(
        self,
        arm: str,
        cut: int | None,
        replay: int | None,
        prompt_end: int,
        stop: int,
        semantics: str = "paper",
        chunks: int | tuple[int, ...] | None = None,
        frozen: tuple[str, ...] = (),
    ) -> None:
        """Another pass over ids[:stop]; the first one added must be ``full`` over all tokens.

        frozen: which choices are full's, of "topk" and "experts".
        """
        if not self._passes and arm != "full":
            raise ValueError("the first oracle is that of full: the others read its global entries")
        c = self.model.config
        used = hit_used(cut, replay, semantics)

        def lowest(layer: int) -> int | Tensor:
            at = boundary(c, arm, cut, replay, prompt_end, layer, semantics, chunks)
            if isinstance(at, int):
                return at
            # Decoded rows see their whole window: no prefill chunk is theirs.
            return torch.tensor(at + [0] * (stop - len(at)), device=self.ids.device)[:, None]

        rules = Rules(
            boundary=lowest,
            prefix=_Prefix(self._entries, c, used) if used else {},
            selection=self.selection,
            topk=Frozen(self.topk, stop) if "topk" in frozen else {},
            experts=Frozen(self.experts, stop) if "experts" in frozen else {},
        )
        ids = self.ids[None, :stop]
        self.states.append(State.begin(self.model, ids))
        self._passes.append(dense_pass(self.model, ids, rules, self.states[-1]))

    @torch.no_grad()
    def step(self) -> list[Frame]:
        """The next frame of every pass, in the order in which they were added."""
        frames = []
        for i, one in enumerate(self._passes):
            with fitting(self.ids.shape[-1], self.model.config.hidden_size):
                frame = next(one)
            if i == 0 and "global_kv" in frame.tensors and frame.layer is not None:
                self._entries[frame.layer] = frame.tensors["global_kv"], frame.tensors["index_k"]
            frames.append(frame)
        return frames


@dataclass
class _Prefix(Mapping[int, tuple[int, Tensor, Tensor]]):
    """kv source → (entries wholly below the cut, full's global KV, full's index keys)."""

    entries: Mapping[int, tuple[Tensor, Tensor]]
    config: Geometry
    cut: int

    def __getitem__(self, layer: int) -> tuple[int, Tensor, Tensor]:
        kv, key = self.entries[layer]
        return self.cut // self.config.compress_ratios[layer], kv, key

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
