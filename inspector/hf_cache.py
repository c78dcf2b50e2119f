"""The past of a Hugging Face model under a plan: which keys each request may read, and the masks that go with them."""

from collections.abc import Sequence
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
    """Keys and values that the requests of a plan computed in the layer that runs now, [heads, rows, d] each.

    A request's own rows lie with it; what it reads below them it reads from its owners, which ran before it.
    compared, changed: per request the cached entries whose bytes were held against a copy made when they were written.
    """

    def __init__(self, plan: Plan, config: HFConfig) -> None:
        self.plan, self.config = plan, config
        n = len(plan.requests)
        self.compared, self.changed = [0] * n, [0] * n
        self._owners = {plan.owner(r.prefix) for r in plan.requests} - {-1}
        self._own: dict[int, KV] = {}
        self._copies: dict[int, KV] = {}

    def begin(self) -> None:
        """Forget the layer before."""
        self._own.clear()
        self._copies.clear()

    def write(self, rows: Rows, k: Tensor, v: Tensor) -> None:
        """The request's next own rows."""
        before = self._own.get(rows.request)
        new = (k, v) if before is None else (torch.cat((before[0], k), 1), torch.cat((before[1], v), 1))
        self._own[rows.request] = new
        if rows.request in self._owners:
            self._copies[rows.request] = new[0].clone(), new[1].clone()

    def parts(self, rows: Rows, layer: int) -> list[Rows]:
        """Whose positions a layer reads for these rows, in ascending order: owners' below the own ones."""
        r = self.plan.requests[rows.request]
        if self.config.window_source(layer) is not None:
            lowest = max(rows.first - r.window + 1, 0)
            below = Rows(self.plan.owner(r.window_owner), lowest, r.start)
            own = Rows(rows.request, max(lowest, r.start), rows.stop)
        else:
            below = Rows(self.plan.owner(r.prefix), 0, r.first_entry[layer])
            own = Rows(rows.request, max(r.first_entry[layer], r.start), rows.stop)
        return [part for part in (below, own) if part.request >= 0 and part.count > 0]

    def read(self, rows: Rows, layer: int) -> KV:
        """Keys and values at the positions of ``parts``."""
        pieces = []
        for part in self.parts(rows, layer):
            start = self.plan.requests[part.request].start
            at = slice(part.first - start, part.stop - start)
            pieces.append(tuple(x[:, at] for x in self._own[part.request]))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([p[0] for p in pieces], 1), torch.cat([p[1] for p in pieces], 1)

    def check(self, layer: int) -> None:
        """Compare the bytes of every cached entry, as its request reads it, with those that its owner wrote."""
        if self.config.kv_source(layer) != layer:
            return
        moved = {o: self._changed(o, self._own[o], 0, len(c[0][0])) for o, c in self._copies.items()}
        for i, r in enumerate(self.plan.requests):
            kept, owner = r.kept_entries(1), self.plan.owner(r.prefix)
            if not kept:
                continue
            changed = int(moved[owner][:kept].sum())
            if r.private_prefix:
                # An arm that writes over the prefix reads its own rows there.
                first, (k, v) = r.first_entry[layer], self._own[i]
                at = slice(first - r.start, kept - r.start)
                changed += int(self._changed(owner, (k[:, at], v[:, at]), first, kept).sum())
            self.compared[i] += kept
            self.changed[i] += changed

    def _changed(self, owner: int, now: KV, first: int, stop: int) -> Tensor:
        """Entries [first, stop) that differ in any byte from what their owner wrote: bool [stop - first]."""
        pairs = zip(now, self._copies[owner], strict=True)
        k, v = (_differs(x, copy[:, first:stop]) for x, copy in pairs)
        return k | v


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
            self.kv.write(rows, k, v)
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
