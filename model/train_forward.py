"""The forward pass that trains `mini`: the reference pass's result, arranged for speed on a CPU.

Only the arrangement differs: queries go in blocks that see just the keys they may, one fused softmax with its own
backward, and rows sorted by expert. Row-wise math is `model.ops`; the selection rules are those of `model.reference`,
and tests/test_model_train.py holds the two passes against each other, gradients included.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.model import ops, reference
from replayscope.model.config import ModelConfig
from replayscope.model.weights import Layer, Model

QUERY_BLOCK = 64


@dataclass
class GlobalEntries:
    """What the layers after a kv source read: KV, index keys, and the last choice of entries (bool, or None = all)."""

    entries: Tensor
    key: Tensor
    allowed: Tensor | None = None


@dataclass
class Pass:
    """logits [B, N, V]; distil: KL in nats summed over index sources, each a mean over the rows looked at;
    loads [L, E]: share of the expert choices that went to each expert; sources: the global entries by source layer."""

    logits: Tensor
    distil: Tensor
    loads: Tensor
    sources: dict[int, GlobalEntries]


@dataclass
class Replay:
    """A pass that rebuilds windows: rows from ``starts[l]`` on see no window key of layer l below it, and the global
    entries of the first ``cut`` tokens (even, so that no pair straddles it) are those of ``full``."""

    cut: int
    starts: tuple[int, ...]
    full: Pass


def forward(
    model: Model, ids: Tensor, selection: str, distil_rows: Tensor | None = None, replay: Replay | None = None
) -> Pass:
    """One pass over ids [B, N]. ``selection``: "dense", "sparse" or "none" (no global attention at all).

    ``distil_rows`` [R]: query rows on which the indexers are trained to score entries as the attention of the layers
    they serve weighs them; the gradient of that loss stays inside the indexers. Raises ValueError unless the model has
    two residual streams.
    """
    c = model.config
    if c.hc_mult != 2:
        raise ValueError(f"this pass is written for two residual streams (hc_mult 2), the model has {c.hc_mult}")
    N = ids.shape[1]
    streams = F.embedding(ids, model.embed).unsqueeze(-2).expand(-1, -1, c.hc_mult, -1)
    mix = F.one_hot(torch.zeros_like(ids), c.hc_mult).to(model.embed.dtype)
    ropes = {flag: ops.rope_tables(c, flag, N, model.embed) for flag in (False, True)}
    sources: dict[int, GlobalEntries] = {}
    wanted: dict[int, list[Tensor]] = {}
    scored: dict[int, Tensor] = {}
    pool, loads = None, []
    for l in c.layers:
        w, ratio = model.layers[l], c.compress_ratios[l]
        cos, sin = ropes[ratio > 0]
        pre, post, comb = _mhc(streams, w.hc_attn, c)
        x = ops.rms_norm(ops.collapse(streams, mix), w.attn_norm, c.rms_norm_eps)
        qr = ops.rms_norm(F.linear(x, w.wq_a), w.q_norm, c.rms_norm_eps)
        q = ops.rotate(F.linear(qr, w.wq_b).unflatten(-1, (c.num_attention_heads, -1)), cos[:, None], sin[:, None])
        kv = ops.rotate(ops.rms_norm(F.linear(x, w.wkv), w.kv_norm, c.rms_norm_eps), cos, sin)
        source = c.kv_source(l) if selection != "none" else None
        if source == l:
            sources[l] = _global_entries(c, w, x, ratio, cos, sin)
            if replay is not None:
                kept, own = replay.full.sources[l], sources[l]
                e = replay.cut // ratio
                own.entries = torch.cat((kept.entries[:, :e], own.entries[:, e:]), 1)
                own.key = torch.cat((kept.key[:, :e], own.key[:, e:]), 1)
        shared = sources[source] if source is not None else None
        if shared is not None and w.indexer is not None:
            q_index = F.linear(qr.detach(), w.indexer.wq_b).unflatten(-1, (c.index_n_heads, -1))
            q_index = ops.rotate(q_index, cos[:, None], sin[:, None])
            weights = ops.index_weights(x.detach(), w.indexer.weights_proj, c)
            if selection == "sparse":
                with torch.no_grad():
                    scores = _index_scores(q_index, weights, shared.key, ratio, torch.arange(N))
                    if l == c.candidate_source_layer_id:
                        pool = reference.candidate_pool(c, scores)
                    if c.uses_candidates(l) and pool is not None:
                        scores = scores.masked_fill(~pool, -math.inf)
                    shared.allowed = _best(scores, c.index_topk)
            if distil_rows is not None:
                r = distil_rows
                scored[l] = _index_scores(q_index[:, r], weights[:, r], shared.key, ratio, r)
                if shared.allowed is not None:
                    scored[l] = scored[l].masked_fill(~shared.allowed[:, r], -math.inf)
        entries = shared.entries if shared is not None else kv[:, :0]
        allowed = shared.allowed if shared is not None else None
        floor = replay.starts[l] if replay is not None else 0
        y, mass = _attend(c, w, q, kv, entries, ratio, allowed, distil_rows if shared is not None else None, floor)
        picks = c.index_source(l)
        if mass is not None and picks is not None:
            wanted.setdefault(picks, []).append(mass)
        y = ops.output_projection(ops.rotate(y, cos[:, None], sin[:, None], inverse=True), w.wo_a, w.wo_b, c.o_groups)
        streams = ops.expand(streams, y, post, comb)
        mix, post, comb = _mhc(streams, w.hc_ffn, c)
        h = ops.rms_norm(ops.collapse(streams, pre), w.ffn_norm, c.rms_norm_eps)
        y, load = _moe(h, w.experts, c)
        loads.append(load)
        streams = ops.expand(streams, y, post, comb)
    final = ops.rms_norm(ops.collapse(streams, mix), model.norm, c.rms_norm_eps)
    return Pass(F.linear(final, model.head), _distil_loss(c, scored, wanted, final), torch.stack(loads), sources)


def _global_entries(c: ModelConfig, w: Layer, x: Tensor, ratio: int, cos: Tensor, sin: Tensor) -> GlobalEntries:
    """Global KV [B, E, D] and index keys [B, E, di] of a kv source; the keys pass no gradient on to the latent."""
    assert w.compressor is not None
    if ratio == 2:
        assert w.compressor.wgate is not None
        pairs = x[:, : x.shape[1] // 2 * 2]
        content, score = (F.linear(pairs, m).unflatten(1, (-1, 2)) for m in (w.compressor.wkv, w.compressor.wgate))
        pooled = ops.pool_pairs(content, score, x.dtype)
    else:
        pooled = F.linear(x, w.compressor.wkv)
    latent = ops.rms_norm(pooled, w.compressor.norm, c.rms_norm_eps)
    first = slice(0, latent.shape[1] * ratio, ratio)
    key = ops.rms_norm(F.linear(latent.detach(), w.compressor.wk), w.compressor.k_norm, c.rms_norm_eps)
    return GlobalEntries(ops.rotate(latent, cos[first], sin[first]), ops.rotate(key, cos[first], sin[first]))


def _index_scores(q: Tensor, weights: Tensor, key: Tensor, ratio: int, rows: Tensor) -> Tensor:
    """Σ_h w_h·ReLU(q_h·k_j) as [B, R, E] for q [B, R, h, di] at positions ``rows``; -inf where not visible."""
    B, R, h, d = q.shape
    raw = torch.bmm(q.reshape(B, R * h, d), key.transpose(1, 2)).relu().view(B * R, h, -1)
    scores = torch.bmm(weights.reshape(B * R, 1, h), raw).view(B, R, -1)
    return scores.masked_fill(torch.arange(key.shape[1]) >= ((rows + 1) // ratio)[:, None], -math.inf)


def _best(scores: Tensor, k: int) -> Tensor:
    """[..., E] bool: the k best entries that are not -inf."""
    top = scores.topk(min(k, scores.shape[-1]), -1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top.indices, top.values > -math.inf)


class _SinkAttention(torch.autograd.Function):
    """softmax(q·kᵀ, with a sink logit in the denominator)·k for q [B, Q, h, D] and keys [B, M, D] (also the values).

    ``hidden`` [B or 1, Q, M] bool: keys not seen. Also returns the probabilities [B, Q, h, M], without gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, sink: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        B, Q, h, D = q.shape
        p = torch.bmm(q.reshape(B, Q * h, D), keys.transpose(1, 2)).view(B, Q, h, -1)
        p.masked_fill_(hidden[:, :, None], -math.inf)
        top = torch.maximum(p.amax(-1, keepdim=True), sink[:, None])
        p.sub_(top).exp_()
        rest = (sink[:, None] - top).exp()
        total = p.sum(-1, keepdim=True) + rest
        p.div_(total)
        out = torch.bmm(p.view(B, Q * h, -1), keys).view(B, Q, h, D)
        ctx.save_for_backward(q, keys, p, out, rest / total)
        ctx.mark_non_differentiable(p)
        return out, p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, keys, p, out, p_sink = ctx.saved_tensors
        B, Q, h, D = q.shape
        g = grads[0].reshape(B, Q * h, D)
        delta = (grads[0] * out).sum(-1, keepdim=True)
        ds = torch.bmm(g, keys.transpose(1, 2)).view(B, Q, h, -1).sub_(delta).mul_(p).view(B, Q * h, -1)
        dk = torch.bmm(ds.transpose(1, 2), q.reshape(B, Q * h, D)).baddbmm_(p.view(B, Q * h, -1).transpose(1, 2), g)
        return torch.bmm(ds, keys).view(B, Q, h, D), dk, -(p_sink * delta).sum((0, 1)).squeeze(-1), None


