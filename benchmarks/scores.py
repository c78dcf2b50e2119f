"""What the embedded models answer under each arm: `python benchmarks/scores.py -m mini -m mini-replay -o FILE`.

Every task is asked with its key facts on, at, before and behind the cut, and scored with the answer forced (see
inspector/scoring.py). One JSON line per model, task, place, suffix and way: how many answers were exact, and the
divergence.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from replayscope.inspector import samples
from replayscope.inspector.scoring import Answer, Way, scored
from replayscope.model import presets, tasks, tokenizer

LENGTH = 1024


def ways(window: int) -> tuple[Way, ...]:
    """What is compared: the reference first, what is equal on paper, then what is not."""
    return (
        Way("full"),
        Way("hit"),
        Way("exact"),
        Way("encoder", window),
        Way("encoder", 2 * window),
        Way("decoder"),
        Way("both", window),
    )


def asked(task: str, trials: int, length: int = LENGTH) -> list[tasks.Sample]:
    """``trials`` prompts for each place of the cut, suffixes in turn, over the embedded prose (held out)."""
    suffixes = list(tasks.SUFFIXES)
    filler = samples.load("prose")
    return [
        tasks.make(task, first + seed, length, place, suffixes[seed % len(suffixes)], filler)
        for first, place in zip(itertools.count(0, trials), tasks.PLACES, strict=False)
        for seed in range(trials)
    ]


def records(model_name: str, trials: int, length: int, kinds: list[str]) -> Iterator[dict[str, Any]]:
    """One record per task, place, suffix and way. kl: mean over prompts of the answer's mean KL(full‖arm) in nats.

    lost, won: answers that full gave and the way did not, and the other way round. kl_lost: median over the prompts of
    which the answer was lost, of the answer's largest KL; kl_kept the same where it was kept.
    """
    model, digest = presets.load_any(model_name, torch.float32)
    for task in kinds:
        found: dict[tuple[str, str, Way], list[tuple[Answer, Answer]]] = defaultdict(list)
        began = time.perf_counter()
        for sample, _, by_way in scored(
            model, asked(task, trials, length), tokenizer.encode, ways(model.config.sliding_window)
        ):
            for way, answer in by_way.items():
                found[sample.place, sample.suffix, way].append((by_way[Way("full")], answer))
        print(f"{model_name} {task}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        for (place, suffix, way), pairs in found.items():
            lost = [a.kl_max for f, a in pairs if f.exact and not a.exact]
            kept = [a.kl_max for f, a in pairs if f.exact and a.exact]
            yield {
                "model": model_name,
                "weights": digest[:16],
                "length": length,
                "task": task,
                "place": place,
                "suffix": suffix,
                "arm": way.arm,
                "replay": way.replay,
                "n": len(pairs),
                "exact": sum(a.exact for _, a in pairs),
                "lost": len(lost),
                "won": sum(a.exact and not f.exact for f, a in pairs),
                "kl": statistics.fmean(a.kl for _, a in pairs),
                "kl_max": max(a.kl_max for _, a in pairs),
                "kl_lost": statistics.median(lost) if lost else None,
                "kl_kept": statistics.median(kept) if kept else None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores of the embedded models under each arm, by place of the cut.")
    parser.add_argument("-m", "--model", action="append", help="a preset or folder; may be given again (default mini)")
    parser.add_argument("--trials", type=int, default=12, help="prompts per task and place")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a prompt")
    parser.add_argument("--task", action="append", choices=list(tasks.TASKS))
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON lines")
    options = parser.parse_args()
    lines = [
        json.dumps(record)
        for model in options.model or ["mini"]
        for record in records(model, options.trials, options.length, options.task or list(tasks.TASKS))
    ]
    options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
