"""Row-wise math of the V4.1 layer: everything that needs no cache and no mask.

Shapes are given for rows [..., d]: any leading dimensions work, and no op mixes rows. "acc" is float64 for float64
inputs and float32 otherwise; formulas are those of the technical report (arXiv 2609.19969) as public code reads them.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.model.config import ModelConfig


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, softmax, mixes and scores are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d] / rms(x) · weight [d], in acc, cast to x's dtype last."""
    a = x.to(acc_dtype(x.dtype))
    return (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + eps) * weight.to(a.dtype)).to(x.dtype)


def rope_tables(config: ModelConfig, compressed: bool, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope_dim/2] in acc; angles are computed in float64.

    ``compressed`` selects theta 160000 with YaRN (every layer with a compress ratio), otherwise theta 10000 without.
    YaRN here changes frequencies only: between the correction dims a linear ramp from f to f/factor, no mscale.
    """
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if compressed:
        y = config.rope_scaling

        def correction(rotations: float) -> float:
            return dim * math.log(y.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(correction(y.beta_fast)), 0)
        high = min(math.ceil(correction(y.beta_slow)), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = freq / y.factor * ramp + freq * (1 - ramp)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    acc = acc_dtype(like.dtype)
    return angle.cos().to(like.device, acc), angle.sin().to(like.device, acc)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs of the last 2·cos.shape[-1] channels of x [..., D]; cos, sin broadcast to x's rows."""
    dim = 2 * cos.shape[-1]
    keep, turn = x[..., : x.shape[-1] - dim], x[..., x.shape[-1] - dim :].to(cos.dtype)
    even, odd = turn[..., 0::2], turn[..., 1::2]
    if inverse:
        sin = -sin
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), -1)


@dataclass(frozen=True)
class Mix:
    """Weights of one mHC site: fn [(2+n)n, n·d], base [(2+n)n], scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


def mhc(streams: Tensor, site: Mix, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """pre [..., n], post [..., n], comb [..., n (in), n (out)] in acc from streams [..., n, d].

    comb: softmax over the output index, +eps, divided by column sums, then (iters-1) row and column passes, every
    division with +eps.
    """
    n, eps = config.hc_mult, config.hc_eps
    acc = acc_dtype(streams.dtype)
    u = streams.flatten(-2).to(acc)
    z = F.linear(u, site.fn.to(acc)) * torch.rsqrt(u.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    scale = torch.cat([site.scale[i].to(acc).expand(k) for i, k in enumerate((n, n, n * n))])
    logits = site.base.to(acc) + z * scale
    pre = torch.sigmoid(logits[..., :n]) + eps
    post = 2 * torch.sigmoid(logits[..., n : 2 * n])
    comb = logits[..., 2 * n :].unflatten(-1, (n, n)).softmax(-1) + eps
    # As [n (in), n (out), ...]: sums of n numbers along the rows are several times as fast as across them.
    comb = comb.movedim((-2, -1), (0, 1)).contiguous()
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return pre, post, comb.movedim((0, 1), (-2, -1)).contiguous()


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """Σ_k mix[k]·streams[k]: the single row [..., d] that a site reads."""
    return (mix.unsqueeze(-1) * streams.to(mix.dtype)).sum(-2).to(streams.dtype)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams'[o] = post[o]·y + Σ_k comb[k, o]·streams[k]."""
    s = streams.to(post.dtype)
    # Written out over the n input streams: a batched n × n product would be slower and depend on the batch's shape.
    mixed = sum(comb[..., k, :, None] * s[..., k, None, :] for k in range(s.shape[-2]))
    return (post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(-2) + mixed).to(streams.dtype)


@dataclass(frozen=True)
class Experts:
    """gate [E, d], bias [E] of the router; w1, w3 [E, f, d], w2 [E, d, f]; shared expert s1, s3 [f, d], s2 [d, f]."""

    gate: Tensor
    bias: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor
    s1: Tensor
    s2: Tensor
    s3: Tensor


def router_scores(x: Tensor, experts: Experts) -> Tensor:
    """sqrt(softplus(x·gateᵀ)) [..., E] in acc, before the selection bias."""
    acc = acc_dtype(x.dtype)
    return F.softplus(F.linear(x.to(acc), experts.gate.to(acc))).sqrt()


