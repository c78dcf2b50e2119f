"""All cases of Triton forms against their torch meanings, those that concern several kernels, and planted faults.

The interpreter runs them on a CPU, and a GPU runs them compiled. ``FAULTS`` names the case that must fail when a part
of a kernel is replaced by a wrong one.
"""

import math
import tempfile
from importlib import import_module
from unittest.mock import patch

import numpy as np
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.fold import Fold
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import request
from replayscope.kernels.attention import packed_attention
from replayscope.kernels.compressor import compress_pairs
from replayscope.kernels.divergence import logits_rows, row_sums
from replayscope.kernels.impl import interpreted
from replayscope.kernels.index import index_scores
from replayscope.kernels.packed import EntryRows, WindowRows
from tests import test_inspector_fold as fold_test
from tests import triton_index, triton_rows, v41
from tests.triton_attention import Packed
from tests.triton_table import ABSOLUTE, CASES, RELATIVE, TOLERANCE, case, same, same_sums

assert triton_index and triton_rows, "imported for the cases that they put into the table"
_SMALL = "attention rows=6 heads=3 dim=24 window=4 picks=3"


def run(name: str, device: str = "cpu", dtype: str = "float32", fault: str | None = None) -> None:
    """Run a case, with a fault planted if one is named. Raises AssertionError where the two forms disagree."""
    f = CASES[name]
    if fault is None:
        return f(torch.device(device), getattr(torch, dtype))
    module, attribute, broken = FAULTS[fault][0]
    with patch.object(import_module(f"replayscope.kernels.{module}"), attribute, _broken()[broken]):
        return f(torch.device(device), getattr(torch, dtype))


def _broken() -> dict:
    # Only where a fault is planted is triton imported, so that this file can be read anywhere.
    from tests import triton_faults

    return vars(triton_faults)


# fault: (module, what is replaced, by what of tests/triton_faults.py), the case that must see it.
FAULTS = {
    "window+1": (("attention_triton", "lowest_key", "one_key_more"), _SMALL),
    "window-1": (("attention_triton", "lowest_key", "one_key_less"), _SMALL),
    "no floor": (("attention_triton", "lowest_key", "without_floor"), "attention floors"),
    "32-bit offsets": (("offsets_triton", "offset", "in_32_bits"), "offsets in 64 bits"),
    "an entry too many": (
        ("index_triton", "visible", "one_entry_more"),
        "index scores rows=5 heads=4 dim=24 parts=10+23",
    ),
    "NaN is a number": (("divergence_triton", "finite", "always"), "row sums width=129"),
    "0·inf in KL": (("logits_triton", "_divergence", "without_rule"), "logits vocab=33"),
}  # fmt: skip


@case("neighbours and batch change no bit (E13)")
def _(device, dtype):
    p = Packed(6, 3, 24, 4, 3, device, dtype)
    out = p.attend("triton")
    one = Packed(6, 3, 24, 4, 3, device, dtype)
    one.q[[0, 1, 3, 4, 5]] += 7
    assert torch.equal(one.attend("triton")[2], out[2])
    g = torch.Generator().manual_seed(2)
    a, r = (torch.randn(6, 300, generator=g).to(device, dtype) for _ in range(2))
    token = torch.arange(6, device=device)
    for op, more in ((row_sums, ()), (logits_rows, (token,))):
        many, alone = op(a, r, *more, impl="triton"), op(a[2:3], r[2:3], *(t[2:3] for t in more), impl="triton")
        assert all(torch.equal(many[k][2:3], alone[k]) for k in many)


@case("bf16 is not computed with its bit patterns (E9)")
def _(device, dtype):
    g = torch.Generator().manual_seed(6)
    x, y = (torch.randint(-2, 3, (16, 1, 16), generator=g).to(device, torch.bfloat16) for _ in range(2))
    one, seen = torch.ones(16, 1, device=device), torch.full((16,), 16, device=device)
    got = index_scores(x, one, [y[:, 0]], seen, impl="triton")
    same("products of integers", got, (x[:, 0].float() @ y[:, 0].float().T).relu())
    y[3, 0, 5] = math.nan
    assert int(row_sums(y, x, impl="triton")["bad"][3]) == 1
    if interpreted():
        try:
            compress_pairs(torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.ones(8), 1e-20, torch.bfloat16, "triton")
        except ValueError as error:
            assert "bfloat16" in str(error)
        else:
            raise AssertionError("a rounding to bf16 was interpreted")