def _attend(
    c: ModelConfig,
    w: Layer,
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    ratio: int,
    allowed: Tensor | None,
    rows: Tensor | None,
    floor: int,
) -> tuple[Tensor, Tensor | None]:
    """[B, N, h, D], and the attention probability on each entry, summed over heads, [B, R, E] for ``rows``."""
    N, W = kv.shape[1], c.sliding_window
    q = q * c.head_dim**-0.5
    outs, masses = [], []
    for at in range(0, N, QUERY_BLOCK):
        stop, low = min(at + QUERY_BLOCK, N), max(0, at - W + 1)
        seen = stop // ratio if ratio else 0
        i, j = torch.arange(at, stop)[:, None], torch.arange(low, stop)
        hidden = ((j > i) | (i - j >= W) | ((i >= floor) & (j < floor)))[None]
        if allowed is not None:
            hidden = torch.cat((hidden.expand(len(q), -1, -1), ~allowed[:, at:stop, :seen]), -1)
        elif ratio and entries.shape[1]:
            hidden = torch.cat((hidden, (torch.arange(seen) >= ((i + 1) // ratio))[None]), -1)
        keys = torch.cat((kv[:, low:stop], entries[:, :seen]), 1)
        y, p = _SinkAttention.apply(q[:, at:stop], keys, w.sink, hidden)
        outs.append(y)
        if rows is not None:
            here = rows[(rows >= at) & (rows < stop)] - at
            masses.append(F.pad(p[:, here, :, stop - low :].sum(2), (0, entries.shape[1] - seen)))
    return torch.cat(outs, 1), torch.cat(masses, 1) if masses else None


def _mhc(streams: Tensor, site: ops.Mix, c: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """ops.mhc for two streams, whose matrix of weights is balanced by the formula of the limit.

    A doubly stochastic 2 x 2 matrix has one number p, and scaling rows and columns keeps a·d/(b·c): so
    p/(1-p) = sqrt(a·d/(b·c)), of which the logarithm is half of the logits' alternating sum. The passes that `ops.mhc`
    makes end within its eps of it, and cost a fifth of a training step.
    """
    n, eps = c.hc_mult, c.hc_eps
    u = streams.flatten(-2)
    z = F.linear(u, site.fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + c.rms_norm_eps)
    logits = site.base + z * torch.cat([site.scale[i].expand(k) for i, k in enumerate((n, n, n * n))])
    pre = torch.sigmoid(logits[..., :n]) + eps
    post = 2 * torch.sigmoid(logits[..., n : 2 * n])
    a, b, c_, d = logits[..., 2 * n :].unbind(-1)
    p = torch.sigmoid(0.5 * (a + d - b - c_))
    return pre, post, torch.stack((p, 1 - p, 1 - p, p), -1).unflatten(-1, (2, 2))


def _moe(x: Tensor, e: ops.Experts, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """ops.moe with rows sorted by expert; also each expert's share of the choices [E]."""
    scores = ops.router_scores(x, e)
    with torch.no_grad():
        ids = (scores + e.bias).topk(c.num_experts_per_tok, -1).indices
    weights = ops.router_weights(ids, scores, c)
    rows = x.reshape(-1, x.shape[-1])
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=c.n_routed_experts)
    sorted_rows = rows.index_select(0, order // ids.shape[-1]).split(counts.tolist())
    y = torch.cat([ops.swiglu(r, e.w1[j], e.w2[j], e.w3[j], c.swiglu_limit) for j, r in enumerate(sorted_rows)])
    y = y * weights.flatten()[order, None]
    out = ops.swiglu(rows, e.s1, e.s2, e.s3, c.swiglu_limit).index_add(0, order // ids.shape[-1], y)
    return out.view_as(x), counts / counts.sum()


def _distil_loss(c: ModelConfig, scored: dict[int, Tensor], wanted: dict[int, list[Tensor]], like: Tensor) -> Tensor:
    """Σ over index sources of mean KL(attention mass of the layers served ‖ softmax of the index scores), in nats.

    The candidate source also chooses the pool for every later indexer, so half of its target is their mass.
    """
    total = like.new_zeros(())
    for l, scores in scored.items():
        target = torch.stack(wanted[l]).sum(0)
        if l == c.candidate_source_layer_id:
            later = [m for k, ms in wanted.items() if c.uses_candidates(k) for m in ms]
            if later:
                target = target / len(wanted[l]) + torch.stack(later).mean(0)
        target = target.masked_fill(scores == -math.inf, 0)
        norm = target.sum(-1, keepdim=True)
        target = target / norm.clamp(min=1e-9)
        log_p = scores.log_softmax(-1).masked_fill(target == 0, 0)
        kl = (torch.xlogy(target, target) - target * log_p).sum(-1)
        total = total + kl[norm[..., 0] > 1e-6].mean() if (norm > 1e-6).any() else total
    return total
