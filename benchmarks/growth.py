"""How a sweep grows with tokens, cuts and layers: `python benchmarks/growth.py [--quick]`, JSON lines.

Every point runs in a process of its own, for its peak memory. The last lines are exponents fitted over each axis: the
slope of log seconds, or of log peak memory, against log size.
"""

import argparse
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sweep import Sweep

from replayscope.model.config import ModelConfig
from replayscope.model.mini import CONFIG, initial_tensors
from replayscope.model.weights import build

# axis → sizes; what does not grow: tokens, cuts, layers.
AXES = {"tokens": (1024, 2048, 4096, 8192, 16384), "cuts": (4, 16, 64, 256), "layers": (8, 16, 24, 40)}
QUICK = {"tokens": (512, 1024), "cuts": (4, 16), "layers": (8, 16)}
BASE, QUICK_BASE = {"tokens": 1024, "cuts": 16, "layers": 12}, {"tokens": 256, "cuts": 4, "layers": 8}
SUFFIX = 64


def config(layers: int, tokens: int) -> ModelConfig:
    """`mini`'s schedule, cut off or continued in the way it ends."""
    ratios = (CONFIG.compress_ratios + (1,) * layers)[:layers]
    sources = [l for l in (*CONFIG.kv_source_layer_ids, *range(8, layers, 2)) if l < layers]
    return replace(
        CONFIG,
        num_hidden_layers=layers,
        compress_ratios=ratios,
        index_source_layer_ids=tuple(sources),
        max_position_embeddings=max(tokens, CONFIG.max_position_embeddings),
    )


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes. Linux hands its parent's down in ``ru_maxrss``."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return 1024 * int(found[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def point(tokens: int, cuts: int, layers: int, rounds: int) -> dict[str, Any]:
    """Median seconds of a sweep and the peak memory that it adds to a loaded model, in MB."""
    c = config(layers, tokens)
    case = Sweep(build(c, initial_tensors(c, 0)), tokens, cuts, SUFFIX)
    before = peak_memory()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        case.sweep()
        taken.append(time.perf_counter() - began)
    peak = (peak_memory() - before) / 1e6
    spread = (max(taken) - min(taken)) / statistics.median(taken)
    return {"rows": case.rows, "median_s": statistics.median(taken), "spread": spread, "peak_mb": peak}


def grow(axes: dict[str, tuple[int, ...]], base: dict[str, int], rounds: int) -> Iterator[dict[str, Any]]:
    """A record for each size of each axis, then one for each axis with its exponents."""
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    for axis, sizes in axes.items():
        found = []
        for size in sizes:
            wanted = base | {axis: size, "rounds": rounds}
            code = f"import json, growth; print(json.dumps(growth.point(**{wanted})))"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | here)
            if done.returncode:
                yield {"case": "growth", "axis": axis, "size": size, "failed": done.stderr.strip().splitlines()[-1:]}
                continue
            found.append({"case": "growth", "axis": axis, "size": size} | json.loads(done.stdout))
            yield found[-1]
        if len(found) > 1:
            yield {
                "case": "growth",
                "axis": axis,
                "exponent": slope([(p["size"], p["median_s"]) for p in found]),
                "rows_exponent": slope([(p["rows"], p["median_s"]) for p in found]),
                "memory_exponent": slope([(p["size"], p["peak_mb"]) for p in found]),
            }


def slope(points: list[tuple[float, float]]) -> float | None:
    """Least squares of log y against log x; None where x does not vary."""
    x, y = ([math.log(max(p[i], 1e-9)) for p in points] for i in range(2))
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, once each")
    quick = parser.parse_args().quick
    failed = False
    for record in grow(QUICK, QUICK_BASE, 1) if quick else grow(AXES, BASE, 2):
        failed |= "failed" in record
        print(json.dumps(record), flush=True)
    return int(failed)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
