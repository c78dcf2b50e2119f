"""One pass over two states: the per-row sums from which every state metric follows, and the logits' divergence."""

import math

import torch
from torch import Tensor

from replayscope.kernels.impl import expect, use_triton

TOL_ABS, TOL_REL = 1e-6, 1e-3
# Rows of the arm and rows of the reference that are held against each other, int64 [rows] each.
Pairs = tuple[Tensor, Tensor]


@torch.no_grad()
def row_sums(
    a: Tensor,
    r: Tensor,
    tol_abs: float = TOL_ABS,
    tol_rel: float = TOL_REL,
    impl: str = "torch",
    pairs: Pairs | None = None,
) -> dict[str, Tensor]:
    """a (arm), r (reference) [rows, …] → dict of [rows] arrays, summed in float64 over everything but the rows.

    elements, diff2 Σ(a-r)², ref2 Σr², arm2 Σa², dot Σa·r over pairs that are finite in both; max_abs and its flat index
    max_col (-1 if no finite pair differs); over: elements with abs(a-r) > tol_abs + tol_rel·abs(r); nonfinite: pairs
    where a side is not finite and the two are not the same infinity or both NaN; bad: non-finite elements of the arm.
    impl: ``torch``, ``triton`` (no float64 states) or ``auto``. pairs: which rows are compared, None for each row of a
    with that of r; torch copies them, so that a caller with many of them cuts them into blocks. Raises ValueError for
    shapes that do not go together.
    """
    if a.dim() < 2 or r.dim() < 2 or a.shape[1:] != r.shape[1:]:
        raise ValueError(f"a and r must be rows of the same shape [rows, …], not {list(a.shape)} and {list(r.shape)}")
    _count(a, r, pairs)
    if use_triton(impl, a):
        from replayscope.kernels import divergence_triton

        return divergence_triton.row_sums(a, r, tol_abs, tol_rel, pairs)
    # Copies of its own, so that all that follows is done in place: memory of this size is dear to take.
    a, r = (x.flatten(1).to(torch.float64, copy=True) for x in _paired(a, r, pairs))
    rows, width = a.shape
    nonfinite = bad = torch.zeros(rows, dtype=torch.long, device=a.device)
    ref2, arm2 = _squares(r), _squares(a)
    # A number that is not finite shows in its row's sum of squares, so that the common case needs no mask.
    if not torch.isfinite(ref2.sum() + arm2.sum()):
        ok = torch.isfinite(a) & torch.isfinite(r)
        same = (a == r) | (torch.isnan(a) & torch.isnan(r))
        nonfinite, bad = (~ok & ~same).sum(1), (~torch.isfinite(a)).sum(1)
        a, r = a.masked_fill(~ok, 0.0), r.masked_fill(~ok, 0.0)
        ref2, arm2 = _squares(r), _squares(a)
    gap = a - r
    diff2, dot = _squares(gap), a.mul_(r).sum(1)
    size = gap.abs_()
    if width:
        col = _first_largest(size)
        max_abs = size.gather(1, col[:, None])[:, 0]
    else:
        max_abs, col = size.new_zeros(rows), torch.zeros(rows, dtype=torch.long, device=a.device)
    # Counted in float64, which takes half as long as summing booleans.
    over = torch.gt(size.sub_(r.abs_(), alpha=tol_rel), tol_abs, out=size).sum(1).long()
    return {
        "elements": torch.full((rows,), width, dtype=torch.long, device=a.device),
        "diff2": diff2,
        "ref2": ref2,
        "arm2": arm2,
        "dot": dot,
        "max_abs": max_abs,
        "max_col": col.masked_fill(max_abs == 0, -1),
        "over": over,
        "nonfinite": nonfinite,
        "bad": bad,
    }


def _squares(x: Tensor) -> Tensor:
    """Σx² of each row, in one pass."""
    return torch.linalg.vector_norm(x, dim=1).square_()


def _first_largest(x: Tensor) -> Tensor:
    """The column of each row's largest number, the first of equals."""
    return torch.from_numpy(x.detach().numpy().argmax(1)) if _numpy_reads(x) else x.argmax(1)