def choose_experts(scores: Tensor, experts: Experts, k: int) -> tuple[Tensor, Tensor]:
    """ids [..., k] ascending, and margin [...]: gap of the biased score between the k-th and the next (inf if none)."""
    biased = scores + experts.bias.to(scores.dtype)
    top = biased.topk(min(k + 1, biased.shape[-1]), -1)
    if top.values.shape[-1] > k:
        margin = top.values[..., k - 1] - top.values[..., k]
    else:
        margin = torch.full_like(top.values[..., 0], math.inf)
    return top.indices[..., :k].sort(-1).values, margin


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """w2·(silu(min(w1·x, limit)) · clamp(w3·x, ±limit)): one expert on rows [..., d]."""
    gate = F.linear(x, w1).clamp(max=limit)
    up = F.linear(x, w3).clamp(-limit, limit)
    return F.linear(F.silu(gate) * up, w2)


def moe(x: Tensor, experts: Experts, ids: Tensor, scores: Tensor, config: ModelConfig, whole: bool = False) -> Tensor:
    """Routed and shared experts on rows x [..., d]; ids [..., k] as chosen, scores [..., E] unbiased.

    ``whole`` runs each needed expert on all rows, so that a row's place in a product does not depend on the routing
    of its neighbours (used by the reproducible mode).
    """
    return moe_tiles([(x, ids, scores)], experts, config, whole)[0]


def moe_tiles(
    tiles: list[tuple[Tensor, Tensor, Tensor]], experts: Experts, config: ModelConfig, whole: bool = False
) -> list[Tensor]:
    """``moe`` of several (x, ids, scores), each as if alone; every expert is taken once, for it may have to be decoded.

    An expert's turn comes in ascending order in every tile, so the sums are the same bits whatever tiles there are.
    """
    limit = config.swiglu_limit
    flat, outs, users = [], [], {}
    for i, (x, ids, scores) in enumerate(tiles):
        rows, k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
        flat.append((rows, ids.reshape(-1, k), router_weights(ids, scores, config).reshape(-1, k)))
        outs.append(swiglu(rows, experts.s1, experts.s2, experts.s3, limit))
        for e in torch.unique(ids).tolist():
            users.setdefault(e, []).append(i)
    for e in sorted(users):
        w1, w2, w3 = experts.w1[e], experts.w2[e], experts.w3[e]
        for i in users[e]:
            rows, ids, weights = flat[i]
            row, slot = torch.nonzero(ids == e, as_tuple=True)
            y = swiglu(rows, w1, w2, w3, limit)[row] if whole else swiglu(rows[row], w1, w2, w3, limit)
            outs[i] = outs[i].index_add(0, row, y * weights[row, slot, None].to(y.dtype))
        # Before the next is decoded.
        del w1, w2, w3
    return [out.view_as(x) for out, (x, _, _) in zip(outs, tiles, strict=True)]


def router_weights(ids: Tensor, scores: Tensor, config: ModelConfig) -> Tensor:
    """Weights [..., k] of the chosen experts: their unbiased scores, normalised, times the routed scaling factor."""
    picked = scores.gather(-1, ids)
    return picked / (picked.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def pool_pairs(content: Tensor, score: Tensor, dtype: torch.dtype) -> Tensor:
    """Ratio-2 pooling: content, score [..., entries, 2, D] → Σ_t softmax_t(score)·content, in the model's dtype."""
    return (score.softmax(-2) * content).sum(-2).to(dtype)


def output_projection(o: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    """o [..., h, D] → groups of heads, each to its rank (block diagonal), concatenated, → [..., d]."""
    grouped = o.flatten(-2).unflatten(-1, (groups, -1))
    a = wo_a.unflatten(0, (groups, -1))
    low = torch.cat([F.linear(grouped[..., g, :], a[g]) for g in range(groups)], -1)
    return F.linear(low, wo_b)


def index_weights(x: Tensor, weights_proj: Tensor, config: ModelConfig) -> Tensor:
    """Per-head weights [..., h] of the indexer: x·Ww scaled by head_dim^-½·heads^-½, in acc."""
    w = F.linear(x, weights_proj).to(acc_dtype(x.dtype))
    return w * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
