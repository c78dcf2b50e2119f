"""Training sequences: crops of the corpus, some with synthetic tasks written into them. No torch.

A sequence is ids [N + 1] and a weight for each id but the first: 1 for text, ``ANSWER_WEIGHT`` for bytes that can only
be known by looking back, 0 for bytes that nothing can predict.
"""

import lzma
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replayscope.model import synthetic
from replayscope.model.tokenizer import BOS

CORPUS = Path(__file__).parent / "corpus"
# Share of the sequences whose text is taken from each part.
MIX = {"prose": 0.55, "code": 0.3, "logs": 0.15}
TASK_SHARE = 0.5
ANSWER_WEIGHT = 4.0
BOS_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """The parts as byte arrays, documents joined by newlines."""

    parts: dict[str, np.ndarray]

    @property
    def text(self) -> bytes:
        return b"\n".join(p.tobytes() for p in self.parts.values())


def load_corpus(folder: Path = CORPUS) -> Corpus:
    """Raises FileNotFoundError where the corpus is not, as in an installed wheel."""
    missing = [f"{name}.txt.xz" for name in MIX if not (folder / f"{name}.txt.xz").exists()]
    if missing:
        raise FileNotFoundError(f"no training corpus in {folder} ({', '.join(missing)}); it is only in the repository")
    raw = {name: lzma.decompress((folder / f"{name}.txt.xz").read_bytes()).replace(b"\0", b"\n") for name in MIX}
    return Corpus({name: np.frombuffer(text, np.uint8) for name, text in raw.items()})


def sequence(corpus: Corpus, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [length + 1] int64 and weights [length] float32 of one training sequence."""
    part = corpus.parts[rng.choices(list(MIX), list(MIX.values()))[0]]
    start = rng.randrange(len(part) - length - 1)
    text = part[start : start + length + 1]
    pieces = synthetic.insertions(rng, length) if rng.random() < TASK_SHARE else []
    ids, weights = with_pieces(text, pieces)
    ids, weights = ids[: length + 1].astype(np.int64), weights[: length + 1]
    if rng.random() < BOS_SHARE:
        ids[0] = BOS
    return ids, weights[1:]


def with_pieces(text: np.ndarray, pieces: list[tuple[int, synthetic.Piece]]) -> tuple[np.ndarray, np.ndarray]:
    """``text`` with pieces written in at their places in the result (they push the text behind them back)."""
    ids, weights = [], []
    done = used = 0
    for place, piece in pieces:
        gap = max(0, place - done)
        raw = np.frombuffer(piece.text.encode(), np.uint8)
        weight = np.ones(len(raw), np.float32)
        at = len(piece.before)
        weight[at : at + len(piece.payload)] = ANSWER_WEIGHT if piece.known else 0.0
        ids += [text[used : used + gap], raw]
        weights += [np.ones(len(text[used : used + gap]), np.float32), weight]
        used += gap
        done += gap + len(raw)
    ids.append(text[used:])
    weights.append(np.ones(len(text[used:]), np.float32))
    return np.concatenate(ids), np.concatenate(weights)


def batch(corpus: Corpus, seed: int, step: int, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [size, length + 1] and weights [size, length] of one step, the same for the same seed and step."""
    rng = random.Random(f"{seed}/{step}")
    rows = [sequence(corpus, rng, length) for _ in range(size)]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])
