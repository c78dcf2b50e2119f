"""Reading a large trace: `python benchmarks/large_trace.py [--gb 4] [--folder /tmp]` writes one, reads parts of it
cold, deletes it and prints JSON lines.

Bytes read are those of the process's read calls (/proc/self/io, Linux); the page cache is dropped before each read.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import environment

from replayscope.inspector.metrics import metric
from replayscope.traces import QueuedWriter, RunInfo, Table, Tokens, TraceReader, TraceWriter
from replayscope.traces.schema import bucket_names
from replayscope.ui import tab_overview, view
from replayscope.ui.library import Library

LAYERS, ROWS, WIDTH, CUTS = 40, 4096, 512, 24


def write(path: Path, size: int) -> None:
    """Runs of one arm at many cuts with bf16 states of [ROWS, WIDTH] in 40 layers, as many as fill `size` bytes, and
    tables of 600 runs."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, (ROWS + LAYERS, WIDTH), dtype=np.uint16)
    count = max(600, CUTS)
    runs = [RunInfo(i, "encoder", "paper", i, 128, 0, ROWS, ROWS, 128) for i in range(count)]
    buckets = bucket_names(ROWS)
    sums = np.random.default_rng(1).uniform(1, 2, (count, LAYERS, len(buckets)))
    arrays = {"n": np.ones(sums.shape, np.int64), "nonfinite": np.zeros(sums.shape, np.int64)} | dict.fromkeys(
        ("elements", "diff2", "ref2", "arm2", "dot"), sums
    )
    with QueuedWriter(TraceWriter(path)) as out:
        out.header(config={}, provenance={}, tokens=Tokens(np.arange(ROWS), [str(i) for i in range(ROWS)]))
        out.runs(runs)
        for point in ("window_kv", "hidden", "attn_out", "ffn_out"):
            out.table("full", point, Table("state", buckets, arrays))
        for i in range(size // (ROWS * WIDTH * 2)):
            run, layer = divmod(i, LAYERS)
            out.state(run, f"layers.{layer}.window_kv", np.arange(ROWS), bits[layer : layer + ROWS], "bfloat16")


def page(path: Path, query: str) -> dict[str, str]:
    """What the page shows first of a trace, as the server sends it: menus mended to fit it, and both maps."""
    library, (_, asked) = Library(path.parent), view.from_address(f"?trace={path.name}{query}")
    return tab_overview.content(library, view.menus(library.open(asked.trace), asked).choice)


def timed(path: Path, name: str, read: Callable[[TraceReader], object]) -> dict[str, float | str]:
    """Seconds and bytes of a first read by a new reader."""
    with open(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, start = _bytes_read(), time.perf_counter()
    read(TraceReader(path))
    seconds, count = time.perf_counter() - start, _bytes_read() - before
    return {"read": name, "seconds": seconds, "bytes": count, "share": count / path.stat().st_size}


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    size = int(options.gb * 1e9)
    if shutil.disk_usage(options.folder).free < 2 * size:
        print(f"{options.folder} needs {2 * size:,} bytes free", file=sys.stderr)
        return 2
    path = options.folder / f"large-{os.getpid()}.h5"
    print(json.dumps(environment(torch.device("cpu"))), flush=True)
    try:
        start = time.perf_counter()
        write(path, size)
        print(json.dumps({"written": path.stat().st_size, "seconds": time.perf_counter() - start}), flush=True)
        last = max(TraceReader(path).states())
        reads = {
            "cut x layer map": lambda trace: metric(trace.table("full", "window_kv"), "rel_l2"),
            "one layer": lambda trace: trace.state(*last),
            "one layer-position row": lambda trace: trace.state(*last, slice(ROWS - 1, ROWS)),
            "first figures of the page": lambda trace: page(trace.path, "")["overview_cut"],
            "the page after a move of the slider": lambda trace: page(trace.path, "&cut=300")["overview_position"],
        }
        for name, read in reads.items():
            print(json.dumps(timed(path, name, read)), flush=True)
    finally:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".partial").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
