"""Triton form of ``divergence.row_sums``: every number of both states is read once, nothing of their size is written.

All arithmetic is in float64, as in torch: squares of differences of 1e-8 beside values of 1e2 leave nothing for fewer
bits, and the memory is slower than the float64 units. A tile holds one row for each warp, so that a row's sums never
leave its warp; a long row is cut into pieces, whose sums torch adds. The cut depends on the width alone and a row's
place in its tile changes no order, so that its bits do not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayscope.kernels.impl import on_its_device, readable
from replayscope.kernels.offsets_triton import finite, offset

PIECE = 4096
_WARPS = 4
# Sums of a piece, in the order in which the kernel stores them.
_SUMS, _COUNTS = ("diff2", "ref2", "arm2", "dot", "max_abs"), ("max_col", "over", "nonfinite", "bad")


@triton.jit
def _state(
    a_ptr, r_ptr, a_rows_ptr, r_rows_ptr, sums_ptr, counts_ptr, a_row, a_col, r_row, r_col, rows, width, pieces,
    TOL_ABS: tl.constexpr, TOL_REL: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    of_a = tl.load(a_rows_ptr + row, mask=row < rows, other=0)
    of_r = tl.load(r_rows_ptr + row, mask=row < rows, other=0)
    a_at, r_at = a_ptr + offset(of_a, a_row)[:, None], r_ptr + offset(of_r, r_row)[:, None]
    diff2 = tl.zeros([ROWS, COLS], tl.float64)
    ref2, arm2, dot, best = diff2, diff2, diff2, diff2
    over = tl.zeros([ROWS, COLS], tl.int32)
    nonfinite, bad, place = over, over, over
    first = piece * PIECE
    for step in range(first, tl.minimum(first + PIECE, width), COLS):
        col = (step + tl.arange(0, COLS))[None, :]
        live = (row < rows)[:, None] & (col < width)
        a = tl.load(a_at + offset(col, a_col), mask=live, other=0.0).to(tl.float64)
        r = tl.load(r_at + offset(col, r_col), mask=live, other=0.0).to(tl.float64)
        good = finite(a) & finite(r)
        same = (a == r) | ((a != a) & (r != r))
        nonfinite += (~good & ~same).to(tl.int32)
        bad += (~finite(a)).to(tl.int32)
        a, r = tl.where(good, a, 0.0), tl.where(good, r, 0.0)
        gap = a - r
        size = tl.abs(gap)
        over += (size > TOL_ABS + TOL_REL * tl.abs(r)).to(tl.int32)
        diff2 += gap * gap
        ref2 += r * r
        arm2 += a * a
        dot += a * r
        place = tl.where(size > best, col, place)
        best = tl.maximum(best, size)
    top = tl.max(best, 1)
    # Of equal differences the first, as torch on a CPU has it.
    place = tl.min(tl.where(best == top[:, None], place, 2147483647), 1)
    at = offset(row, pieces) + piece
    live = row < rows
    tl.store(sums_ptr + at * 5, tl.sum(diff2, 1), mask=live)
    tl.store(sums_ptr + at * 5 + 1, tl.sum(ref2, 1), mask=live)
    tl.store(sums_ptr + at * 5 + 2, tl.sum(arm2, 1), mask=live)
    tl.store(sums_ptr + at * 5 + 3, tl.sum(dot, 1), mask=live)
    tl.store(sums_ptr + at * 5 + 4, top, mask=live)
    tl.store(counts_ptr + at * 4, place.to(tl.int64), mask=live)
    tl.store(counts_ptr + at * 4 + 1, tl.sum(over, 1).to(tl.int64), mask=live)
    tl.store(counts_ptr + at * 4 + 2, tl.sum(nonfinite, 1).to(tl.int64), mask=live)
    tl.store(counts_ptr + at * 4 + 3, tl.sum(bad, 1).to(tl.int64), mask=live)


@on_its_device
def row_sums(
    a: Tensor, r: Tensor, tol_abs: float, tol_rel: float, pairs: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """``divergence.row_sums`` of a and r [rows, …], which may be any views; pairs are read where they lie."""
    a, r = readable(a).flatten(1), readable(r).flatten(1)
    # The kernel reads the numbers of rows one after the other, whatever the caller cut them out of.
    of_a, of_r = (x.contiguous() for x in pairs or (torch.arange(len(a), device=a.device),) * 2)
    rows, width = len(of_a), a.shape[1]
    pieces = max(triton.cdiv(width, PIECE), 1)
    sums = torch.zeros(rows, pieces, len(_SUMS), dtype=torch.float64, device=a.device)
    counts = torch.zeros(rows, pieces, len(_COUNTS), dtype=torch.long, device=a.device)
    # 16 bytes for each thread of a warp, of the narrower of the two.
    cols = 32 * 16 // min(a.element_size(), r.element_size())
    if rows and width:
        _state[triton.cdiv(rows, _WARPS), pieces](
            a, r, of_a, of_r, sums, counts, *a.stride(), *r.stride(), rows, width, pieces,
            TOL_ABS=tol_abs, TOL_REL=tol_rel, PIECE=PIECE, ROWS=_WARPS, COLS=cols, num_warps=_WARPS,
        )  # fmt: skip
    best = sums[..., 4].amax(1)
    # Pieces lie in order: the first of those with the largest difference holds the first column that has it.
    piece = (sums[..., 4] == best[:, None]).to(torch.uint8).argmax(1)
    col = counts[..., 0].gather(1, piece[:, None])[:, 0]
    out = {"elements": torch.full((rows,), width, dtype=torch.long, device=a.device)}
    out |= {name: sums[..., i].sum(1) for i, name in enumerate(_SUMS[:4])}
    out |= {"max_abs": best, "max_col": col.masked_fill(best == 0, -1)}
    return out | {name: counts[..., i].sum(1) for i, name in enumerate(_COUNTS) if i}
