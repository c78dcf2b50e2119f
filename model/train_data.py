"""Training sequences: crops of the corpus with tasks written into them. No torch."""

import lzma
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replayscope.model import tasks
from replayscope.model.tokenizer import BOS

CORPUS = Path(__file__).parent / "corpus"
# Share of the sequences whose text is taken from each part.
MIX = {"prose": 0.4, "code": 0.45, "logs": 0.15}
BOS_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """The parts as byte arrays, documents joined by newlines."""

    parts: dict[str, np.ndarray]

    @property
    def text(self) -> bytes:
        return b"\n".join(p.tobytes() for p in self.parts.values())


@dataclass(frozen=True)
class Batch:
    """ids [B, N + 1]; text [B, N]: which targets are plain text; answers [K, 4]: row, first and last + 1 target, task.

    The targets are the ids but the first. What nothing can predict is neither text nor answer.
    """

    ids: np.ndarray
    text: np.ndarray
    answers: np.ndarray


def load_corpus(folder: Path = CORPUS) -> Corpus:
    """Raises FileNotFoundError where the corpus is not, as in an installed wheel."""
    missing = [f"{name}.txt.xz" for name in MIX if not (folder / f"{name}.txt.xz").exists()]
    if missing:
        raise FileNotFoundError(f"no training corpus in {folder} ({', '.join(missing)}); it is only in the repository")
    raw = {name: lzma.decompress((folder / f"{name}.txt.xz").read_bytes()).replace(b"\0", b"\n") for name in MIX}
    return Corpus({name: np.frombuffer(text, np.uint8) for name, text in raw.items()})


@dataclass(frozen=True)
class Lesson:
    """What sequences hold: tasks, each up to its level, over so much of the text as ``share`` says.

    ``share``: least and most of it; drawn for each sequence, log-uniform. One task alone comes as often as it fits in,
    each time making the one before void. ``plain``: share of the sequences without any task. ``far``, ``reach``:
    see `tasks.pieces`.
    """

    length: int
    levels: dict[str, int]
    share: tuple[float, float]
    plain: float = 0.0
    far: float = 0.0
    reach: int | None = None


def batch(corpus: Corpus, seed: int, step: int, tokens: int, lesson: Lesson) -> Batch:
    """As many sequences as ``tokens`` targets allow; the same for the same arguments."""
    rng = random.Random(f"{seed}/{step}")
    made = [_sequence(corpus, rng, lesson) for _ in range(tokens // lesson.length)]
    answers = [(i, *a) for i, (_, _, found) in enumerate(made) for a in found]
    return Batch(
        np.stack([ids for ids, _, _ in made]),
        np.stack([text for _, text, _ in made]),
        np.array(answers, np.int64).reshape(-1, 4),
    )


def _sequence(
    corpus: Corpus, rng: random.Random, lesson: Lesson
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
    """ids [length + 1], text [length], and answers as (first target, last + 1, number of the task)."""
    length = lesson.length
    part = corpus.parts[rng.choices(list(MIX), list(MIX.values()))[0]]
    start = rng.randrange(len(part) - length - 1)
    again = _tasks(rng, lesson) if rng.random() >= lesson.plain else {}
    pieces = tasks.pieces(rng, length, lesson.levels, again, lesson.far, lesson.reach)
    ids, text, answers = _written(part[start : start + length + 1], pieces)
    ids, text = ids[: length + 1].astype(np.int64), text[: length + 1]
    if rng.random() < BOS_SHARE:
        ids[0], text[0] = BOS, False
    return ids, text[1:], [(a - 1, b - 1, t) for a, b, t in answers if a >= 1 and b <= length + 1]


def _tasks(rng: random.Random, lesson: Lesson) -> dict[str, int]:
    """Some of the lesson's tasks, in an order of their own, and how often each comes."""
    names = rng.sample(list(lesson.levels), rng.randint(1, len(lesson.levels)))
    low, high = lesson.share
    room = lesson.length * low * (high / low) ** rng.random()
    again = {}
    for name in names:
        task = tasks.TASKS[name]
        size = tasks.size(task.build(rng, lesson.levels[name]))
        most = task.most or lesson.length
        if lesson.reach:
            # So far apart that a question can be asked as far behind as it may.
            most = min(most, lesson.length // (lesson.reach + size))
        count = min(round(room / len(names) / size), most)
        # Where there is no room for all, the first ones come once.
        if count or sum(again.values()) == 0 or len(again) * size < room:
            again[name] = max(1, count)
    return again


def _written(
    text: np.ndarray, pieces: list[tuple[int, tasks.Piece]]
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
    """``text`` with pieces written in at their places in it; they push the text behind them back."""
    numbers = {name: i for i, name in enumerate(tasks.TASKS)}
    ids, plain, answers = [], [], []
    done = used = 0
    for place, piece in pieces:
        gap = text[used : max(used, place)]
        raw = np.frombuffer(piece.text.encode(), np.uint8)
        mask = np.ones(len(raw), bool)
        mask[piece.start : piece.stop] = False
        ids += [gap, raw]
        plain += [np.ones(len(gap), bool), mask]
        used += len(gap)
        done += len(gap)
        if piece.task is not None:
            answers.append((done + piece.start, done + piece.stop, numbers[piece.task]))
        done += len(raw)
    ids.append(text[used:])
    plain.append(np.ones(len(text[used:]), bool))
    return np.concatenate(ids), np.concatenate(plain), answers