def _numpy_reads(x: Tensor) -> bool:
    """Whether numpy, which searches a row in a fifth of torch's time, can read the tensor: on a CPU, no subclass of
    one, of a type that it knows. A compiler has no numbers to be read."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return plain and not torch.compiler.is_compiling()


@torch.no_grad()
def logits_rows(
    a: Tensor, r: Tensor, following: Tensor, k: int = 5, impl: str = "torch", pairs: Pairs | None = None
) -> dict[str, Tensor]:
    """Divergence of logits: a (arm), r (reference) [rows, V], following [rows] → dict of [rows] arrays.

    following: the token that really comes next, -1 for none. kl = KL(r‖a), kl_rev = KL(a‖r), js, in nats: a term with
    probability 0 on the left is 0, also where it is only too small for a float64, and one with probability 0 on the
    right only is inf; a row that is nowhere finite gives NaN. flip: top-1 differs; margin: top-2 gap of the reference's
    logits; overlap: share of the top k in common; dlogp: log-probability of ``following``, arm minus reference (NaN:
    none). impl and pairs as for ``row_sums``. Raises ValueError for shapes that do not go together, for no token at all
    and for a k below 1.
    """
    if a.dim() != 2 or r.dim() != 2 or a.shape[1] != r.shape[1] or not a.shape[1]:
        raise ValueError(f"a and r must be logits [rows, V] of one V, not {list(a.shape)} and {list(r.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    expect("following", following, (_count(a, r, pairs),))
    if use_triton(impl, a):
        from replayscope.kernels import logits_triton

        return logits_triton.logits_rows(a, r, following, k, pairs)
    a, r = _paired(a, r, pairs)
    p, q = r.double().log_softmax(-1), a.double().log_softmax(-1)
    # Where the two agree so does their mean: the detour over logaddexp would leave a rounding error behind.
    half = torch.where(p == q, p, torch.logaddexp(p, q) - math.log(2.0))
    k = min(k, p.shape[-1])
    best_a, best_r = _top(a, k), _top(r, max(k, min(2, r.shape[-1])))
    # Tied tokens count for each other: whichever of them a sort puts first says nothing.
    shared = ((r >= best_r[:, k - 1 : k]) & (a >= best_a[:, k - 1 : k])).sum(-1)
    token = following.clamp(min=0)[:, None]
    dlogp = (q.gather(1, token) - p.gather(1, token))[:, 0]
    of_r, of_a, term = p.exp(), q.exp(), torch.empty_like(p)
    return {
        "kl": _kl(of_r, p, q, term),
        "kl_rev": _kl(of_a, q, p, term),
        "js": (_kl(of_r, p, half, term) + _kl(of_a, q, half, term)) / 2,
        "flip": (a.argmax(-1) != r.argmax(-1)).long(),
        "margin": best_r[:, 0].double() - best_r[:, min(1, r.shape[-1] - 1)].double(),
        "overlap": shared.clamp(max=k).double() / k,
        "dlogp": dlogp.masked_fill(following < 0, float("nan")),
    }


def _kl(share: Tensor, p: Tensor, q: Tensor, term: Tensor) -> Tensor:
    """Σ exp(p)·(p-q) over the last axis of two log-probabilities; rounding may not push it below 0. share: exp(p);
    term: memory for the summands."""
    return torch.sub(p, q, out=term).mul_(share).masked_fill_(share == 0, 0.0).sum(-1).clamp(min=0.0)


def _top(x: Tensor, k: int) -> Tensor:
    """The k largest numbers of each row, the largest first; NaN is largest."""
    if _numpy_reads(x):
        rows = x.detach().clone(memory_format=torch.contiguous_format).numpy()
        rows.partition(-k, 1)
        best = rows[:, -k:]
        best.sort(1)
        return torch.from_numpy(best[:, ::-1].copy())
    return x.topk(k, -1).values


def _count(a: Tensor, r: Tensor, pairs: Pairs | None) -> int:
    """How many rows are compared. Raises ValueError where the two sides have not as many."""
    if pairs is None:
        if len(a) != len(r):
            raise ValueError(f"a and r must have as many rows, or pairs of them be named: not {len(a)} and {len(r)}")
        return len(a)
    expect("pairs[0]", pairs[0], ("pairs",))
    expect("pairs[1]", pairs[1], (len(pairs[0]),))
    return len(pairs[0])


def _paired(a: Tensor, r: Tensor, pairs: Pairs | None) -> Pairs:
    return (a, r) if pairs is None else (a.index_select(0, pairs[0]), r.index_select(0, pairs[1]))
