"""What `mini` can do: bits per byte of held-out text, passkeys at a distance, and what the global path buys."""

import json
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.model import checkpoint, synthetic, tokenizer, weights
from replayscope.model.config import ModelConfig
from replayscope.model.ngram import NGram
from replayscope.model.train_data import Corpus
from replayscope.model.train_forward import forward

TOKENS = 2000
FAR = 512  # position from which on the global path has something that no window reaches
DISTANCES = (256, 512, 1024)


@torch.no_grad()
def bits(model: weights.Model, ids: list[int], selection: str = "sparse") -> Tensor:
    """-log2 p of each id but the first, [N - 1]."""
    row = torch.tensor([ids])
    logits = forward(model, row[:, :-1], selection).logits
    return F.cross_entropy(logits[0], row[0, 1:], reduction="none") / math.log(2)


@torch.no_grad()
def passkey_accuracy(model: weights.Model, filler: str, distance: int, trials: int, selection: str = "sparse") -> float:
    """Share of prompts whose four digits are all the likeliest, ``distance`` bytes after they were said."""
    rng, right = random.Random(distance), 0
    for _ in range(trials):
        said, asked = synthetic.passkey(rng)
        start = rng.randrange(len(filler) - distance - 200)
        middle = filler[start + 100 :][: distance - len(asked.before)]
        text = filler[start : start + 100] + said.text + middle + asked.before + asked.payload
        ids = torch.tensor([tokenizer.encode(text)])
        best = forward(model, ids[:, :-1], selection).logits[0, -len(asked.payload) :].argmax(-1)
        right += bool((best == ids[0, -len(asked.payload) :]).all())
    return right / trials


def report(path: Path, corpus: Corpus, texts: dict[str, str], trials: int = 50) -> dict[str, str]:
    """Figures of the stored weights (as they will be read) on held-out ``texts``, as strings for their file's header.

    Bits per byte are means over the first 2,000 bytes of a text, from the fifth on, which is where the baseline starts;
    the global gain is over those from ``FAR`` on. The filler of the passkey prompts is the text named prose.
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
    keys = {
        selection: {str(d): passkey_accuracy(model, texts["prose"], d, trials, selection) for d in DISTANCES}
        for selection in ("sparse", "dense")
    }
    return {
        "bits_per_byte": json.dumps(held_out),
        "global_gain": json.dumps(gain),
        "passkey": json.dumps(keys),
        "passkey_trials": str(trials),
    }
