"""The past of a Hugging Face model under a plan: which keys each request may read, and the masks that go with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from replayscope.inspector.plan import Plan
from replayscope.model.hf_config import HFConfig
from replayscope.model.hf_passes import current

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """Positions [first, stop) of one request: one row of a pass's batch."""

    request: int
    first: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.first


class KeyValues:
    """Keys and values that the requests of a plan computed, [heads, rows, d] each: in the layer that runs now, or, with
    ``keep``, in every layer, so that a later pass can go on.

    A request's own rows lie with it; what it reads below them it reads from its owners, which ran before it.
    compared, changed: per request the cached entries whose bytes were held against a copy made when they were written.
    """

    def __init__(self, plan: Plan, config: HFConfig, keep: bool = False) -> None:
        self.plan, self.config, self.keep = plan, config, keep
        n = len(plan.requests)
        self.compared, self.changed = [0] * n, [0] * n
        # By layer and request, with room for every row that the request runs.
        self._own: dict[tuple[int, int], KV] = {}
        self._running: tuple[int, ...] = ()
        # Owner → how many of its entries are kept by a request that runs, and a copy of these.
        self._kept: dict[int, int] = {}
        self._copies: dict[int, KV] = {}

    def run(self, requests: Iterable[int]) -> None:
        """Say which requests run next: what they keep of their owners is watched."""
        self._running = tuple(requests)
        self._kept = {}
        for i in self._running:
            r = self.plan.requests[i]
            if kept := r.kept_entries(1):
                owner = self.plan.owner(r.prefix)
                self._kept[owner] = max(kept, self._kept.get(owner, 0))

    def begin(self, layer: int | None) -> None:
        """Forget the layer before, unless it is kept; copy what of this layer's entries is there already."""
        if not self.keep:
            self._own.clear()
        self._copies = {}
        if layer is not None and self.config.kv_source(layer) == layer:
            for owner, kept in self._kept.items():
                if own := self._own.get((layer, owner)):
                    self._copies[owner] = own[0][:, :kept].clone(), own[1][:, :kept].clone()

    def write(self, rows: Rows, layer: int, k: Tensor, v: Tensor) -> None:
        """The request's own rows; of a global layer's only those that the request adds, the others stay as they are."""
        r = self.plan.requests[rows.request]
        at = layer, rows.request
        if at not in self._own:
            self._own[at] = _room(k, r.stop - r.start), _room(v, r.stop - r.start)
        first = rows.first if self._slides(layer) else max(rows.first, min(r.first_entry[layer], rows.stop))
        pairs = list(zip(self._own[at], (k[:, first - rows.first :], v[:, first - rows.first :]), strict=True))
        for own, new in pairs:
            own[:, first - r.start : rows.stop - r.start] = new
        kept = self._kept.get(rows.request, 0)
        if first < kept and not self._slides(layer):
            copies = self._copies.setdefault(rows.request, (_room(k, kept), _room(v, kept)))
            stop = min(rows.stop, kept)
            for copy, (_, new) in zip(copies, pairs, strict=True):
                copy[:, first:stop] = new[:, : stop - first]

    def parts(self, rows: Rows, layer: int) -> list[Rows]:
        """Whose positions a layer reads for these rows, in ascending order: owners' below the own ones."""
        r = self.plan.requests[rows.request]
        if self._slides(layer):
            lowest = max(rows.first - r.window + 1, 0)
            below = Rows(self.plan.owner(r.window_owner), lowest, r.start)
            own = Rows(rows.request, max(lowest, r.start), rows.stop)
        else:
            # An arm that writes over the prefix reads its own rows there.
            first = r.first_entry[layer] if r.private_prefix else r.kept_entries(1)
            below = Rows(self.plan.owner(r.prefix), 0, first)
            own = Rows(rows.request, max(first, r.start), rows.stop)
        return [part for part in (below, own) if part.request >= 0 and part.count > 0]

    def read(self, rows: Rows, layer: int) -> KV:
        """Keys and values at the positions of ``parts``."""
        pieces = []
        for part in self.parts(rows, layer):
            start = self.plan.requests[part.request].start
            at = slice(part.first - start, part.stop - start)
            pieces.append(tuple(x[:, at] for x in self._own[layer, part.request]))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([p[0] for p in pieces], 1), torch.cat([p[1] for p in pieces], 1)

    def check(self, layer: int) -> None:
        """Compare the bytes of every cached entry, as its request reads it, with those that its owner wrote."""
        if self.config.kv_source(layer) != layer:
            return
        moved = {o: self._changed(o, self._own[layer, o], 0, kept) for o, kept in self._kept.items()}
        for i in self._running:
            r = self.plan.requests[i]
            kept, owner = r.kept_entries(1), self.plan.owner(r.prefix)
            if not kept:
                continue
            changed = int(moved[owner][:kept].sum())
            if r.private_prefix:
                first, (k, v) = r.first_entry[layer], self._own[layer, i]
                at = slice(first - r.start, kept - r.start)
                changed += int(self._changed(owner, (k[:, at], v[:, at]), first, kept).sum())
            self.compared[i] += kept
            self.changed[i] += changed

    def _slides(self, layer: int) -> bool:
        return self.config.window_source(layer) is not None

    def _changed(self, owner: int, now: KV, first: int, stop: int) -> Tensor:
        """Entries [first, stop) that differ in any byte from what their owner wrote: bool [stop - first].

        now: of these entries, and of any that lie behind them.
        """
        pairs = zip(now, self._copies[owner], strict=True)
        k, v = (_differs(x[:, : stop - first], copy[:, first:stop]) for x, copy in pairs)
        return k | v


