"""The roofline of every kernel on a CUDA device: `python benchmarks/roofline.py [--only NAME] [--rounds 3]`.

Prints JSON lines: the environment; the ceilings, measured in the same run by a large copy and large products; and for
each kernel and variant its time, and the share of the floor that bytes and operations set. Nothing is timed whose
result is not that of the torch form. Exit code 1 if a check failed, 2 without a CUDA device.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness import environment
from torch import Tensor

from replayscope.kernels.attention import packed_attention
from replayscope.kernels.compressor import compress_pairs
from replayscope.kernels.divergence import logits_rows, row_sums
from replayscope.kernels.index import index_scores, topk_entries
from replayscope.kernels.packed import EntryRows, WindowRows

Result = Tensor | dict[str, Tensor] | tuple[Tensor, ...]
Calls = dict[str, Callable[[], Result]]
Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Kernel:
    """calls: variant -> what is timed; `torch` is the meaning that the others are held against, to rtol and atol.

    moved: bytes that must cross the device's memory, every input read once and every output written once. done:
    operations as written, of numbers of `unit` (`bf16` or `fp64`); an exponential is one.
    """

    calls: Calls
    moved: int
    done: int
    unit: str
    rtol: float
    atol: float


def attention(device: torch.device) -> Kernel:
    """2048 rows of 64 heads of 512 channels, W = 128 and 512 of 16384 entries: the sizes of V4.1-Flash, in bf16."""
    from replayscope.kernels import attention_triton as form

    rows, heads, dim, window, picks, entries = 2048, 64, 512, 128, 512, 16384
    q = torch.randn(rows, heads, dim, device=device).bfloat16()
    kv, pool = (torch.randn(n, dim, device=device).bfloat16() for n in (rows + window, entries))
    at, zero = torch.arange(window, rows + window, device=device), torch.zeros(rows, dtype=torch.long, device=device)
    chosen = torch.rand(rows, entries, device=device).topk(picks).indices.sort(1).values
    w, e = WindowRows(at, zero, zero, zero, zero), EntryRows(chosen, zero, zero, zero)
    sink = torch.randn(heads, device=device)

    def plain() -> Tensor:
        return packed_attention(q, kv, w, window, pool, e, sink, "torch")

    def tiled(*sizes: int) -> Callable[[], Tensor]:
        return lambda: form.packed_attention(q, kv, w, window, pool, e, sink, form.Tiles(*sizes))

    calls: Calls = {"torch": plain, "torch.compile": torch.compile(plain)}
    calls["triton"] = lambda: packed_attention(q, kv, w, window, pool, e, sink, "triton")
    # Other tiles than the kernel takes by itself: heads, keys, warps, stages.
    for sizes in ((64, 32, 8, 2), (64, 64, 8, 2), (32, 32, 4, 2), (64, 16, 8, 4)):
        calls[f"triton {sizes}"] = tiled(*sizes)
    moved = 2 * _bytes(q) + _bytes(kv, pool, chosen)
    # bf16 weights and a bf16 result: 2^-9 of values up to 1 (a mean of 640 keys), twice.
    return Kernel(calls, moved, 4 * rows * heads * dim * (window + picks), "bf16", 2e-2, 4e-3)


def states(dtype: torch.dtype) -> Callable[[torch.device], Kernel]:
    def make(device: torch.device) -> Kernel:
        """8192 rows of 5120 numbers: what one layer hands over at the width of V4.1-Flash."""
        r = torch.randn(8192, 5120, device=device)
        a = (r + 1e-3 * torch.randn_like(r)).to(dtype)
        r = r.to(dtype)
        spare = torch.empty_like(a)
        calls: Calls = {
            "torch": lambda: row_sums(a, r),
            "torch.compile": torch.compile(lambda: row_sums(a, r)),
            "triton": lambda: row_sums(a, r, impl="triton"),
            # As many bytes, half of them written.
            "copy": lambda: spare.copy_(a),
        }
        return Kernel(calls, _bytes(a, r), 14 * a.numel(), "fp64", 1e-11, 1e-13)

    return make


def logits(device: torch.device) -> Kernel:
    """512 rows of 129,280 fp32 logits; both are read twice, once for each sweep."""
    r = 3 * torch.randn(512, 129_280, device=device)
    a, token = r + 1e-2 * torch.randn_like(r), torch.arange(512, device=device)
    calls: Calls = {
        "torch": lambda: logits_rows(a, r, token),
        "torch.compile": torch.compile(lambda: logits_rows(a, r, token)),
        "triton": lambda: logits_rows(a, r, token, impl="triton"),
    }
    return Kernel(calls, 2 * _bytes(a, r), 42 * a.numel(), "fp64", 1e-10, 1e-12)


def scores(device: torch.device) -> Kernel:
    """Index scores of 1024 rows of 32 heads of 128 channels against 16384 entries, in bf16."""
    rows, heads, dim, entries = 1024, 32, 128, 16384
    q, keys = (torch.randn(*s, device=device).bfloat16() for s in ((rows, heads, dim), (entries, dim)))
    weights, seen = torch.randn(rows, heads, device=device) / heads, torch.full((rows,), entries, device=device)
    calls: Calls = {
        "torch": lambda: index_scores(q, weights, [keys], seen),
        "torch.compile": torch.compile(lambda: index_scores(q, weights, [keys], seen)),
        "triton": lambda: index_scores(q, weights, [keys], seen, impl="triton"),
    }
    moved = _bytes(q, keys, weights) + 4 * rows * entries
    return Kernel(calls, moved, 2 * rows * heads * dim * entries, "bf16", 1e-4, 1e-3)


def topk(device: torch.device) -> Kernel:
    """The 512 best of 16384 scores in 1024 rows; the kernel reads the scores six times, which is not counted."""
    rows, entries, k = 1024, 16384, 512
    # No two alike in a row: which of equal scores is taken is left open.
    given = torch.rand(rows, entries, device=device).argsort(1).float()
    calls: Calls = {
        "torch": lambda: topk_entries(given, k),
        "torch.compile": torch.compile(lambda: topk_entries(given, k)),
        "triton": lambda: topk_entries(given, k, impl="triton"),
    }
    return Kernel(calls, _bytes(given) + 8 * rows * k, 0, "fp64", 0.0, 0.0)


def compressor(device: torch.device) -> Kernel:
    """65536 pairs of 512 channels to bf16 latents."""
    pairs, width = 65536, 512
    content, score = (torch.randn(pairs, 2, width, device=device) for _ in range(2))
    norm = torch.rand(width, device=device)
    calls: Calls = {
        "torch": lambda: compress_pairs(content, score, norm, 1e-20, torch.bfloat16),
        "torch.compile": torch.compile(lambda: compress_pairs(content, score, norm, 1e-20, torch.bfloat16)),
        "triton": lambda: compress_pairs(content, score, norm, 1e-20, torch.bfloat16, "triton"),
    }
    # A rounding to bf16 may fall the other way before the norm and after it: 2^-8 of values up to 4, twice.
    return Kernel(calls, _bytes(content, score) + 2 * pairs * width, 0, "bf16", 1e-2, 3e-2)


KERNELS: dict[str, Callable[[torch.device], Kernel]] = {
    "attention": attention,
    "row-sums-fp32": states(torch.float32),
    "row-sums-bf16": states(torch.bfloat16),
    "logits": logits,
    "index-scores": scores,
    "index-topk": topk,
    "compressor": compressor,
}


def ceilings(device: torch.device, seconds: Seconds) -> dict[str, float]:
    """bytes/s of a copy of 1 GiB (read and written), operations/s of square products in bf16 and fp64."""
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * _bytes(source) / seconds(lambda: target.copy_(source))}
    for name, dtype, n in (("bf16", torch.bfloat16, 8192), ("fp64", torch.float64, 4096)):
        x, y = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        found[name] = 2 * n**3 / seconds(lambda x=x, y=y: x @ y)
    return found


def measure(
    name: str, device: torch.device, rounds: int, limits: dict[str, float], seconds: Seconds
) -> Iterator[dict[str, Any]]:
    """Records of a kernel's variants, in rounds, so that a ratio compares times of one round."""
    torch.manual_seed(0)
    kernel = KERNELS[name](device)
    want = kernel.calls["torch"]()
    faults = {v: _differ(call, want, kernel) for v, call in kernel.calls.items() if v != "copy"}
    failed = {variant: fault for variant, fault in faults.items() if fault}
    for variant, fault in failed.items():
        yield {"kernel": name, "variant": variant, "failed": fault}
    timed = {variant: call for variant, call in kernel.calls.items() if variant not in failed}
    times: dict[str, list[float]] = {variant: [] for variant in timed}
    for _ in range(rounds):
        for variant, call in timed.items():
            times[variant].append(seconds(call))
    floor = max(kernel.moved / limits["copy"], kernel.done / limits[kernel.unit])
    for variant, taken in times.items():
        median = statistics.median(taken)
        ratios = {
            f"faster_than_{other}": statistics.median(b / own for b, own in zip(times[other], taken, strict=True))
            for other in ("torch", "torch.compile")
            if other in times and other != variant
        }
        yield {
            "kernel": name,
            "variant": variant,
            "median_s": median,
            "spread": (max(taken) - min(taken)) / median,
            "bytes": kernel.moved,
            "operations": kernel.done,
            "bytes_per_s": kernel.moved / median,
            "operations_per_s": kernel.done / median,
            "floor_s": floor,
            "bound_by": "memory" if floor == kernel.moved / limits["copy"] else kernel.unit,
            "share_of_floor": floor / median,
            "share_of_copy": kernel.moved / median / limits["copy"],
            **ratios,
        }


def _differ(call: Callable[[], Result], want: Result, kernel: Kernel) -> str | None:
    """What is wrong with a variant in one line, or None; a variant that cannot run is wrong too."""
    try:
        torch.testing.assert_close(call(), want, rtol=kernel.rtol, atol=kernel.atol, equal_nan=True)
    except Exception as error:
        return " ".join(str(error).split())[:500] or type(error).__name__
    return None


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", choices=list(KERNELS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("roofline: no CUDA device here; run it on a machine that has one", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    def seconds(call: Callable[[], object]) -> float:
        # It empties the L2 cache before each call and times by events on the device.
        times = do_bench(call, warmup=10, rep=60, return_mode="all")
        assert isinstance(times, list)
        return statistics.median(times) / 1e3

    device = torch.device("cuda")
    print(json.dumps(environment(device)), flush=True)
    limits = ceilings(device, seconds)
    print(json.dumps({"ceilings": limits}), flush=True)
    failed = False
    for name in options.only or KERNELS:
        for record in measure(name, device, options.rounds, limits, seconds):
            failed |= "failed" in record
            print(json.dumps(record), flush=True)
        torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
