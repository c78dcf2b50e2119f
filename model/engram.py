"""Engram: n-gram rows of a hashed table, gated into the residual streams. It needs token ids only, so no cached state.

A replay must be given the ids before its start: a row looks back up to ``engram_max_ngram_size`` - 1 tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.ops import acc_dtype
from replayscope.model.shapes import table_sizes


@dataclass(frozen=True)
class Engram:
    """embed [rows, dim]; wkv [(n+1)·d, orders·heads·dim]: n keys and one value; q_weight, k_weight [n, d].

    token_map [vocab]: token id → compressed id.
    """

    embed: Tensor
    wkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    token_map: Tensor


def multipliers(config: ModelConfig, layer: int) -> np.ndarray:
    """Odd int64 multipliers [max n-gram size], seeded by the layer."""
    high = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    return 2 * np.random.default_rng(10007 * layer).integers(0, high, size=config.engram_max_ngram_size) + 1


def hash_rows(config: ModelConfig, layer: int, ids: Tensor, token_map: Tensor, first: int = 0) -> Tensor:
    """Table rows [len(ids) - first, orders·heads] int64 of the tokens from place ``first`` on, ids [tokens].

    t_k is the compressed id k tokens back, the pad's where the look-back reaches the start of the sequence or an image
    token. Row of order n and head h: (XOR over k < n of t_k·mult_k, wrapping) mod prime + offset.
    """
    c = config
    tokens = ids.cpu().numpy()
    compressed = token_map.cpu().numpy().astype(np.int64)
    pad, n = compressed[c.engram_pad_token_id], len(tokens) - first
    mult = multipliers(c, layer)
    place = np.arange(first, len(tokens))
    open_ = np.ones(n, bool)
    mixed = np.zeros(n, np.int64)
    primes = table_sizes(c)[layer]
    offsets = np.concatenate(([0], np.cumsum(primes)[:-1]))
    out = []
    with np.errstate(over="ignore"):
        for k in range(c.engram_max_ngram_size):
            back = place - k
            if k:
                open_ &= (back >= 0) & (tokens[np.maximum(back, 0)] != c.image_token_id)
            term = np.where(open_, compressed[tokens[np.maximum(back, 0)]], pad)
            mixed = mixed ^ (term * mult[k])
            if k:
                at = slice((k - 1) * c.engram_n_heads, k * c.engram_n_heads)
                out.append(mixed[:, None] % np.array(primes[at]) + offsets[at])
    return torch.from_numpy(np.concatenate(out, 1)).to(ids.device)


def add_engram(streams: Tensor, rows: Tensor, w: Engram, config: ModelConfig) -> Tensor:
    """streams [..., n, d] + gate_k·value, from table rows [..., orders·heads].

    gate_k = σ(sgn(dot)·sqrt(max(|dot|, 1e-6))), dot = Σ rms(stream_k)·q_k·k_k·rms(key_k) / √d.
    """
    n, d = streams.shape[-2:]
    kv = F.linear(w.embed[rows].flatten(-2).to(w.wkv.dtype), w.wkv)
    acc = acc_dtype(streams.dtype)
    keys, value = kv[..., : n * d].unflatten(-1, (n, d)).to(acc), kv[..., n * d :].to(acc)
    s = streams.to(acc)
    weight = w.q_weight.to(acc) * w.k_weight.to(acc)
    dot = (_unit(s, config) * weight * _unit(keys, config)).sum(-1) * d**-0.5
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())
    return (s + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(streams.dtype)


def _unit(x: Tensor, config: ModelConfig) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
