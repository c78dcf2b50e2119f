"""Every number of the training of `mini`, and of what makes `mini-replay` of it. No torch."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from replayscope.model.tasks import REACH


@dataclass(frozen=True)
class Rung:
    """How long the sequences are, how hard the task gets, and how far behind it is asked for, where that is limited.

    path: what of the global path is there, its own entries ("own"), none ("none"), or those of another text
    ("foreign"), which mislead: what is asked for has then to be carried by the windows.
    """

    length: int
    level: int
    reach: int | None = None
    path: Literal["own", "none", "foreign"] = "own"


# What a task climbs, each when the one before is solved.
RUNGS = (Rung(128, 1), Rung(256, 1), Rung(256, 2), Rung(512, 2), Rung(1024, 2))
# What a relay climbs instead. It learns to carry first, a little further each time, and then to trust what it carries.
CARRIED = (
    *(Rung(256, 1, reach, "none") for reach in range(40, REACH + 1, 24)),
    *(Rung(length, level, REACH, "foreign") for length, level in ((256, 1), (512, 2), (1024, 2))),
)


@dataclass(frozen=True)
class Recipe:
    """Every number that the result depends on.

    A step trains one task, drawn in proportion to what is still wrong of it (and to ``often``), or, ``mixed`` of them,
    text with all tasks strewn in. ``replay_share``: share of the steps that rebuild windows as bounded replay does, at
    a random cut. ``carried``: whether `relay` climbs ``CARRIED``. ``top``: whether all begin at the top of their
    ladders. ``far``: see `tasks.pieces`. Pairs are values at the start and the end.
    """

    tokens: int = 24_000_000
    batch_tokens: int = 2048
    top: bool = False
    solved: float = 0.8
    often: tuple[tuple[str, float], ...] = (("chain", 2.0), ("relay", 3.0))
    mixed: tuple[float, float] = (0.15, 0.5)
    density: tuple[float, float] = (0.05, 0.9)
    mixed_density: tuple[float, float] = (0.05, 0.5)
    plain: float = 0.15
    carried: bool = True
    far: float = 0.5
    sparse: tuple[float, float] = (0.0, 0.8)
    sparse_between: tuple[float, float] = (0.35, 0.7)
    distil_from: float = 0.1
    distil_share: float = 0.25
    text_in_task: float = 0.1
    answer_weight: float = 0.25
    matrix_lr: float = 0.014
    other_lr: float = 2.8e-3
    warmup: float = 0.01
    decay_from: float = 0.5
    betas: tuple[float, float] = (0.9, 0.97)
    clip: float = 1.0
    balance_rate: float = 0.01
    replay_share: float = 0.0

    def rate(self, progress: float) -> float:
        """Warm-up to 1, constant, then a line to 0."""
        if progress < self.warmup:
            return progress / self.warmup
        return min(1.0, (1 - progress) / (1 - self.decay_from))

    def mixed_share(self, progress: float) -> float:
        low, high = self.mixed
        return low + (high - low) * progress

    def sparse_share(self, progress: float) -> float:
        """Share of the steps whose attention reads what the indexers choose; the others read everything."""
        (low, high), (begin, end) = self.sparse, self.sparse_between
        return low + (high - low) * min(1.0, max(0.0, (progress - begin) / (end - begin)))

    def ladder(self, task: str) -> tuple[Rung, ...]:
        return CARRIED if task == "relay" and self.carried else RUNGS

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


# Goes on from trained weights, whose indexers choose already.
FURTHER = Recipe(
    tokens=10_000_000,
    often=(("chain", 2.0), ("relay", 6.0)),
    sparse=(0.3, 0.8),
    sparse_between=(0.05, 0.4),
    distil_from=0.0,
    matrix_lr=0.01,
    other_lr=2e-3,
    decay_from=0.3,
)
# Long texts with few questions, as they are asked later, at a third of the rate.
THIN = Recipe(
    tokens=2_000_000,
    top=True,
    often=(("chain", 4.0), ("relay", 4.0)),
    mixed=(0.3, 0.3),
    density=(0.03, 0.5),
    sparse=(0.8, 0.8),
    distil_from=0.0,
    matrix_lr=0.005,
    other_lr=1e-3,
    decay_from=0.1,
)
# The last step to `mini`: what was learned over short distances is said again over long ones, a question or two a text.
FAR = replace(THIN, often=(("chain", 20.0), ("relay", 4.0)), mixed=(0.2, 0.2), density=(0.02, 0.1), far=1.0)
# What turns `mini` into `mini-replay`: a short training more, most steps with a replay. Here the global path is there
# for `relay` too: what a replay takes from the windows may be learned to be looked up.
REPLAY = replace(THIN, tokens=1_000_000, mixed=(0.5, 0.5), carried=False, replay_share=0.75)
RECIPES = {"mini": Recipe(), "further": FURTHER, "thin": THIN, "far": FAR, "replay": REPLAY}
