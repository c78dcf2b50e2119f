"""What a run will cost, said before it starts: rows, seconds, bytes on disk."""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from replayscope.inspector.backend import Engine, Runnable
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.lineup import Lineup
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import Shape, request
from replayscope.inspector.waves import ORACLE_COST, waves
from replayscope.model.streaming import StreamedModel
from replayscope.traces.schema import SINGLE_POINTS, THRESHOLDS

# Numbers of 8 bytes in a bucket of a state, of choices and (besides a state's) of logits, and in a kept row.
_STATE_NUMBERS, _CHOICE_NUMBERS, _LOGITS_NUMBERS, _ROW_NUMBERS = 15, 6, 14, 9
# What HDF5 adds: chunk indices, checksums, the last chunk of each dataset (measured at 1.02 to 1.06).
_OVERHEAD = 1.1
# Kept free on the disk whatever is asked.
_FREE = 64 << 20
# A row that is run and compared, against one that is only run (measured on the embedded model).
_COMPARE_COST = 1.3


@dataclass(frozen=True)
class Estimate:
    """rows: by the executor; oracle_rows: by dense passes; seconds; bytes of the trace."""

    runs: int
    rows: int
    oracle_rows: int
    seconds: float
    bytes: int

    @property
    def text(self) -> str:
        oracle = f" and {self.oracle_rows:,} by oracles" if self.oracle_rows else ""
        return f"{self.runs} runs, {self.rows:,} rows{oracle}; about {self.seconds:.0f} s and {self.bytes / 1e6:.1f} MB"

    def refuse_if_too_large(self, path: Path, max_bytes: int | None) -> None:
        """Raise UsageError, before anything is written, over --max-bytes or over what the disk has free."""
        if max_bytes is not None and self.bytes > max_bytes:
            raise UsageError(
                f"the trace would take about {self.bytes:,} bytes, --max-bytes allows {max_bytes:,}; "
                "name fewer --hooks or cuts"
            )
        free = shutil.disk_usage(path.parent).free  # a link of that name is replaced, not followed
        if self.bytes + _FREE > free:
            raise UsageError(
                f"the trace would take about {self.bytes:,} bytes, the disk has {free:,} free; "
                "name fewer --hooks or cuts, or give another -o"
            )


def estimate(
    engine: Engine,
    ids: Tensor,
    line: Lineup,
    hooks: Iterable[str],
    keep_rows: frozenset[str],
    budget: int | None = None,
    smaller: torch.dtype | None = None,
) -> Estimate:
    """Time from a short prefill on this machine, bytes from the shapes of what is kept.

    budget: as for ``waves``; smaller: the dtype that raw states are cast to.
    """
    model = engine.model
    c = model.config
    todo = waves(line, len(ids), budget)
    rows = sum(r.stop - r.start for wave in todo for r in wave.plan.requests)
    oracle_rows = sum(line.oracle_runs[k][2].stop for wave in todo for k in wave.oracles)
    runs, L = len(line.runs), c.num_hidden_layers
    references = 2 if line.oracle_runs else 1
    buckets = 6 + max(r.stop - r.start for r in line.runs).bit_length()
    # Tables of [run, layer, bucket]: nine state points and two of choices in every layer, embed, final and logits once.
    states = (9 * L + 3) * (buckets * _STATE_NUMBERS + 2 * len(THRESHOLDS))
    others = 2 * L * buckets * _CHOICE_NUMBERS + buckets * _LOGITS_NUMBERS
    size = references * runs * (states + others) * 8
    packed = sum(r.stop - r.start for r in line.runs)
    size += references * packed * sum(1 if point in SINGLE_POINTS else L for point in keep_rows) * _ROW_NUMBERS * 8
    size = int(size * _OVERHEAD)
    kept = sum(r.stop - r.start for r in line.runs)
    size += sum(kept * _width(name, model, smaller) for name in hooks)
    work = rows * _COMPARE_COST + oracle_rows * ORACLE_COST
    if isinstance(model, StreamedModel):
        read, fixed, each = _streamed_seconds(model, ids)
        seconds = c.num_hidden_layers * (read + fixed * (1 + len(line.oracle_runs)) + each * work)
    else:
        seconds = work * _row_seconds(engine, ids)
    return Estimate(len(line.runs), rows, oracle_rows, seconds, size)


def _row_seconds(engine: Engine, ids: Tensor) -> float:
    """Seconds per row of a short prefill, the better of two."""
    some = ids[:256]
    plan = Plan((request(Shape(engine.model.config, len(some)), "full"),))
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        for _frame in engine.run(plan, {"prompt": some}):
            pass
        best = min(best, time.perf_counter() - began)
    return best / len(some)


def _streamed_seconds(model: StreamedModel, ids: Tensor) -> tuple[float, float, float]:
    """Of one layer: seconds to read it, to decode its experts for a pass, and for a row. Only the first is read."""
    began = time.perf_counter()
    _ = model.layers[0]
    read = time.perf_counter() - began
    counts = [len(ids[:256]), max(len(ids[:256]) // 4, 1)]
    spent = []
    for n in counts:
        plan = Plan((request(Shape(model.config, n), "full"),))
        began = time.perf_counter()
        for frame in Executor(model).run(plan, {"prompt": ids[:n]}):
            if frame.layer == 0:
                break
        spent.append(time.perf_counter() - began)
    each = max(spent[0] - spent[1], 0.0) / max(counts[0] - counts[1], 1)
    return read, max(spent[0] - each * counts[0], 0.0), each


def _width(name: str, model: Runnable, smaller: torch.dtype | None) -> int:
    """Bytes per row of a hook point."""
    item, point = model.dtype.itemsize, name.rsplit(".", 1)[-1]
    if point in ("topk", "router"):
        item = 4
    elif smaller is not None:
        item = smaller.itemsize
    elif point in ("logits", "mix") and item < 8:
        item = 4
    return model.config.numbers(point) * item
