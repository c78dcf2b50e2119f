"""Where every request's window rows and global entries lie in the pool, and whose they read below their own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replayscope.inspector.plan import Plan
from replayscope.inspector.pool import Pool
from replayscope.model.weights import Model


@dataclass
class PrefixCheck:
    """Per request: cached global entries whose bytes were compared with full's, and how many of them differed."""

    compared: list[int]
    changed: list[int]


class Layout:
    """Slots of one plan. A position or entry at or above a request's start lies with it, one below lies with its owner.

    starts, window_shift, owner_shift [requests]: position + shift is the slot, own or the window owner's.
    prefix_owner: per request the one whose global entries it reads, -1 for none.
    """

    def __init__(self, plan: Plan, model: Model, pool: Pool) -> None:
        self.plan, self.model, self.pool = plan, model, pool
        requests = plan.requests
        self.starts = np.array([r.start for r in requests])
        window_base = _offsets([r.stop - r.start for r in requests])
        self.window_slots = int(window_base[-1])
        owner = np.array([plan.owner(r.window_owner) for r in requests])
        self.window_shift = window_base[:-1] - self.starts
        # A request without an owner owns every slot it may read, so the number that stands here is never used.
        self.owner_shift = np.where(owner < 0, 0, self.window_shift[owner])
        self.prefix_owner = [plan.owner(r.prefix) for r in requests]
        self._entry_base = {
            ratio: _offsets([r.stop // ratio - self.kept(i, ratio) for i, r in enumerate(requests)])
            for ratio in set(model.config.compress_ratios) - {0}
        }
        self.check = PrefixCheck([0] * len(requests), [0] * len(requests))
        # Where the layer that runs now is; each layer's slots lie on its own device.
        self.device = model.device
        self._home: dict[int, torch.device] = {}
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def window(self, layer: int | None) -> Tensor:
        """Window slots [slots, D] of a layer that keeps its own, or (None) the one buffer that all layers share."""
        name = "window" if layer is None else f"window.{layer}"
        return self.pool.take(name, (self.window_slots, self.model.config.head_dim), self.model.dtype, self.device)

    def entries(self, source: int) -> tuple[Tensor, Tensor]:
        """Global KV [slots, D] and index keys [slots, di] of a kv source, to be read where the layer runs.

        Away from the device of the source they are a copy, made once for each device.
        """
        home = self._home.get(source, self.device)
        if home == self.device:
            return self._stored(source, home)
        key = source, self.device
        if key not in self._copies:
            kv, index_k = self._stored(source, home)
            self._copies[key] = kv.to(self.device), index_k.to(self.device)
        return self._copies[key]

    def written(self, source: int) -> None:
        """Say that the layer that runs wrote entries: copies of them elsewhere are out of date."""
        self._home[source] = self.device
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != source}

    def _stored(self, source: int, device: torch.device) -> tuple[Tensor, Tensor]:
        c = self.model.config
        slots = int(self._entry_base[c.compress_ratios[source]][-1])
        kv = self.pool.take(f"global.{source}", (slots, c.head_dim), self.model.dtype, device)
        return kv, self.pool.take(f"index_k.{source}", (slots, c.index_head_dim), self.model.dtype, device)

    def kept(self, request: int, ratio: int) -> int:
        """Entries that lie with the prefix owner; a private prefix lies with the request itself."""
        r = self.plan.requests[request]
        return 0 if r.private_prefix else r.kept_entries(ratio)

    def own_entry(self, request: int, ratio: int) -> int:
        """Slot of entry 0 of the request, as if none lay with an owner."""
        return int(self._entry_base[ratio][request]) - self.kept(request, ratio)

    def first_entries(self, pool: Tensor, request: int, seen: int, ratio: int) -> list[Tensor]:
        """The request's entries 0 … seen-1 in ``pool`` as one part, or as kept prefix and own part."""
        kept, own = min(self.kept(request, ratio), seen), self.own_entry(request, ratio)
        parts = [pool[own + kept : own + seen]]
        if kept:
            other = self.own_entry(self.prefix_owner[request], ratio)
            parts.insert(0, pool[other : other + kept])
        return parts

    def copy_prefix(self, pools: tuple[Tensor, Tensor], request: int, ratio: int) -> None:
        """Give a request with a private prefix its own copy of the owner's entries."""
        kept, mine = self.plan.requests[request].kept_entries(ratio), self.own_entry(request, ratio)
        other = self.own_entry(self.prefix_owner[request], ratio)
        for pool in pools:
            pool[mine : mine + kept] = pool[other : other + kept]

    def snapshot(self, pools: tuple[Tensor, Tensor], ratio: int) -> dict[int, list[Tensor]]:
        """Copies of every prefix owner's entries, to be held against later."""
        owners = {o for o in self.prefix_owner if o >= 0}
        stops = {o: self.plan.requests[o].stop // ratio for o in owners}
        return {o: [self.first_entries(p, o, stops[o], ratio)[0].clone() for p in pools] for o in owners}

    def check_prefix(self, pools: tuple[Tensor, Tensor], before: dict[int, list[Tensor]], ratio: int) -> None:
        """Compare, byte by byte, every request's kept entries with what their owner had written."""
        # What is read where its owner wrote it is the same for all who read it, and is compared once.
        changed = {o: self._changed(pools, o, old, ratio) for o, old in before.items()}
        for i, r in enumerate(self.plan.requests):
            kept, owner = r.kept_entries(ratio), self.prefix_owner[i]
            if not kept:
                continue
            own = r.private_prefix
            entries = self._changed(pools, i, [old[:kept] for old in before[owner]], ratio) if own else changed[owner]
            self.check.compared[i] += kept
            self.check.changed[i] += sum(entry < kept for entry in entries)

    def _changed(self, pools: tuple[Tensor, Tensor], request: int, old: list[Tensor], ratio: int) -> list[int]:
        """Of the request's own first entries the numbers of those whose bytes are not ``old``'s."""
        changed = torch.zeros(len(old[0]), dtype=torch.bool, device=self.device)
        for pool, was in zip(pools, old, strict=True):
            now = self.first_entries(pool, request, len(was), ratio)[0]
            changed |= (now.view(torch.uint8) != was.view(torch.uint8)).any(-1)
        return changed.nonzero()[:, 0].tolist()


def _offsets(counts: list[int]) -> np.ndarray:
    """Start of each of the laid-out pieces, and the end of the last [n+1]."""
    return np.concatenate(([0], np.cumsum(counts)))
