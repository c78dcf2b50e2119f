"""One advance of the executor: the packed rows of all requests on their way through the layers."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.inspector.cores import R, T, each
from replayscope.inspector.entries import EntryWriter, Progress, Settings
from replayscope.inspector.frame import Attended, Frame
from replayscope.inspector.layout import Layout
from replayscope.inspector.packing import Block, Span, blocks
from replayscope.kernels.attention import packed_attention
from replayscope.kernels.impl import choose
from replayscope.kernels.index import candidate_blocks, index_scores, topk_entries
from replayscope.kernels.packed import EntryRows, WindowRows
from replayscope.model import ops, rounding
from replayscope.model.engram import add_engram, hash_rows
from replayscope.model.streaming import StreamedModel
from replayscope.model.weights import Layer


class Step:
    """One advance: the packed rows of all requests on their way through the layers."""

    streams: Tensor
    mix: Tensor

    def __init__(
        self, layout: Layout, settings: Settings, now: Progress, spans: list[Span], rows: int, want: frozenset[str]
    ) -> None:
        self.layout, self.now, self._asked = layout, now, settings
        self.spans, self.rows, self.want = spans, rows, want
        self.model, self.config, self.pool, self.plan = layout.model, layout.model.config, layout.pool, layout.plan
        self._stand(self.model.device)
        self.position = torch.cat([torch.arange(s.first, s.first + s.count) for s in spans]).to(self.device)
        self.request = torch.cat([torch.full((s.count,), s.request) for s in spans]).to(self.device)
        self.ids = torch.cat([now.ids[s.request][s.first : s.first + s.count] for s in spans]).to(self.device)
        self._blocks: dict[tuple[int, ...], tuple[list[Span], list[Block]]] = {}
        c = self.config
        self.topk = self.buffer("topk", c.index_topk, dtype=torch.long)
        self.topk_margin = self.buffer("topk_margin", dtype=ops.acc_dtype(self.model.dtype))
        self.candidates = self.buffer("candidates", c.candidate_topk_blocks, dtype=torch.long)
        self._per_row: dict[tuple[str, int], Tensor] = {}
        self.entries = EntryWriter(layout, self.settings, now, spans)

    def _stand(self, device: torch.device) -> None:
        """Be on a device. Which form of the kernels can run goes by it, not by where the pass began."""
        self.device = self.layout.device = device
        self.settings = replace(self._asked, impl=choose(self._asked.impl, device, self.model.dtype).impl)

    def move(self, device: torch.device) -> None:
        """Carry the rows to the device of the next layer; what was made from them is made again there."""
        if device == self.device:
            return
        self._stand(device)
        for name in ("position", "request", "streams", "mix", "topk", "topk_margin", "candidates"):
            setattr(self, name, getattr(self, name).to(device))
        ropes = {flag: (cos.to(device), sin.to(device)) for flag, (cos, sin) in self.now.ropes.items()}
        self.now = replace(self.now, ropes=ropes)
        self.entries = EntryWriter(self.layout, self.settings, self.now, self.spans)
        self._blocks.clear()
        self._per_row.clear()

    def since(self, first: list[int]) -> tuple[list[Span], list[Block]]:
        """Spans and blocks of the rows from the given position on, per request."""
        key = tuple(max(f, s.first) for f, s in zip(first, self.spans, strict=True))
        if key not in self._blocks:
            spans = [s.since(f) for s, f in zip(self.spans, first, strict=True)]
            chunks = [r.chunk for r in self.plan.requests]
            cut = blocks(
                [s for s in spans if s.count], chunks, self.settings.block, self.settings.reproducible, self.device
            )
            self._blocks[key] = spans, cut
        return self._blocks[key]

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.pool.take(name, (self.rows, *shape), dtype or self.model.dtype, self.device)

    def layer(self, l: int, w: Layer) -> Frame:
        requests, c = self.plan.requests, self.config
        self.move(w.device)
        proj_spans, proj = self.since([r.projected(l) for r in requests])
        run_spans, run = self.since([r.first_row[l] for r in requests])
        frame = Frame(l)

        def emit(spans: list[Span], **tensors: Tensor) -> None:
            for name, tensor in tensors.items():
                frame.tensors[name], frame.spans[name] = tensor, spans

        self._project(l, w, proj)
        emit(proj_spans, attn_in=self.attn_in, window_kv=self.kv)
        if l in c.kv_source_layer_ids:
            entry_spans, entries = self.entries.write(l, w, self.compressor_in)
            emit(entry_spans, **entries)
        acc = ops.acc_dtype(self.model.dtype)
        outs = {p: self.buffer(p, c.hidden_size) for p in ("attn_out", "ffn_out", "hidden") if p in self.want}
        self.router = self.buffer("router", c.num_experts_per_tok, dtype=torch.long)
        router = {"router_margin": self.buffer("router_margin", dtype=acc)}
        router["router_weights"] = self.buffer("router_weights", c.num_experts_per_tok, dtype=acc)
        window = self.layout.window(l if self.settings.keep_state else None)

        def attend(b: Block) -> Attended:
            return self._attend(l, w, b, window, outs, router)

        # What the others' choices are taken from comes first.
        for some in self._in_order(run):
            if isinstance(self.model, StreamedModel):
                # A streamed layer's experts are decoded once for all blocks.
                self.each(lambda done: self._feed_forward(w, done, outs), [self.each(attend, some)])
            else:
                # Otherwise a block is finished while it is hot.
                self.each(lambda b: self._feed_forward(w, [attend(b)], outs), some)
        if l in c.index_source_layer_ids:
            emit(run_spans, topk=self.topk, topk_margin=self.topk_margin)
            if l == c.candidate_source_layer_id:
                emit(run_spans, candidates=self.candidates)
        emit(run_spans, router=self.router, **router, streams=self.streams, mix=self.mix, **outs)
        return frame

    def finish(self, tail: int | None = None) -> Frame:
        """Final norm and logits of the rows that ran in the last layer, or of the last ``tail`` of each request."""
        c, m = self.config, self.model
        self.move(m.norm.device)
        ends = [s.first + s.count for s in self.spans]
        lowest = [0 if tail is None else end - tail for end in ends]
        spans, run = self.since([max(r.first_row[-1], row) for r, row in zip(self.plan.requests, lowest, strict=True)])
        frame = Frame(None)
        final = frame.tensors["final"] = self.buffer("final", c.hidden_size)
        frame.spans["final"] = spans
        logits = None
        if "logits" in self.want:
            logits = frame.tensors["logits"] = self.buffer("logits", c.vocab_size, dtype=ops.acc_dtype(m.dtype))
            frame.spans["logits"] = spans
        head = m.head if logits is None else m.head.to(logits.dtype)

        def end(b: Block) -> None:
            h = ops.rms_norm(ops.collapse(b.take(self.streams), b.take(self.mix)), m.norm, c.rms_norm_eps)
            b.put(final, h)
            if logits is not None:
                b.put(logits, F.linear(h.to(logits.dtype), head))

        self.each(end, run)
        return frame

    def each(self, f: Callable[[T], R], items: list[T]) -> list[R]:
        """f of every block, several at a time: they write different rows."""
        return each(f, items, self.device, alone=self.settings.reproducible)

    def _in_order(self, run: list[Block]) -> list[list[Block]]:
        """The blocks of the first request before all others if choices are taken from it, else all together."""
        if not (self.settings.frozen or self.settings.frozen_experts or any(r.frozen for r in self.plan.requests)):
            return [run]
        is_first = [any(request == 0 for request, _, _ in b.segments) for b in run]
        return [[b for b, first in zip(run, is_first, strict=True) if first == wanted] for wanted in (True, False)]

    def _project(self, l: int, w: Layer, run: list[Block]) -> None:
        """Write this layer's window KV for every projected row; keep attn_in, q's low rank, the compressor's input."""
        c = self.config
        self.attn_in, self.qr = self.buffer("attn_in", c.hidden_size), self.buffer("qr", c.q_lora_rank)
        self.kv = self.buffer("window_kv", c.head_dim)
        compressed = c.compress_ratios[l] > 0
        cos, sin = self.now.ropes[compressed]
        parts: dict[str, Tensor] = {}
        if l in c.kv_source_layer_ids:
            assert w.compressor is not None
            acc = ops.acc_dtype(self.model.dtype) if c.compress_ratios[l] == 2 else self.model.dtype
            sides = {"content": w.compressor.wkv} | ({"score": w.compressor.wgate} if c.compress_ratios[l] == 2 else {})
            self.compressor_in = {k: self.buffer(k, c.head_dim, dtype=acc) for k in sides}
            parts = {k: v.to(acc) for k, v in sides.items() if v is not None}
        rows = self._engram_rows(l, w)

        def project(b: Block) -> None:
            if w.engram is not None and rows is not None:
                b.put(self.streams, add_engram(b.take(self.streams), b.take(rows), w.engram, c))
            x = ops.rms_norm(ops.collapse(b.take(self.streams), b.take(self.mix)), w.attn_norm, c.rms_norm_eps)
            at = b.take(self.position)
            b.put(self.attn_in, x)
            b.put(self.qr, ops.rms_norm(F.linear(x, w.wq_a), w.q_norm, c.rms_norm_eps))
            kv = ops.rms_norm(F.linear(x, w.wkv), w.kv_norm, c.rms_norm_eps)
            kv = ops.rotate(kv, cos[at], sin[at])
            b.put(self.kv, rounding.round_window(kv) if c.activation_fake_quant else kv)
            for k, weight in parts.items():
                b.put(self.compressor_in[k], F.linear(x.to(weight.dtype), weight))

        self.each(project, run)
        window = self.layout.window(l if self.settings.keep_state else None)
        for s in self.spans:
            live = s.since(self.plan.requests[s.request].first_window[l])
            slot = int(self.layout.window_shift[s.request]) + live.first
            window[slot : slot + live.count] = self.kv[live.rows]

    def _engram_rows(self, l: int, w: Layer) -> Tensor | None:
        """Table rows [rows, orders·heads] of an Engram layer, from token ids alone: those before the first row too."""
        if w.engram is None:
            return None
        parts = [
            hash_rows(self.config, l, self.now.ids[s.request][: s.first + s.count], w.engram.token_map, s.first)
            for s in self.spans
        ]
        return torch.cat(parts).to(self.device)

    def _choose_entries(self, l: int, w: Layer, b: Block, x: Tensor, qr: Tensor, at: Tensor) -> None:
        """The block's top-k entry numbers, by the indexer or frozen from the first request."""
        c, ratio, impl = self.config, self.config.compress_ratios[l], self.settings.impl
        assert w.indexer is not None
        source = c.kv_source(l)
        assert source is not None
        cos, sin = self.now.ropes[True]
        q = ops.rotate(
            F.linear(qr, w.indexer.wq_b).unflatten(-1, (c.index_n_heads, -1)), cos[at][:, None], sin[at][:, None]
        )
        if c.activation_fake_quant:
            q = rounding.round_index(q)
        weights = ops.index_weights(x, w.indexer.weights_proj, c)
        pool = self.layout.entries(source)[1]
        seen = (at + 1) // ratio
        totals = seen.tolist()
        inside = b.take(self.candidates) if c.uses_candidates(l) else None
        # Scores are taken request by request, choices of all rows at once: what a row does not have scores -inf.
        scores = weights.new_full((len(at), max(1, *totals)), -torch.inf)
        for request, lo, hi in b.segments:
            if total := max(totals[lo:hi]):
                keys, within = self.layout.first_entries(pool, request, total, ratio), None
                if inside is not None:
                    within = inside[lo:hi]
                rows = q[lo:hi], weights[lo:hi], keys, seen[lo:hi]
                scores[lo:hi, :total] = index_scores(*rows, within, c.candidate_block_size, impl)
        picks, margins = topk_entries(scores, c.index_topk, impl)
        picks = self._or_frozen(b, at, picks, self.topk, self.settings.frozen)
        b.put(self.topk, picks)
        b.put(self.topk_margin, margins)
        if l == c.candidate_source_layer_id:
            b.put(self.candidates, candidate_blocks(scores, c.candidate_block_size, c.candidate_topk_blocks))

    def _or_frozen(self, b: Block, at: Tensor, own: Tensor, all_rows: Tensor, every: bool) -> Tensor:
        """A block's choices [rows, k]: their own, or for frozen requests (or ``every``) the first request's there."""
        requests = self.plan.requests
        if not every and not any(requests[i].frozen for i, _, _ in b.segments):
            return own
        takes = self.per_row(
            "frozen", int(every), lambda: [i > 0 and (every or r.frozen) for i, r in enumerate(requests)]
        )
        first = self.spans[0]
        return torch.where(b.take(takes)[:, None], all_rows[at - first.first + first.at], own)

    def per_row(self, name: str, key: int, values: Callable[[], list[int]]) -> Tensor:
        """A number per request, spread over the packed rows [rows]; made once per step and key."""
        if (name, key) not in self._per_row:
            self._per_row[name, key] = torch.tensor(values(), device=self.device)[self.request]
        return self._per_row[name, key]

    def _window_rows(self, l: int, b: Block, at: Tensor) -> tuple[WindowRows, int]:
        """What the block's rows see of the window and where it lies, and the widest of their windows."""
        requests = self.plan.requests
        widths = {requests[i].window for i, _, _ in b.segments}
        floor = b.take(self.per_row("floor", l, lambda: [r.floor[l] for r in requests])).clone()
        for request, lo, hi in b.segments:
            for row, floors in requests[request].floor_steps:
                late = at[lo:hi] >= row
                floor[lo:hi] = torch.where(late, floors[l], floor[lo:hi])
        if len(widths) > 1:
            own_width = b.take(self.per_row("window", 0, lambda: [r.window for r in requests]))
            floor = torch.maximum(floor, at - own_width + 1)
        start = b.take(self.per_row("start", 0, lambda: self.layout.starts.tolist()))
        own = b.take(self.per_row("shift", 0, lambda: self.layout.window_shift.tolist()))
        below = b.take(self.per_row("below", 0, lambda: self.layout.owner_shift.tolist()))
        return WindowRows(at, floor, start, own, below), max(widths)

    def _entry_rows(self, l: int, b: Block, at: Tensor) -> EntryRows | None:
        """The global entries that the block's rows attend and where they lie; None for a window-only layer."""
        ratio, layout = self.config.compress_ratios[l], self.layout
        if ratio == 0:
            return None
        picks = b.take(self.topk)
        if self.settings.dense:
            seen = ((at + 1) // ratio)[:, None]
            every = torch.arange(int(seen.max()), device=self.device)[None]
            picks = torch.where(every < seen, every, -1)
        everyone, owners = range(len(self.plan.requests)), [max(o, 0) for o in layout.prefix_owner]
        kept = b.take(self.per_row("kept", ratio, lambda: [layout.kept(i, ratio) for i in everyone]))
        other = b.take(self.per_row("other", ratio, lambda: [layout.own_entry(o, ratio) for o in owners]))
        own = b.take(self.per_row("own", ratio, lambda: [layout.own_entry(i, ratio) for i in everyone]))
        return EntryRows(picks, kept, other, own)

    def _attend(
        self, l: int, w: Layer, b: Block, window: Tensor, outs: dict[str, Tensor], router: dict[str, Tensor]
    ) -> Attended:
        """Index, attention, mHC and routing of one block, in place in the streams."""
        c = self.config
        at = b.take(self.position)
        x, qr, streams = b.take(self.attn_in), b.take(self.qr), b.take(self.streams)
        if l in c.index_source_layer_ids:
            self._choose_entries(l, w, b, x, qr, at)
        (rows, width), entries = self._window_rows(l, b, at), self._entry_rows(l, b, at)
        cos, sin = (t[at][:, None] for t in self.now.ropes[c.compress_ratios[l] > 0])
        q = ops.rotate(F.linear(qr, w.wq_b).unflatten(-1, (c.num_attention_heads, -1)), cos, sin)
        source = c.kv_source(l)
        pool = self.layout.entries(source)[0] if source is not None else None
        y = packed_attention(q, window, rows, width, pool, entries, w.sink, self.settings.impl)
        y = ops.output_projection(ops.rotate(y, cos, sin, inverse=True), w.wo_a, w.wo_b, c.o_groups)
        if "attn_out" in outs:
            b.put(outs["attn_out"], y)
        pre, post, comb = ops.mhc(streams, w.hc_attn, c)
        streams = ops.expand(streams, y, post, comb)
        mix, post, comb = ops.mhc(streams, w.hc_ffn, c)
        h = ops.rms_norm(ops.collapse(streams, pre), w.ffn_norm, c.rms_norm_eps)
        scores = ops.router_scores(h, w.experts)
        experts, margin = ops.choose_experts(scores, w.experts, c.num_experts_per_tok)
        every = self.settings.frozen or self.settings.frozen_experts
        experts = self._or_frozen(b, at, experts, self.router, every)
        b.put(self.router, experts)
        b.put(router["router_margin"], margin)
        b.put(router["router_weights"], ops.router_weights(experts, scores, c))
        b.put(self.streams, streams)
        b.put(self.mix, mix)
        return Attended(b, h, experts, scores, post, comb)

    def _feed_forward(self, w: Layer, done: list[Attended], outs: dict[str, Tensor]) -> None:
        """Experts of some attended blocks, in place in the streams."""
        tiles = [(t.h, t.experts, t.scores) for t in done]
        for t, y in zip(done, ops.moe_tiles(tiles, w.experts, self.config, self.settings.reproducible), strict=True):
            if "ffn_out" in outs:
                t.block.put(outs["ffn_out"], y)
            streams = ops.expand(t.block.take(self.streams), y, t.post, t.comb)
            t.block.put(self.streams, streams)
            if "hidden" in outs:
                t.block.put(outs["hidden"], ops.collapse(streams, t.block.take(self.mix)))