def _room(like: Tensor, rows: int) -> Tensor:
    """Space for rows of [heads, rows, d]: nothing may be read of it that was not written."""
    return like.new_empty(like.shape[0], rows, like.shape[2])


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Rows of [heads, rows, d] in which any byte differs: bool [rows]."""
    bits = [x.contiguous().view(torch.uint8) for x in (a, b)]
    return (bits[0] != bits[1]).any(-1).any(0)


class ReplayCache(Cache):
    """Answers ``update`` with what the requests of one pass may read; holds nothing itself.

    batch: one entry per batch row, all with the same number of rows.
    """

    def __init__(self, kv: KeyValues, batch: Sequence[Rows]) -> None:
        # transformers wants a layer object for each layer; these stay empty.
        super().__init__(layers=[DynamicLayer() for _ in kv.config.layers])
        self.kv, self.batch = kv, batch

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KV:
        one = current()
        if one is not None:
            point = "window_kv" if self.kv.config.window_source(layer_idx) is not None else "global_kv"
            if point in one.want:
                one.keep(point, side_by_side(key_states, value_states))
        for rows, k, v in zip(self.batch, key_states, value_states, strict=True):
            self.kv.write(rows, layer_idx, k, v)
        read = [self.kv.read(rows, layer_idx) for rows in self.batch]
        if len(read) == 1:
            return read[0][0][None], read[0][1][None]
        return _padded([k for k, _ in read]), _padded([v for _, v in read])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.batch[0].first

    def mask(self, layer: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """0 where a row may see a key and the lowest number elsewhere: [B, 1, rows, keys], keys as ``update`` answers.

        Query i sees keys up to i; in a window layer none below max(floor, i - W + 1).
        """
        source = self.kv.config.sources[layer]
        keys = [
            [p for part in self.kv.parts(rows, source) for p in range(part.first, part.stop)] for rows in self.batch
        ]
        longest = max(map(len, keys))
        position = torch.tensor([k + [-1] * (longest - len(k)) for k in keys], device=device)[:, None]
        query = torch.tensor([list(range(rows.first, rows.stop)) for rows in self.batch], device=device)[..., None]
        seen = (position >= 0) & (position <= query)
        if self.kv.config.window_source(layer) is not None:
            requests = [self.kv.plan.requests[rows.request] for rows in self.batch]
            floor = torch.tensor([r.floor[layer] for r in requests], device=device)[:, None, None]
            window = torch.tensor([r.window for r in requests], device=device)[:, None, None]
            seen &= (position >= floor) & (position > query - window)
        return additive(seen, dtype)[:, None]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores: 0 where seen, the lowest finite number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [B, heads, rows, dk], [B, heads, rows, dv] as one hook point [B, rows, heads, dk + dv]."""
    return torch.cat((k, v), -1).transpose(1, 2)


def _padded(tensors: list[Tensor]) -> Tensor:
    """[heads, keys, d] of different lengths as [B, heads, keys, d], zeros behind; a mask hides them."""
    longest = max(t.shape[1] for t in tensors)
    return torch.stack([torch.nn.functional.pad(t, (0, 0, 0, longest - t.shape[1])) for t in tensors])
