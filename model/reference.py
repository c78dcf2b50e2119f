"""The model as one dense pass over whole sequences: masks, no cache, no packing. Differentiable.

reference pass: verified against the public fixtures (tests/test_model_parity.py).

It is the meaning that the executor is held against, the body of every oracle, and what `mini` is trained with.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.model import ops, rounding
from replayscope.model.config import ModelConfig
from replayscope.model.engram import add_engram, hash_rows
from replayscope.model.weights import Layer, Model

NEG_INF = -math.inf


@dataclass
class Frame:
    """The tensors of one layer, by the last part of their hook point's name; ``layer`` is None outside the layers.

    Every tensor is [B, N, …] by row, or [B, entries, …] for ``global_kv``, ``index_k`` and ``latent``.
    """

    layer: int | None
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """How one dense pass departs from an ordinary prefill.

    boundary[l]: in layer l, rows from there on see no window key below it (0: no boundary); a column [N, 1] has one for
    each row.
    prefix: kv source layer → (entries kept, global_kv [B, E, D], index_k [B, E, di]) that replace the pass's own.
    selection: "sparse" (the indexer's top-k) or "dense" (every visible entry: smooth, and free of flips).
    topk, experts: layer → ids [B, N, k] to use instead of choosing (frozen discrete choices).
    window: W, where it is not the config's.
    """

    boundary: Callable[[int], int | Tensor] = lambda layer: 0
    prefix: Mapping[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)
    selection: str = "sparse"
    topk: Mapping[int, Tensor] = field(default_factory=dict)
    experts: Mapping[int, Tensor] = field(default_factory=dict)
    window: int | None = None
    query_block: int = 512
    probabilities: bool = False


def dense_pass(model: Model, ids: Tensor, rules: Rules = Rules(), now: "State | None" = None) -> Iterator[Frame]:
    """Yield the frame of ``embed``, of each layer in order, then of ``final`` and ``logits``, for ids [B, N].

    Each frame is yielded when its layer is done, so that several passes can be walked in step. With
    ``rules.probabilities`` the frames of index sources also hold ``index_scores`` [B, N, E] (-inf where not visible)
    and ``entry_mass`` [B, N, E], the attention probability on each entry, summed over heads and without gradient.
    now: where the pass stands, for whoever wants to see it or to begin behind some layers.
    """
    c = model.config
    now = now or State.begin(model, ids)
    if now.first == 0:
        yield Frame(None, {"embed": model.embed[ids]})
    for l in c.layers[now.first :]:
        # In a function, so that a suspended pass holds neither the layer's weights nor what it no longer needs.
        yield _run_layer(c, l, model.layers[l], ids, now, rules)
    now.move(model.norm.device)
    final = ops.rms_norm(ops.collapse(now.streams, now.mix), model.norm, c.rms_norm_eps)
    yield Frame(None, {"final": final, "logits": logits(final, model.head)})


@dataclass
class State:
    """What a pass carries from layer to layer.

    streams [B, N, n, d]; mix [B, N, n]; ropes: cos and sin by compressed or not; globals: kv source → global KV and
    index keys; chosen: index source → top-k; pool: the candidates; first: the layer that a pass begins with.
    """

    streams: Tensor
    mix: Tensor
    ropes: dict[bool, tuple[Tensor, Tensor]]
    globals: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    pool: Tensor | None = None
    first: int = 0

    @classmethod
    def begin(cls, model: Model, ids: Tensor) -> "State":
        """In front of the first layer; ids [B, N]."""
        c = model.config
        return cls(
            streams=model.embed[ids].unsqueeze(-2).expand(-1, -1, c.hc_mult, -1),
            mix=F.one_hot(torch.zeros_like(ids), c.hc_mult).to(ops.acc_dtype(model.dtype)),
            ropes={flag: ops.rope_tables(c, flag, ids.shape[1], model.embed) for flag in (False, True)},
        )

    def move(self, device: torch.device) -> None:
        """Carry all of it to the device of the next layer."""
        if device == self.streams.device:
            return
        self.streams, self.mix = self.streams.to(device), self.mix.to(device)
        self.ropes = {flag: (cos.to(device), sin.to(device)) for flag, (cos, sin) in self.ropes.items()}
        self.globals = {l: (kv.to(device), key.to(device)) for l, (kv, key) in self.globals.items()}
        self.chosen = {l: topk.to(device) for l, topk in self.chosen.items()}
        self.pool = None if self.pool is None else self.pool.to(device)


def _run_layer(c: ModelConfig, l: int, w: Layer, ids: Tensor, now: State, rules: Rules) -> Frame:
    """One layer of a dense pass: its frame, and the state moved on."""
    out = Frame(l)
    now.move(w.device)
    t, streams, N = out.tensors, now.streams, ids.shape[1]
    if w.engram is not None:
        rows = torch.stack([hash_rows(c, l, one, w.engram.token_map) for one in ids]).to(w.device)
        streams = add_engram(streams, rows, w.engram, c)
        t["engram_rows"] = rows
    cos, sin = now.ropes[c.compress_ratios[l] > 0]
    post_pre, post, comb = ops.mhc(streams, w.hc_attn, c)
    x = ops.rms_norm(ops.collapse(streams, now.mix), w.attn_norm, c.rms_norm_eps)
    qr = ops.rms_norm(F.linear(x, w.wq_a), w.q_norm, c.rms_norm_eps)
    q = ops.rotate(F.linear(qr, w.wq_b).unflatten(-1, (c.num_attention_heads, -1)), cos[:, None], sin[:, None])
    kv = ops.rotate(ops.rms_norm(F.linear(x, w.wkv), w.kv_norm, c.rms_norm_eps), cos, sin)
    if c.activation_fake_quant:
        kv = rounding.round_window(kv)
    t |= {"attn_in": x, "window_kv": kv}
    source, picks = c.kv_source(l), c.index_source(l)
    if source == l:
        now.globals[l] = _global_entries(c, w, x, c.compress_ratios[l], cos, sin, rules.prefix.get(l), t)
    if picks == l:
        assert source is not None and w.indexer is not None
        scores = _index_scores(c, w, x, qr, now.globals[source][1], c.compress_ratios[l], cos, sin)
        if l == c.candidate_source_layer_id:
            now.pool = t["candidates"] = candidate_pool(c, scores)
        if c.uses_candidates(l) and now.pool is not None:
            scores = scores.masked_fill(~now.pool, NEG_INF)
        topk, t["topk_margin"] = select_topk(scores, c.index_topk)
        now.chosen[l] = t["topk"] = rules.topk.get(l, topk)
        if rules.probabilities:
            t["index_scores"] = scores
    entries = now.globals[source][0] if source is not None else kv[:, :0]
    allowed = None
    if source is not None and picks is not None:
        allowed = visible(N, entries.shape[1], c.compress_ratios[l], kv.device).expand(len(ids), -1, -1)
        if rules.selection == "sparse":
            allowed = allowed & as_mask(now.chosen[picks], entries.shape[1])
    y, mass = _attend(c, w, q, kv, entries, allowed, rules.boundary(l), rules)
    if rules.probabilities and picks == l and mass is not None:
        t["entry_mass"] = mass
    y = ops.rotate(y, cos[:, None], sin[:, None], inverse=True)
    t["attn_out"] = y = ops.output_projection(y, w.wo_a, w.wo_b, c.o_groups)
    streams = ops.expand(streams, y, post, comb)
    mix, post, comb = ops.mhc(streams, w.hc_ffn, c)
    h = ops.rms_norm(ops.collapse(streams, post_pre), w.ffn_norm, c.rms_norm_eps)
    scores = ops.router_scores(h, w.experts)
    experts, t["router_margin"] = ops.choose_experts(scores, w.experts, c.num_experts_per_tok)
    t["router"] = experts = rules.experts.get(l, experts)
    t["router_weights"] = ops.router_weights(experts, scores, c)
    t["ffn_out"] = y = ops.moe(h, w.experts, experts, scores, c)
    now.streams, now.mix = ops.expand(streams, y, post, comb), mix
    t |= {"streams": now.streams, "mix": mix, "hidden": ops.collapse(now.streams, mix)}
    return out


def logits(final: Tensor, head: Tensor) -> Tensor:
    """final [..., d] · headᵀ → [..., V] in float32 (float64 for a float64 model)."""
    acc = ops.acc_dtype(final.dtype)
    return F.linear(final.to(acc), head.to(acc))


def visible(n: int, entries: int, ratio: int, device: torch.device | str = "cpu") -> Tensor:
    """[n, entries] bool: entry j is visible to query i iff its last token is at or before i, j < (i+1)//ratio."""
    i = torch.arange(n, device=device)
    return torch.arange(entries, device=device) < ((i + 1) // ratio)[:, None]


def window_mask(n: int, window: int, boundary: int | Tensor = 0, device: torch.device | str = "cpu") -> Tensor:
    """[n, n] bool: query i sees keys i-W+1 … i, and rows from ``boundary`` on see no key below it."""
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    boundary = boundary.to(device) if isinstance(boundary, Tensor) else boundary
    return (j <= i) & (i - j < window) & ~((i >= boundary) & (j < boundary))


def as_mask(topk: Tensor, entries: int) -> Tensor:
    """Entry ids [..., k] with -1 for absent → bool [..., entries]."""
    mask = torch.zeros(*topk.shape[:-1], entries + 1, dtype=torch.bool, device=topk.device)
    return mask.scatter_(-1, torch.where(topk < 0, entries, topk).long(), True)[..., :entries]


def select_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best entries of scores [..., E] (-inf: not selectable): ids [..., k] ascending, then -1, and the margin.

    margin [...]: worst accepted minus best rejected score; inf where nothing selectable was rejected.
    """
    E = scores.shape[-1]
    top = scores.topk(min(k + 1, E), -1)
    values, ids = top.values[..., :k], top.indices[..., :k]
    ids = torch.where(values == NEG_INF, E, ids).sort(-1).values
    ids = F.pad(torch.where(ids == E, -1, ids), (0, k - ids.shape[-1]), value=-1)
    margin = torch.full(scores.shape[:-1], math.inf, dtype=scores.dtype, device=scores.device)
    if k < E:
        rejected = top.values[..., k]
        margin = torch.where(rejected == NEG_INF, margin, top.values[..., k - 1] - rejected)
    return ids, margin


def candidate_pool(config: ModelConfig, scores: Tensor) -> Tensor:
    """[..., E] bool from the candidate source's scores [..., E] (-inf: not visible).

    A block's score is the largest of its entries, NaN above all; the newest visible block is always in; whole blocks
    are kept.
    """
    size, E = config.candidate_block_size, scores.shape[-1]
    blocks = F.pad(scores.detach(), (0, -E % size), value=NEG_INF).unflatten(-1, (-1, size)).amax(-1)
    index = torch.arange(blocks.shape[-1], device=scores.device)
    newest = torch.where(blocks != NEG_INF, index, -1).amax(-1, keepdim=True)
    ranked = blocks.masked_fill(index == newest, math.inf)
    top = ranked.topk(min(config.candidate_topk_blocks, ranked.shape[-1]), -1)
    keep = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, top.indices, top.values != NEG_INF)
    return keep.repeat_interleave(size, -1)[..., :E]


def _global_entries(
    c: ModelConfig,
    w: Layer,
    x: Tensor,
    ratio: int,
    cos: Tensor,
    sin: Tensor,
    prefix: tuple[int, Tensor, Tensor] | None,
    t: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Global KV [B, E, D] and index keys [B, E, di] of a kv source, with the kept prefix put in place of its own."""
    assert w.compressor is not None
    acc = ops.acc_dtype(x.dtype)
    if ratio == 2:
        assert w.compressor.wgate is not None
        whole = x[:, : x.shape[1] // 2 * 2].to(acc)
        content, score = (
            F.linear(whole, m.to(acc)).unflatten(1, (-1, 2)) for m in (w.compressor.wkv, w.compressor.wgate)
        )
        pooled = ops.pool_pairs(content, score, x.dtype)
    else:
        pooled = F.linear(x, w.compressor.wkv.to(x.dtype))
    latent = ops.rms_norm(pooled, w.compressor.norm, c.rms_norm_eps)
    first = slice(0, latent.shape[1] * ratio, ratio)
    key = ops.rms_norm(F.linear(latent, w.compressor.wk), w.compressor.k_norm, c.rms_norm_eps)
    kv, key = ops.rotate(latent, cos[first], sin[first]), ops.rotate(key, cos[first], sin[first])
    if c.activation_fake_quant:
        kv, key = rounding.round_main(kv), rounding.round_index(key)
    if prefix is not None:
        kept, old_kv, old_key = prefix
        kv = torch.cat((old_kv[:, :kept], kv[:, kept:]), 1)
        key = torch.cat((old_key[:, :kept], key[:, kept:]), 1)
    t |= {"latent": latent, "global_kv": kv, "index_k": key}
    return kv, key


def _index_scores(
    c: ModelConfig, w: Layer, x: Tensor, qr: Tensor, key: Tensor, ratio: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """Σ_h w_h·ReLU(q_h·k_j) as [B, N, E] in acc, -inf where entry j is not visible."""
    assert w.indexer is not None
    q = ops.rotate(F.linear(qr, w.indexer.wq_b).unflatten(-1, (c.index_n_heads, -1)), cos[:, None], sin[:, None])
    if c.activation_fake_quant:
        q = rounding.round_index(q)
    weights = ops.index_weights(x, w.indexer.weights_proj, c)
    raw = torch.einsum("bnhd,bed->bnhe", q.to(weights.dtype), key.to(weights.dtype)).relu()
    scores = torch.einsum("bnhe,bnh->bne", raw, weights)
    return scores.masked_fill(~visible(x.shape[1], key.shape[1], ratio, x.device), NEG_INF)


def _attend(
    c: ModelConfig,
    w: Layer,
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    allowed: Tensor | None,
    boundary: int | Tensor,
    rules: Rules,
) -> tuple[Tensor, Tensor | None]:
    """One softmax over window keys, allowed entries and the sink; keys are values. q [B, N, h, D] → [B, N, h, D]."""
    acc = ops.acc_dtype(q.dtype)
    B, N = kv.shape[:2]
    window = window_mask(N, rules.window or c.sliding_window, boundary, kv.device)
    keys = torch.cat((kv, entries), 1).to(acc)
    sink = w.sink.to(acc)[None, :, None, None].expand(B, -1, -1, 1)
    outs, masses = [], []
    for at in range(0, N, rules.query_block):
        rows = slice(at, at + rules.query_block)
        mask = window[rows].expand(B, -1, -1)
        if allowed is not None:
            mask = torch.cat((mask, allowed[:, rows]), -1)
        scores = torch.einsum("bnhd,bmd->bhnm", q[:, rows].to(acc), keys) * c.head_dim**-0.5
        scores = scores.masked_fill(~mask[:, None], NEG_INF)
        p = torch.cat((scores, sink.expand(-1, -1, scores.shape[2], -1)), -1).softmax(-1)[..., :-1]
        outs.append(torch.einsum("bhnm,bmd->bnhd", p, keys).to(q.dtype))
        if rules.probabilities:
            masses.append(p[..., N:].sum(1).detach())
    return torch.cat(outs, 1), torch.cat(masses, 1) if masses else None
