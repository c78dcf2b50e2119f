"""Triton form of ``divergence.logits_rows``: two sweeps over both rows, no distribution in memory.

The first sweep finds what normalises each row (its largest logit and the sum of exponentials), the k largest and the
top-1. The second adds up KL both ways, JS and the shared top k. One sweep would do for KL, whose sum splits into terms
that can be rescaled; JS needs the log of the mean of both probabilities at every token, so both normalisers first. KL
rides along in the second sweep, where it is summed as it is defined and does not come out as the difference of two
large numbers. Arithmetic is in float64, as in torch. A row is cut into pieces by its width alone, so that its bits do
not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayscope.kernels.impl import on_its_device, readable
from replayscope.kernels.offsets_triton import offset

PIECE = 16384
_BLOCK = 1024
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _first_sweep(
    x_ptr, rows_ptr, stats_ptr, places_ptr, x_row, x_col, width, pieces,
    K: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0), tl.program_id(1)
    x_at = x_ptr + offset(tl.load(rows_ptr + row), x_row)
    first = piece * PIECE
    top, total = tl.full([], -float("inf"), tl.float64), tl.zeros([], tl.float64)
    best = first
    nans = tl.zeros([BLOCK], tl.int32)
    odd = tl.full([BLOCK], 2147483647, tl.int32)
    lane = tl.arange(0, LANES)
    # Lanes that are not used hold +inf, so that the smallest lane is the K-th largest number so far.
    kept = tl.where(lane < K, -float("inf"), float("inf")).to(tl.float64)
    for step in range(first, tl.minimum(first + PIECE, width), BLOCK):
        col = step + tl.arange(0, BLOCK)
        x = tl.load(x_at + offset(col, x_col), mask=col < width, other=-float("inf"))
        x = x.to(tl.float64)
        nans += (x != x).to(tl.int32)
        odd = tl.minimum(odd, tl.where(x != x, col, 2147483647))
        # NaN counts as the largest number there is, as in torch's sorts.
        key = tl.where(x != x, float("inf"), x)
        here = tl.max(key, 0)
        place = tl.min(tl.where(key == here, tl.arange(0, BLOCK), BLOCK), 0)
        best = tl.where(here > top, step + place, best)
        above = tl.maximum(top, here)
        base = tl.where(above == -float("inf"), 0.0, above)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = above
        if here > tl.min(kept, 0):
            for _ in tl.static_range(K):
                here = tl.max(key, 0)
                place = tl.min(tl.where(key == here, tl.arange(0, BLOCK), BLOCK), 0)
                key = tl.where(tl.arange(0, BLOCK) == place, -float("inf"), key)
                low = tl.min(kept, 0)
                spot = tl.min(tl.where(kept == low, lane, LANES), 0)
                kept = tl.where(lane == spot, tl.maximum(low, here), kept)
    at = offset(row, pieces) + piece
    tl.store(stats_ptr + at * (K + 2), top)
    tl.store(stats_ptr + at * (K + 2) + 1, total)
    tl.store(stats_ptr + at * (K + 2) + 2 + lane, kept, mask=lane < K)
    tl.store(places_ptr + at * 3, best.to(tl.int64))
    tl.store(places_ptr + at * 3 + 1, tl.sum(nans, 0).to(tl.int64))
    tl.store(places_ptr + at * 3 + 2, tl.min(odd, 0).to(tl.int64))


@triton.jit
def _divergence(p, q):
    """Terms of KL(p‖q) from log-probabilities; a probability of 0 on the left adds 0, whatever the right one is."""
    share = tl.exp(p)
    return tl.where(share == 0, 0.0, share * (p - q))


@triton.jit
def _second_sweep(
    a_ptr, r_ptr, a_rows_ptr, r_rows_ptr, norms_ptr, sums_ptr, shared_ptr, a_row, a_col, r_row, r_col, width, pieces,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0), tl.program_id(1)
    a_at = a_ptr + offset(tl.load(a_rows_ptr + row), a_row)
    r_at = r_ptr + offset(tl.load(r_rows_ptr + row), r_row)
    norm = norms_ptr + row * 6
    r_top, r_log, r_last = tl.load(norm), tl.load(norm + 1), tl.load(norm + 2)
    a_top, a_log, a_last = tl.load(norm + 3), tl.load(norm + 4), tl.load(norm + 5)
    kl = tl.zeros([BLOCK], tl.float64)
    kl_rev, half_r, half_a = kl, kl, kl
    shared = tl.zeros([BLOCK], tl.int32)
    first = piece * PIECE
    for step in range(first, tl.minimum(first + PIECE, width), BLOCK):
        col = step + tl.arange(0, BLOCK)
        live = col < width
        a = tl.load(a_at + offset(col, a_col), mask=live, other=-float("inf")).to(tl.float64)
        r = tl.load(r_at + offset(col, r_col), mask=live, other=-float("inf")).to(tl.float64)
        p, q = (r - r_top) - r_log, (a - a_top) - a_log
        high = tl.maximum(p, q)
        # Equal ones need no detour, which would leave a rounding error behind; two of -inf have no difference either.
        half = tl.where(p == q, p, high + tl.log(1.0 + tl.exp(tl.minimum(p, q) - high)) - LN2)
        kl += _divergence(p, q)
        kl_rev += _divergence(q, p)
        half_r += _divergence(p, half)
        half_a += _divergence(q, half)
        shared += (live & (r >= r_last) & (a >= a_last)).to(tl.int32)
    at = offset(row, pieces) + piece
    tl.store(sums_ptr + at * 4, tl.sum(kl, 0))
    tl.store(sums_ptr + at * 4 + 1, tl.sum(kl_rev, 0))
    tl.store(sums_ptr + at * 4 + 2, tl.sum(half_r, 0))
    tl.store(sums_ptr + at * 4 + 3, tl.sum(half_a, 0))
    tl.store(shared_ptr + at, tl.sum(shared, 0).to(tl.int64))


@on_its_device
def logits_rows(
    a: Tensor, r: Tensor, following: Tensor, k: int, pairs: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """``divergence.logits_rows`` of a and r [rows, V], which may be any views; pairs are read where they lie."""
    a, r = readable(a), readable(r)
    # The kernels read the numbers of rows one after the other, whatever the caller cut them out of.
    of_a, of_r = (x.contiguous() for x in pairs or (torch.arange(len(a), device=a.device),) * 2)
    if _launched_as(a) != _launched_as(r):
        # Compiled in two ways, the same sums may differ by a rounding, and equal logits would not be at distance 0.
        wide = torch.promote_types(a.dtype, r.dtype)
        a, r = (x.to(wide, memory_format=torch.contiguous_format, copy=True) for x in (a, r))
    rows, width = len(of_a), a.shape[1]
    pieces = triton.cdiv(width, PIECE)
    k = min(k, width)
    r_side, a_side = _Normalised(r, of_r, k, pieces), _Normalised(a, of_a, k, pieces)
    norms = torch.stack([n for side in (r_side, a_side) for n in (side.top, side.log, side.last)], 1)
    sums = torch.zeros(rows, pieces, 4, dtype=torch.float64, device=a.device)
    shared = torch.zeros(rows, pieces, dtype=torch.long, device=a.device)
    if rows:
        _second_sweep[rows, pieces](
            a, r, of_a, of_r, norms, sums, shared, *a.stride(), *r.stride(), width, pieces,
            PIECE=PIECE, BLOCK=_BLOCK // 2, num_warps=4,
        )  # fmt: skip
    kl, kl_rev, half_r, half_a = sums.sum(1).clamp(min=0.0).unbind(1)
    token = following.clamp(min=0)
    dlogp = a_side.log_probability(a[of_a, token]) - r_side.log_probability(r[of_r, token])
    return {
        "kl": kl,
        "kl_rev": kl_rev,
        "js": (half_r + half_a) / 2,
        "flip": (a_side.best != r_side.best).long(),
        "margin": r_side.margin,
        "overlap": shared.sum(1).clamp(max=k).double() / k,
        "dlogp": dlogp.masked_fill(following < 0, float("nan")),
    }


def _launched_as(x: Tensor) -> tuple:
    """What Triton compiles a kernel anew for: the dtype of x, and what it knows of its address and strides."""
    return x.dtype, x.data_ptr() % 16 == 0, [(step == 1, step % 16 == 0) for step in x.stride()]


class _Normalised:
    """What the first sweep finds of rows ``of`` of x: all [rows] float64, and the token of the largest logit.

    top, log: a log-probability is (logit - top) - log. last: the k-th largest logit. margin: the two largest apart.
    """

    def __init__(self, x: Tensor, of: Tensor, k: int, pieces: int) -> None:
        rows, width = len(of), x.shape[1]
        keep = max(k, min(2, width))
        stats = torch.zeros(rows, pieces, keep + 2, dtype=torch.float64, device=x.device)
        places = torch.zeros(rows, pieces, 3, dtype=torch.long, device=x.device)
        if rows:
            _first_sweep[rows, pieces](
                x, of, stats, places, *x.stride(), width, pieces,
                K=keep, LANES=triton.next_power_of_2(max(keep, 2)), PIECE=PIECE, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
        tops, totals = stats[..., 0], stats[..., 1]
        self.top = tops.amax(1)
        base = self.top.masked_fill(self.top == -torch.inf, 0.0)
        self.log = (totals * (tops - base[:, None]).exp()).sum(1).log()
        largest = stats[..., 2:].flatten(1).topk(keep, -1).values
        nans = places[..., 1].sum(1)
        self.last = largest[:, k - 1].masked_fill(nans >= k, float("nan"))
        self.margin = (largest[:, 0] - largest[:, min(2, width) - 1]).masked_fill(nans > 0, float("nan"))
        piece = (tops == self.top[:, None]).to(torch.uint8).argmax(1)
        best = places[..., 0].gather(1, piece[:, None])[:, 0]
        # As torch has it: the first NaN, also behind an infinity.
        self.best = torch.where(nans > 0, places[..., 2].amin(1), best)

    def log_probability(self, logit: Tensor) -> Tensor:
        """[rows] of one logit of each row."""
        return logit.double() - self.top - self.log
