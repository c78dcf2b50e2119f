"""Trains `mini` on the CPU: `python -m replayscope.model.train --minutes 90 --seed 0 -o model/mini.safetensors`.

Each task climbs a ladder of its own, from short sequences full of questions to 1,024 tokens with few. The global
attention is dense at first, while the indexers learn to score entries as attention weighs them; then more and more of
the steps read only their hard top-k. Some stay dense, or an entry that an indexer misses would never be taught to it.
Progress is counted in tokens, or in time where the time allowed runs out first; the same seed, tokens and thread count
give the same weights as long as the clock does not interfere.
"""

import argparse
import hashlib
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from replayscope.model import checkpoint, evaluate, mini, tasks, train_data
from replayscope.model.optim import Muon
from replayscope.model.train_data import Lesson
from replayscope.model.train_forward import Pass, Replay, forward
from replayscope.model.train_recipe import RECIPES, Recipe

# The embedded samples: like the corpus, found in the repository, since this package may not import the one above it.
HELD_OUT = Path(__file__).parents[1] / "inspector" / "samples"
HELD_OUT_FILES = {"prose": "prose.txt", "code": "code.py.txt", "tools": "tools.json.txt"}


COUNTERS = ("seed", "steps", "tokens", "seconds", "rung", "right", "picked", "curve")
MADE = ("seed", "tokens", "steps", "seconds", "paced_by", "recipe", "recipe_hash", "curve", "from")
MEMORY = 0.99  # of the running accuracy of a task, per batch that asks for it


