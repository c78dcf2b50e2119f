"""Trains `mini` on the CPU: `python -m replayscope.model.train --minutes 30 --seed 0 -o model/mini.safetensors`.

Three stages, by progress: dense global attention; the same while the indexers learn to score entries as attention
weighs them; then their hard top-k in the forward pass. Sequences grow on the way, so that the global path is trained
at a distance. Progress is counted in tokens, or in time where the time allowed runs out first; the same seed, tokens
and thread count give the same weights as long as the clock does not interfere.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from replayscope.model import evaluate, mini, train_data
from replayscope.model.optim import Muon
from replayscope.model.train_forward import forward

# The embedded samples: like the corpus, found in the repository, since this package may not import the one above it.
HELD_OUT = Path(__file__).parents[1] / "inspector" / "samples"
HELD_OUT_FILES = {"prose": "prose.txt", "code": "code.py.txt", "tools": "tools.json.txt"}


@dataclass(frozen=True)
class Recipe:
    """Every number that the result depends on. Stages are (progress from which it holds, value), in order."""

    tokens: int = 3_200_000
    batch_tokens: int = 2048
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.3, 512), (0.8, 1024))
    distil_from: float = 0.25
    sparse_from: float = 0.667
    distil_share: float = 0.125
    matrix_lr: float = 0.02
    other_lr: float = 4e-3
    warmup: float = 0.02
    betas: tuple[float, float] = (0.9, 0.97)
    clip: float = 1.0
    balance_rate: float = 0.01
    mix: dict[str, float] = field(default_factory=lambda: dict(train_data.MIX))

    def length(self, progress: float) -> int:
        return [n for start, n in self.lengths if progress >= start][-1]

    def rate(self, progress: float) -> float:
        """Warm-up to 1, then a cosine to 0."""
        if progress < self.warmup:
            return progress / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


class Trainer:
    """Model, optimisers and counters of one run."""

    def __init__(self, recipe: Recipe, seed: int, config: mini.ModelConfig = mini.CONFIG) -> None:
        self.recipe, self.seed, self.config = recipe, seed, config
        self.corpus = train_data.load_corpus()
        self.model, self.params = mini.trainable(config, mini.initial_tensors(config, seed))
        matrix = [p for k, p in self.params.items() if p.requires_grad and is_matrix(k, p)]
        other = [p for k, p in self.params.items() if p.requires_grad and not is_matrix(k, p)]
        self.muon = Muon(matrix)
        self.adam = torch.optim.AdamW(other, lr=recipe.other_lr, betas=recipe.betas, eps=1e-10, weight_decay=0.0)
        self.rng = torch.Generator().manual_seed(seed)
        self.steps = self.tokens = 0

    def step(self, progress: float) -> dict[str, float]:
        """One update; returns loss (nats per byte over weighted bytes), distil, and the lightest expert's load."""
        r = self.recipe
        n = r.length(progress)
        made = train_data.batch(self.corpus, self.seed, self.steps, r.batch_tokens // n, n)
        ids, weights = (torch.from_numpy(a) for a in made)
        sparse = progress >= r.sparse_from
        rows = None
        if progress >= r.distil_from:
            rows = torch.randperm(n, generator=self.rng)[: int(n * r.distil_share)].sort().values
        out = forward(self.model, ids[:, :-1], "sparse" if sparse else "dense", rows)
        nats = F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(weights)
        loss = (nats * weights).sum() / weights.sum()
        (loss + out.distil).backward()
        leaves = [p for p in self.params.values() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(leaves, r.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.steps}: the gradient is not finite")
        rate = r.rate(progress)
        self.muon.step(r.matrix_lr * rate)
        self.adam.param_groups[0]["lr"] = r.other_lr * rate
        self.adam.step()
        for p in leaves:
            p.grad = None
        with torch.no_grad():
            for layer, load in zip(self.model.layers, out.loads, strict=True):
                layer.experts.bias.add_((load.mean() - load).sign(), alpha=r.balance_rate * rate)
        self.steps += 1
        self.tokens += weights.numel()
        text = weights == 1
        return {
            "bits": float(nats.detach()[text].mean()) / math.log(2),
            "answers": float(nats.detach()[weights > 1].mean()) / math.log(2) if (weights > 1).any() else math.nan,
            "distil": float(out.distil.detach()),
            "lightest": float(out.loads.min()),
        }

    def run(self, minutes: float, checkpoint: Path | None = None, every: float = 5.0) -> dict[str, str]:
        """Train until the recipe's tokens or the minutes are used up; returns what is worth storing about the run."""
        start = saved = last = time.monotonic()
        paced = "tokens"
        while True:
            by_tokens = self.tokens / self.recipe.tokens
            by_clock = (time.monotonic() - start) / (60 * minutes)
            if by_clock > by_tokens and by_clock > 0.05:
                paced = "clock"
            progress = max(by_tokens, by_clock if by_clock > 0.05 else 0.0)
            if progress >= 1:
                break
            seen = self.step(progress)
            now = time.monotonic()
            if now - last > 10:
                last = now
                line = " ".join(f"{k} {v:.3f}" for k, v in seen.items())
                print(f"{now - start:6.0f} s  step {self.steps}  tokens {self.tokens}  {progress:.3f}  {line}",
                      file=sys.stderr, flush=True)  # fmt: skip
            if checkpoint and now - saved > 60 * every:
                saved = now
                store(checkpoint, self.params, self.config, {"stage": f"unfinished, progress {progress:.3f}"})
        return {
            "seed": str(self.seed),
            "tokens": str(self.tokens),
            "steps": str(self.steps),
            "seconds": f"{time.monotonic() - start:.0f}",
            "paced_by": paced,
            "threads": str(torch.get_num_threads()),
            "recipe": json.dumps(asdict(self.recipe), sort_keys=True),
            "recipe_hash": self.recipe.digest(),
            "torch": torch.__version__,
        }


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether Muon trains it: the linear maps inside the layers, but neither the router nor the mixes."""
    return (
        name.startswith("layers.")
        and p.ndim >= 2
        and not any(s in name for s in ("hc_", "gate.weight", "weights_proj"))
    )


def store(path: Path, params: dict[str, Tensor], config: mini.ModelConfig, about: dict[str, str]) -> None:
    """Weights with ``about`` in the header, and the config beside them as .json; both replaced as a whole."""
    for target, write in (
        (path, lambda p: save_file(mini.official_tensors(params), p, metadata={"format": "pt", **about})),
        (path.with_suffix(".json"), lambda p: p.write_text(json.dumps(config.to_dict(), indent=1) + "\n")),
    ):
        partial = target.with_name(target.name + ".partial")
        write(partial)
        partial.chmod(0o644)
        os.replace(partial, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains mini on the CPU.")
    parser.add_argument("--minutes", type=float, default=30.0, help="time allowed; the schedule ends with it")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="tokens of the schedule, if time allows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="where to keep the unfinished weights every few minutes")
    options = parser.parse_args()
    for path in filter(None, (options.output, options.checkpoint)):
        if not path.parent.is_dir():
            parser.error(f"no folder {path.parent} to write {path.name} into")
    torch.set_num_threads(options.threads)
    # Subnormal probabilities far down a softmax slow a CPU manyfold.
    torch.set_flush_denormal(True)
    try:
        trainer = Trainer(replace(Recipe(), tokens=options.tokens), options.seed)
    except FileNotFoundError as e:
        parser.error(str(e))
    about = trainer.run(options.minutes, options.checkpoint)
    store(options.output, trainer.params, trainer.config, about)
    texts = {name: (HELD_OUT / file).read_text(encoding="utf-8") for name, file in HELD_OUT_FILES.items()}
    about |= evaluate.report(options.output, trainer.corpus, texts)
    store(options.output, trainer.params, trainer.config, about)
    print(json.dumps({k: v for k, v in about.items() if k != "recipe"}, indent=1))


if __name__ == "__main__":
    main()
