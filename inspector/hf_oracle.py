"""The oracle of an arm on a Hugging Face model: one full-length forward without a cache, under dense masks.

Rows from s on see no window key below s; in global layers the keys and values of the prefix are those of ``full``'s own
oracle. Both are said in an attention function that transformers calls instead of its own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replayscope.inspector.oracle import boundary, hit_used
from replayscope.model.hf import HFModel
from replayscope.model.hf_hooks import hooked
from replayscope.model.hf_passes import Pass, current
from replayscope.model.reference import Frame

_NAME = "replayscope_oracle"
KV = tuple[Tensor, Tensor]


@dataclass
class HFOracles:
    """Oracle passes walked in step; the same calls as ``oracle.Oracles``. ids [N].

    experts: full's, layer → ids [1, N, k], which frozen passes take. topk: there is none.
    """

    model: HFModel
    ids: Tensor
    topk: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    _full: dict[int, KV] = field(default_factory=dict)
    _passes: list["_OraclePass"] = field(default_factory=list)
    _done: int = 0

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
        """Another pass over ids[:stop]; the first one added must be ``full`` over all tokens."""
        if not self._passes and arm != "full":
            raise ValueError("the first oracle is that of full: the others read its global KV")
        lowest = boundary(self.model.config, arm, cut, replay, prompt_end, 0, semantics, chunks)
        assert isinstance(lowest, int)
        kept = hit_used(cut, replay, semantics)
        one = _OraclePass(self.model, self.ids[:stop], lowest, kept, self._full, not self._passes)
        one.frozen = "experts" in frozen
        self._passes.append(one)

    def step(self) -> list[Frame]:
        """The next frame of every pass, in the order in which they were added."""
        layers = self.model.config.num_hidden_layers
        layer = self._done - 1 if 1 <= self._done <= layers else None
        self._done += 1
        chosen = None if layer is None else self.experts.get(layer)
        for one in self._passes:
            one.forced = chosen[0, : len(one.ids)] if one.frozen and chosen is not None else None
        with hooked(self.model.parts), self._attending():
            return [Frame(layer, one.frame()) for one in self._passes]

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """The model's attention goes through ``_attend`` meanwhile."""
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        config = self.model.text_config
        before = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before


class _OraclePass(Pass):
    """lowest: s. kept: prefix positions whose global KV is full's. full: its KV of the layer that runs now."""

    def __init__(self, model: HFModel, ids: Tensor, lowest: int, kept: int, full: dict[int, KV], first: bool) -> None:
        super().__init__(self._forward, model.dtype, _POINTS)
        self.model, self.ids, self.lowest, self.kept, self.full, self.first = model, ids, lowest, kept, full, first
        self.at = torch.arange(len(ids), device=ids.device)
        self.frozen = False

    def _forward(self) -> Tensor:
        return self.model.logits(self.ids[None], self.at[None], None, None)

    def frame(self) -> dict[str, Tensor]:
        found = self.step()
        for point in ("router", "router_margin"):
            if point in found:
                found[point] = found[point][None]
        return {point: x.to(self.model.home) for point, x in found.items()}

    def attend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask [rows, keys] of a layer."""
        c = self.model.config
        row, key = self.at[:, None].to(k.device), self.at[None].to(k.device)
        seen = key <= row
        if c.role(layer) == "window":
            seen &= (row - key < c.sliding_window) & ((key >= self.lowest) | (row < self.lowest))
            return self._kept(layer, k, v, "window_kv", seen)
        if self.first:
            self.full.clear()
            self.full[layer] = k, v
        elif self.kept:
            theirs = self.full[layer]
            k = torch.cat((theirs[0][:, :, : self.kept], k[:, :, self.kept :]), 2)
            v = torch.cat((theirs[1][:, :, : self.kept], v[:, :, self.kept :]), 2)
        return self._kept(layer, k, v, "global_kv", seen)

    def _kept(self, layer: int, k: Tensor, v: Tensor, point: str, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.model.config.has(point, layer):
            self.keep(point, torch.cat((k, v), -1).transpose(1, 2))
        return k, v, seen


_POINTS = frozenset(
    ("embed", "attn_in", "window_kv", "global_kv", "attn_out", "router", "ffn_out", "hidden", "final", "logits")
)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """What transformers calls as attention: the module's own eager form on the keys and under the mask of the pass."""
    one = current()
    assert isinstance(one, _OraclePass) and one.layer is not None
    eager: Callable = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    key, value, seen = one.attend(one.layer, key, value)
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=seen.device)
    mask = mask.masked_fill(~seen, torch.finfo(query.dtype).min)[None, None]
    return eager(module, query, key, value, mask, **kwargs)