class Trainer:
    """Model, optimisers and counters of one run."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        config: mini.ModelConfig = mini.CONFIG,
        start: dict[str, Tensor] | None = None,
    ) -> None:
        """``start``: fp32 tensors under official names to go on from; random ones by default."""
        self.recipe, self.seed, self.config = recipe, seed, config
        self.corpus = train_data.load_corpus()
        self.model, self.params = mini.trainable(config, start or mini.initial_tensors(config, seed))
        matrix = [p for k, p in self.params.items() if p.requires_grad and is_matrix(k, p)]
        other = [p for k, p in self.params.items() if p.requires_grad and not is_matrix(k, p)]
        self.muon = Muon(matrix)
        self.adam = torch.optim.AdamW(other, lr=recipe.other_lr, betas=recipe.betas, eps=1e-10, weight_decay=0.0)
        self.rng = torch.Generator().manual_seed(seed)
        self.steps = self.tokens = 0
        self.seconds = 0.0
        # Share of right answers: of each task alone at its rung, and of all that the indexers' choices were read for.
        self.rung = {name: len(recipe.ladder(name)) - 1 if recipe.top else 0 for name in tasks.TASKS}
        self.right = dict.fromkeys(tasks.TASKS, 0.0)
        self.picked = dict.fromkeys(tasks.TASKS, 0.0)
        self.curve: list[dict[str, float]] = []

    def step(self, progress: float) -> dict[str, float]:
        """One update; returns bits per text byte, nats per answer, distil, and the lightest expert's load."""
        r = self.recipe
        lesson, selection, path = self._next(progress)
        n, alone = lesson.length, len(lesson.levels) == 1
        made = train_data.batch(self.corpus, self.seed, self.steps, r.batch_tokens, lesson)
        ids, text = torch.from_numpy(made.ids), torch.from_numpy(made.text)
        rows = self._distilled(made) if progress >= r.distil_from and path == "own" else None
        inputs, first = ids[:, :-1], 0
        replay = None
        if path == "foreign":
            with torch.no_grad():
                other = forward(self.model, inputs.roll(1, 0), selection)
            replay = Replay(n, (0,) * self.config.num_hidden_layers, other)
        elif path == "own" and float(torch.rand((), generator=self.rng)) < r.replay_share:
            with torch.no_grad():
                full = forward(self.model, inputs, selection)
            replay, first = self._replay(full, n)
        out = forward(self.model, inputs, selection, rows, replay)
        nats = F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(text)
        # Rows before the replayed ones' end have no output in a replay.
        text = text & (torch.arange(n) >= first)
        answers = made.answers[made.answers[:, 1] >= first]
        # The sum, or the few bytes that decide a long answer would count less than those of a short one.
        per_answer = [nats[i, a:b].sum() for i, a, b, _ in answers]
        answer_loss = torch.stack(per_answer).mean() if per_answer else nats.new_zeros(())
        text_loss = nats[text].mean()
        text_weight = 0.0 if path == "foreign" else r.text_in_task if alone else 1.0
        (text_weight * text_loss + r.answer_weight * answer_loss + out.distil).backward()
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
        right = out.logits.detach().argmax(-1) == ids[:, 1:]
        if alone:
            _remember(self.right, right, answers)
        if selection == "sparse" and path == "own":
            _remember(self.picked, right, answers)
        self.steps += 1
        self.tokens += text.numel()
        return {
            "bits": float(text_loss.detach()) / math.log(2),
            "answers": float(answer_loss.detach()),
            "distil": float(out.distil.detach()),
            "lightest": float(out.loads.min()),
        }

    def _next(self, progress: float) -> tuple[Lesson, str, str]:
        """The lesson of this step, what it reads of the global path ("dense", "sparse" or "none"), and whose that is
        (`Rung.path`).

        Drawn from the seed and the number of the step. A task that is solved climbs; a longer text, or a harder task,
        has to be shown to be solved again.
        """
        r, rng = self.recipe, random.Random(f"{self.seed}/{self.steps}/lesson")
        for name, right in self.right.items():
            if right >= r.solved and self.rung[name] + 1 < len(r.ladder(name)):
                self.rung[name] += 1
                self.right[name] = right / 2
        rungs = {name: r.ladder(name)[i] for name, i in self.rung.items()}
        selection = "sparse" if rng.random() < r.sparse_share(progress) else "dense"
        if rng.random() < r.mixed_share(progress):
            # What is to be carried is never asked where it could be looked up.
            own = {name: rung for name, rung in rungs.items() if rung.path == "own"}
            levels = {name: rung.level for name, rung in own.items()}
            longest = max(rung.length for rung in own.values())
            return Lesson(longest, levels, r.mixed_density, r.plain, r.far), selection, "own"
        often = dict(r.often)
        wrong = [often.get(name, 1.0) * (1.1 - right) for name, right in self.right.items()]
        name = rng.choices(list(self.right), wrong)[0]
        rung = rungs[name]
        lesson = Lesson(rung.length, {name: rung.level}, r.density, far=r.far, reach=rung.reach)
        return lesson, "none" if rung.path == "none" else selection, rung.path

    def _distilled(self, made: train_data.Batch) -> Tensor:
        """Rows [R] on which the indexers are taught: those that answer, where attention is sharpest, and a few more."""
        n = made.text.shape[1]
        answering = torch.zeros(n, dtype=torch.bool)
        for _, a, b, _ in made.answers:
            answering[a:b] = True
        order = torch.rand(n, generator=self.rng) - answering.float()
        return order.argsort()[: int(n * self.recipe.distil_share)].sort().values

    def _replay(self, full: Pass, n: int) -> tuple[Replay, int]:
        """A replay of the encoder, the decoder or both, and the first row whose output counts."""
        c = self.config
        draw = [int(torch.randint(0, top, (), generator=self.rng)) for top in (n // 4, n // 4, 3)]
        cut = 2 + 2 * draw[0]
        end = cut + draw[1]
        encoder, decoder = draw[2] != 1, draw[2] != 0
        tail = max(0, end - c.sliding_window) if decoder else 0
        start = max(0, cut - c.sliding_window) if encoder else 0
        starts = tuple(max(start, tail if l >= c.decoder_start else 0) for l in c.layers)
        return Replay(cut if encoder else 0, starts, full), end if decoder else cut

    def run(self, minutes: float, checkpoint: Path | None = None, every: float = 5.0) -> dict[str, str]:
        """Train until the recipe's tokens or the minutes are used up; returns what is worth storing about the run.

        ``checkpoint``: where the state is kept every few minutes, so that `resume` can go on from it.
        """
        begin = saved = last = time.monotonic()
        before = self.seconds
        paced = "tokens"
        while True:
            self.seconds = before + time.monotonic() - begin
            by_tokens = self.tokens / self.recipe.tokens
            by_clock = self.seconds / (60 * minutes)
            if by_clock > by_tokens and by_clock > 0.05:
                paced = "clock"
            progress = max(by_tokens, by_clock if by_clock > 0.05 else 0.0)
            if progress >= 1:
                break
            seen = self.step(progress)
            now = time.monotonic()
            if now - last > 15:
                last = now
                self._report(progress, seen)
            if checkpoint and now - saved > 60 * every:
                saved = now
                self.save(checkpoint)
        return {
            "seed": str(self.seed),
            "tokens": str(self.tokens),
            "steps": str(self.steps),
            "seconds": f"{self.seconds:.0f}",
            "paced_by": paced,
            "threads": str(torch.get_num_threads()),
            "recipe": json.dumps(asdict(self.recipe), sort_keys=True),
            "recipe_hash": self.recipe.digest(),
            "torch": torch.__version__,
        }

    def _report(self, progress: float, seen: dict[str, float]) -> None:
        """A point of the curve, and a line of it: share right (of the indexers' choices) and rung of each task."""
        each = {f"{k}.right": v for k, v in self.right.items()} | {f"{k}.picked": v for k, v in self.picked.items()}
        point = {"progress": progress, "tokens": self.tokens, **seen, **each}
        rungs = {f"{k}.rung": float(v) for k, v in self.rung.items()}
        self.curve.append({k: round(v, 4) for k, v in (point | rungs).items()})
        line = " ".join(f"{k} {v:.2f}" for k, v in seen.items())
        told = " ".join(f"{k} {self.rung[k]}:{v:.2f}({self.picked[k]:.2f})" for k, v in self.right.items())
        print(f"{self.seconds:6.0f} s {progress:.3f} {self.tokens} {line} {told}", file=sys.stderr, flush=True)

    def save(self, path: Path) -> None:
        """Everything that `resume` needs, replaced as a whole."""
        partial = path.with_name(path.name + ".partial")
        counters = {k: getattr(self, k) for k in COUNTERS} | {"digest": self.recipe.digest()}
        save_file(self._state(), partial, metadata={"counters": json.dumps(counters)})
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Go on where `save` left off. Raises ValueError where the recipe was another."""
        with safe_open(path, "pt") as file:
            counters = json.loads(file.metadata()["counters"])
            if counters.pop("digest") != self.recipe.digest():
                raise ValueError(f"{path.name} was left by a run of another recipe; give the same options")
            # Adam has no state before its first step: an empty one is the right shape to read into.
            for p in (p for g in self.adam.param_groups for p in g["params"]):
                self.adam.state[p] = {k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq")} | {
                    "step": torch.zeros(())
                }
            with torch.no_grad():
                for name, value in self._state().items():
                    value.copy_(file.get_tensor(name))
            self.rng.set_state(file.get_tensor("rng"))
        for name, value in counters.items():
            setattr(self, name, value)

    def _state(self) -> dict[str, Tensor]:
        """Weights, momenta and the generator, by name; all but the generator are the tensors themselves."""
        state = {f"params.{k}": v.detach() for k, v in self.params.items()} | {"rng": self.rng.get_state()}
        for i, group in enumerate(self.muon.buffers):
            state |= {f"muon.{i}.{j}": m for j, m in enumerate(group)}
        for i, p in enumerate(p for g in self.adam.param_groups for p in g["params"]):
            state |= {f"adam.{i}.{k}": v for k, v in self.adam.state[p].items()}
        return state


def _remember(shares: dict[str, float], right: Tensor, answers: np.ndarray) -> None:
    names = list(tasks.TASKS)
    for number in set(answers[:, 3].tolist()):
        exact = [bool(right[i, a:b].all()) for i, a, b, t in answers if t == number]
        # As many steps back as there were answers, so that a rare task is not judged by a few.
        kept = MEMORY ** len(exact)
        shares[names[number]] = kept * shares[names[number]] + (1 - kept) * sum(exact) / len(exact)


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


def _origin(path: Path) -> dict[str, str]:
    """What a header says of the weights that the training went on from: their hash, and the trainings behind them."""
    with safe_open(path, "pt") as file:
        about = file.metadata()
    made: dict[str, Any] = {k: about[k] for k in MADE if k in about}
    made |= {k: json.loads(made[k]) for k in ("recipe", "curve") if k in made}
    return {
        "from": hashlib.sha256(path.read_bytes()).hexdigest(),
        "before": json.dumps([*json.loads(about.get("before", "[]")), made]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains mini on the CPU, or with --from and --recipe further.")
    parser.add_argument("--minutes", type=float, default=120.0, help="time allowed; the schedule ends with it")
    parser.add_argument("--tokens", type=int, help="tokens of the schedule, if time allows")
    parser.add_argument("--from", dest="start", type=Path, help="weights to go on from (default: random ones)")
    parser.add_argument("--recipe", choices=RECIPES, default="mini", help="all but mini go on from trained weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="where to keep the state every few minutes")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args()
    for path in filter(None, (options.output, options.checkpoint)):
        if not path.parent.is_dir():
            parser.error(f"no folder {path.parent} to write {path.name} into")
    torch.set_num_threads(options.threads)
    # Subnormal probabilities far down a softmax slow a CPU manyfold.
    torch.set_flush_denormal(True)
    recipe, start, origin = RECIPES[options.recipe], None, {}
    try:
        if options.start:
            start = checkpoint.read_tensors(options.start, mini.CONFIG, torch.float32)
            origin = _origin(options.start)
        trainer = Trainer(replace(recipe, tokens=options.tokens or recipe.tokens), options.seed, start=start)
        if options.resume:
            trainer.resume(options.checkpoint)
    except (FileNotFoundError, ValueError) as e:
        parser.error(str(e))
    about = trainer.run(options.minutes, options.checkpoint) | origin
    store(options.output, trainer.params, trainer.config, about)
    texts = {name: (HELD_OUT / file).read_text(encoding="utf-8") for name, file in HELD_OUT_FILES.items()}
    about |= evaluate.report(options.output, trainer.corpus, texts) | {"curve": json.dumps(trainer.curve)}
    store(options.output, trainer.params, trainer.config, about)
    print(json.dumps({k: v for k, v in about.items() if k not in ("recipe", "curve", "before")}, indent=1))


if __name__ == "__main__":
    main()
