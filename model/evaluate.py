"""What `mini` can do: bits per byte of held-out text, its tasks, and what the global path buys."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.model import checkpoint, tasks, tokenizer, weights
from replayscope.model.config import ModelConfig
from replayscope.model.ngram import NGram
from replayscope.model.train_data import Corpus
from replayscope.model.train_forward import forward

TOKENS = 2000
FAR = 512  # position from which on the global path has something that no window reaches
LENGTH = 1024


@torch.no_grad()
def bits(model: weights.Model, ids: list[int], selection: str = "sparse") -> Tensor:
    """-log2 p of each id but the first, [N - 1]."""
    row = torch.tensor([ids])
    logits = forward(model, row[:, :-1], selection).logits
    return F.cross_entropy(logits[0], row[0, 1:], reduction="none") / math.log(2)


@torch.no_grad()
def exact_share(model: weights.Model, task: str, filler: str, length: int, trials: int) -> float:
    """Share of prompts of ``length`` tokens after which every byte of the answer is the likeliest."""
    right = 0
    for seed in range(trials):
        place = tasks.PLACES[seed % len(tasks.PLACES)]
        sample = tasks.make(task, seed, length, place, "short", filler)
        ids = torch.tensor([tokenizer.encode(sample.prompt + sample.answer)])
        answer = ids[0, -len(sample.answer) :]
        best = forward(model, ids[:, :-1], "sparse").logits[0, -len(answer) :].argmax(-1)
        right += bool((best == answer).all())
    return right / trials


def report(path: Path, corpus: Corpus, texts: dict[str, str], trials: int = 20) -> dict[str, str]:
    """Figures of the stored weights (as they will be read) on held-out ``texts``, as strings for their file's header.

    Bits per byte are means over the first 2,000 bytes of a text, from the fifth on, which is where the baseline starts;
    the global gain is over those from ``FAR`` on. The filler of the tasks is the text named prose.
    """
    config = ModelConfig.load(path.with_suffix(".json"))
    model = weights.build(config, checkpoint.read_tensors(path, config, torch.float32))
    baseline = NGram(corpus.text)
    held_out, gain = {}, {}
    for name, text in texts.items():
        ids = tokenizer.encode(text)[:TOKENS]
        whole, local = bits(model, ids), bits(model, ids, "none")
        held_out[name] = {
            "mini": round(float(whole[4:].mean()), 4),
            "5-gram": round(baseline.bits_per_byte(bytes(ids)), 4),
        }
        gain[name] = {"with": round(float(whole[FAR:].mean()), 4), "without": round(float(local[FAR:].mean()), 4)}
    scores = {t: exact_share(model, t, texts["prose"], LENGTH, trials) for t in tasks.TASKS}
    return {
        "bits_per_byte": json.dumps(held_out),
        "global_gain": json.dumps(gain),
        "scores": json.dumps(scores),
        "trials": str(trials),
    }
