"""Writing global entries: pooling pairs across steps and owners, storing them, and watching the cached ones."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.inspector.layout import Layout
from replayscope.inspector.packing import Span, blocks, pack
from replayscope.kernels.compressor import compress_pairs
from replayscope.model import ops, rounding
from replayscope.model.weights import Layer


@dataclass(frozen=True)
class Settings:
    """block: rows computed together. reproducible: fixed tiles. frozen, frozen_experts: all choices, or the experts, of
    every request are the first request's. dense: attention over every visible entry instead of the top-k.

    keep_state: every layer's window KV stays in the pool. impl: ``torch`` or ``triton``, of every op that has both, or
    ``auto``, which a step turns into one of them on each device that it comes to.
    """

    block: int = 512
    reproducible: bool = False
    frozen: bool = False
    keep_state: bool = False
    frozen_experts: bool = False
    dense: bool = False
    impl: str = "torch"


@dataclass(frozen=True)
class Progress:
    """Where the requests stand: their token ids, the first row not yet run, and cos/sin tables by compressed or not."""

    ids: list[Tensor]
    done: list[int]
    ropes: dict[bool, tuple[Tensor, Tensor]]


class EntryWriter:
    """Turns the compressor's input of one step's rows into entries in their slots."""

    def __init__(self, layout: Layout, settings: Settings, now: Progress, spans: list[Span]) -> None:
        self.layout, self.settings, self.now, self.spans = layout, settings, now, spans
        self.model, self.config, self.pool, self.plan = layout.model, layout.model.config, layout.pool, layout.plan
        self.device = layout.device

    def write(self, l: int, w: Layer, compressor_in: dict[str, Tensor]) -> tuple[list[Span], dict[str, Tensor]]:
        """Pool, norm and store the entries that became complete; check that no kept entry's bytes changed.

        compressor_in: content (and for ratio 2 score) [rows, D] of the step's packed rows. Returns the entries' spans
        and tensors by point.
        """
        self.compressor_in = compressor_in
        c, ratio = self.config, self.config.compress_ratios[l]
        requests = self.plan.requests
        ranges = []
        for s in self.spans:
            r = requests[s.request]
            first = max(r.first_entry[l], s.first // ratio if s.first > r.start else 0)
            ranges.append((first, (s.first + s.count) // ratio))
        spans = pack(ranges)
        count = sum(s.count for s in spans)
        entry = torch.cat([torch.arange(s.first, s.first + s.count) for s in spans]).to(self.device)
        latent = self._latents(l, w, spans, entry, ratio)
        kv, key = torch.empty_like(latent), latent.new_empty(count, c.index_head_dim)
        cos, sin = self.now.ropes[True]
        assert w.compressor is not None
        for b in blocks(
            [s for s in spans if s.count],
            [r.chunk for r in requests],
            self.settings.block,
            self.settings.reproducible,
            self.device,
        ):
            x, at = b.take(latent), b.take(entry) * ratio
            k = ops.rms_norm(F.linear(x, w.compressor.wk), w.compressor.k_norm, c.rms_norm_eps)
            k, v = ops.rotate(k, cos[at], sin[at]), ops.rotate(x, cos[at], sin[at])
            b.put(key, rounding.round_index(k) if c.activation_fake_quant else k)
            b.put(kv, rounding.round_main(v) if c.activation_fake_quant else v)
        pools = self.layout.entries(l)
        self.layout.written(l)
        owners = {o for o in self.layout.prefix_owner if o >= 0}
        new = (kv, key)
        self._store(pools, new, [s for s in spans if s.request in owners], ratio)
        before = self.layout.snapshot(pools, ratio)
        self._store(pools, new, [s for s in spans if s.request not in owners], ratio)
        self.layout.check_prefix(pools, before, ratio)
        return spans, {"global_kv": kv, "index_k": key, "latent": latent}

    def _store(self, pools: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], spans: list[Span], ratio: int) -> None:
        """Put new entries into their requests' slots; a private prefix is copied before its request first writes."""
        for s in spans:
            r = self.plan.requests[s.request]
            if r.private_prefix and self.now.done[s.request] == r.start:
                self.layout.copy_prefix(pools, s.request, ratio)
            at = self.layout.own_entry(s.request, ratio) + s.first
            for pool, values in zip(pools, new, strict=True):
                pool[at : at + s.count] = values[s.rows]

    def _latents(self, l: int, w: Layer, spans: list[Span], entry: Tensor, ratio: int) -> Tensor:
        """Compressor output [entries, D], normed, not rotated."""
        c = self.config
        assert w.compressor is not None
        request = torch.cat([torch.full((s.count,), s.request) for s in spans]).to(self.device)
        parts = [self._compressor_rows(l, request, entry * ratio + t) for t in range(ratio)]
        if ratio == 2:
            content, score = (torch.stack([p[k] for p in parts], 1) for k in ("content", "score"))
            self._keep_open_pair(l)
            norm, eps, dtype = w.compressor.norm, c.rms_norm_eps, self.model.dtype
            return compress_pairs(content, score, norm, eps, dtype, self.settings.impl)
        return ops.rms_norm(parts[0]["content"], w.compressor.norm, c.rms_norm_eps)

    def _compressor_rows(self, l: int, request: Tensor, position: Tensor) -> dict[str, Tensor]:
        """The compressor's input at (request, position).

        It comes from this step, from full (the kept open pair of a hit), or from the step before.
        """
        first = torch.tensor([s.first for s in self.spans], device=self.device)
        at = torch.tensor([s.at for s in self.spans], device=self.device)
        start = torch.tensor(self.layout.starts, device=self.device)
        owner = torch.tensor(self.layout.prefix_owner, device=self.device)
        inherited = position < start[request]
        request = torch.where(inherited, owner[request], request)
        earlier = position < first[request]
        if bool((inherited & earlier).any()):
            raise ValueError("a request must start in the same step as the one whose open pair it continues")
        row = (at[request] + position - first[request]).clamp(min=0)
        out = {k: v[row] for k, v in self.compressor_in.items()}
        if bool(earlier.any()):
            for k in out:
                kept = self.pool.take(
                    f"open.{l}.{k}", (len(self.spans), self.config.head_dim), out[k].dtype, self.device
                )
                out[k] = torch.where(earlier[:, None], kept[request], out[k])
        return out

    def _keep_open_pair(self, l: int) -> None:
        """Remember the last row of each request: if it is the first of its pair, the next step completes it."""
        for k, v in self.compressor_in.items():
            kept = self.pool.take(f"open.{l}.{k}", (len(self.spans), self.config.head_dim), v.dtype, self.device)
            for s in self.spans:
                if s.count:
                    kept[s.request] = v[s.at + s.count - 1]
