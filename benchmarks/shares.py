"""Where a sweep's time goes: `python benchmarks/shares.py` prints the share of each part, on one torch thread.

On one thread everything runs one after another, so that a part's time is its own: what it spends in another part of
the table is counted there. Parts are timed at their functions, some ten thousand calls of a microsecond each.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# As the command line does: threads that wait by spinning take the time of those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from sweep import Sweep

from replayscope.inspector import fold, step
from replayscope.inspector.fold import Fold
from replayscope.inspector.segments import Segments
from replayscope.inspector.step import Step
from replayscope.model import ops, presets
from replayscope.model.weights import Model

REST = "the rest: plans, tables"
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "layers: indexer": ((Step, "_choose_entries"),),
    "layers: attention": ((step, "packed_attention"),),
    "layers: experts": ((Step, "_feed_forward"), (ops, "router_scores"), (ops, "choose_experts")),
    "layers: mHC": ((ops, "mhc"), (ops, "expand"), (ops, "collapse")),
    "layers: the rest (projections, entries, slots, byte checks)": ((Step, "layer"), (Step, "finish")),
    "comparison: sums of rows": ((fold, "row_sums"),),
    "comparison: logits and choices": ((fold, "logits_rows"), (fold, "_sets")),
    "comparison: taking rows, joining blocks": ((fold, "_rows"), (fold, "_joined")),
    "comparison: regions, distances, thresholds": (
        (Fold, "_fold"), (Segments, "reduce"), (Segments, "largest"), (Segments, "crossings"),
    ),
    "comparison: the rest": ((Fold, "add"),),
}  # fmt: skip


class Clock:
    """Seconds of each part without those of the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = [REST]
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, whose time is counted under a part's name."""

        def timed(*given: Any, **named: Any) -> Any:
            self._charge()
            self._open.append(name)
            try:
                return call(*given, **named)
            finally:
                self._charge()
                self._open.pop()

        return timed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens meanwhile."""
        kept = [(owner, name, getattr(owner, name)) for places in PARTS.values() for owner, name in places]
        for part, places in PARTS.items():
            for owner, name in places:
                setattr(owner, name, self.part(part, getattr(owner, name)))
        self._since = time.perf_counter()
        try:
            yield
            self._charge()
        finally:
            for owner, name, call in kept:
                setattr(owner, name, call)


def shares(case: Sweep) -> dict[str, float]:
    """Part → share of one sweep's time; they add up to 1."""
    clock = Clock()
    with clock.running():
        case.sweep()
    total = sum(clock.seconds.values())
    return {part: clock.seconds.get(part, 0.0) / total for part in (*PARTS, REST)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--cuts", type=int, default=64)
    parser.add_argument("--suffix", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = presets.load_any("mini", torch.float32, torch.device("cpu"))
    assert isinstance(model, Model)
    case = Sweep(model, options.tokens, options.cuts, options.suffix)
    case.sweep()  # allocators and caches settle
    rounds = [shares(case) for _ in range(options.rounds)]
    print("| part | share |\n|---|---|")
    for part in rounds[0]:
        print(f"| {part} | {100 * statistics.median(r[part] for r in rounds):.1f} % |")


if __name__ == "__main__":
    main()