@case("offsets in 64 bits")
def _(device, dtype):
    from tests.triton_faults import offsets

    assert offsets(319, 7_864_320, device) == 2_508_718_080


@case("rows more than 2^31 numbers apart (E10)")
def _(device, dtype):
    stride = (1 << 30) + 77
    with tempfile.NamedTemporaryFile() as file:
        if device.type == "cpu":
            # Only the pages that are written take space: the file has holes, and nothing is ever 8 GB in memory.
            file.truncate((2 * stride + 40) * 4)
            far = torch.from_file(file.name, shared=True, size=2 * stride + 40, dtype=torch.float32)
        else:
            far = torch.empty(2 * stride + 40, device=device, dtype=dtype)
        pool = far.as_strided((3, 40), (stride, 1))
        g = torch.Generator().manual_seed(7)
        pool.copy_(torch.randn(3, 40, generator=g))
        ref = torch.randn(3, 40, generator=g).to(device, pool.dtype)
        same_sums(row_sums(pool, ref, impl="triton"), row_sums(pool.contiguous(), ref))
        token = torch.arange(3, device=device)
        same_sums(logits_rows(pool, ref, token, impl="triton"), logits_rows(pool.contiguous(), ref, token))
        zero = token * 0
        rows, sink = WindowRows(token, zero, zero, zero, zero), torch.zeros(2, device=device)
        q = torch.randn(3, 2, 40, generator=g).to(device, pool.dtype)
        entries = EntryRows(token[:, None], zero, zero, zero)
        got = packed_attention(q, pool, rows, 2, pool, entries, sink, "triton")
        want = packed_attention(q, pool.contiguous(), rows, 2, pool.contiguous(), entries, sink)
        same("attention", got, want, TOLERANCE["attention", pool.dtype])


@case("executor: two requests through every layer of the fixtures' model")
def _(device, dtype):
    if dtype == torch.bfloat16:
        # Rounding flips experts and entries, and no row can be compared with its own any more.
        return
    model = v41.model(dtype, device=str(device))
    shape = v41.shape(tokens=14)
    plan = Plan((request(shape, "full"), request(shape, "encoder", 10)))
    got, want = ({} for _ in range(2))
    for out, impl in ((got, "triton"), (want, "torch")):
        for frame in Executor(model, block=64, impl=impl).run(plan, {"prompt": v41.ids()[:14]}, frozenset({"logits"})):
            out |= {frame.name(p): t.clone() for p, t in frame.tensors.items() if p != "candidates"}
    for name, value in want.items():
        # No margin of a choice is below 4e-4 here, so that rounding flips none. fp32 through every layer: the tolerance
        # of the fixtures' README, of states that grow to 8.
        same(name, got[name], value, 3e-4 if value.is_floating_point() else 0.0)


@case("fold: tables of states and of logits")
def _(device, dtype):
    tables = {}
    for impl in ("triton", "torch"):
        fold = Fold(fold_test.runs(), 2, np.arange(40) % 5, torch.float32, impl=impl)
        for point in ("hidden", "logits"):
            some = fold_test.parts(0)[: 2 if point == "logits" else None]
            for part in some:
                part.arm, part.ref = part.arm.to(device, dtype), part.ref.to(device, dtype)
            fold_test.add(fold, point, 0, some)
        tables[impl] = fold.tables
    for key, table in tables["torch"].items():
        for name, value in table.arrays.items():
            got = torch.as_tensor(tables["triton"][key].arrays[name])
            # A threshold between two rows' values would have to fall on one of them to tell the two apart.
            bounds = (ABSOLUTE, 10 * RELATIVE) if value.dtype.kind == "f" else ()
            same(f"{key} {name}", got, torch.as_tensor(value), *bounds)
