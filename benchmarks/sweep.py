"""A sweep of many cuts, beside what it could cost at best and what the two loops cost that it stands for."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from harness import Contest
from torch import Tensor

from replayscope.inspector.cores import one_thread
from replayscope.inspector.executor import Executor
from replayscope.inspector.fold import Fold
from replayscope.inspector.lineup import Job, Lineup, line_up
from replayscope.inspector.metrics import metric
from replayscope.inspector.plan import Plan
from replayscope.inspector.runner import run
from replayscope.inspector.semantics import Shape
from replayscope.kernels.divergence import logits_rows, row_sums
from replayscope.model import presets
from replayscope.model.weights import Model
from replayscope.traces.schema import POINTS, RunInfo, kind_of

POINT_SET = frozenset(POINTS)
# Prefills of the obvious loop that are timed; the others are the same call again.
PREFILLS = 4


@dataclass
class Sweep:
    """`cuts` evenly spaced cuts of a prompt, each with one window of replay and `suffix` tokens behind it."""

    model: Model
    tokens: int
    cuts: int
    suffix: int
    ids: Tensor = field(init=False)
    job: Job = field(init=False)
    line: Lineup = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = self.model.config.vocab_size
        self.ids = torch.randint(0, vocabulary, (self.tokens,), generator=torch.Generator().manual_seed(0))
        room = self.tokens - self.suffix
        cuts = tuple(room * (i + 1) // self.cuts for i in range(self.cuts))
        window = self.model.config.sliding_window
        self.job = Job(Shape(self.model.config, self.tokens), ("encoder",), cuts, (window,), self.suffix)
        self.line, _ = line_up(self.job)

    @property
    def rows(self) -> int:
        return sum(r.stop - r.start for r in self.line.plan.requests)

    def prefill(self) -> None:
        """All tokens once, nothing kept."""
        self._run(Executor(self.model), Plan(self.line.plan.requests[:1]))

    def sweep(self) -> tuple[Fold, list[RunInfo]]:
        """What `replayscope sweep` does between loading and writing."""
        return run(self.model, self.ids, self.job, self.line, Executor(self.model))

    def obvious(self) -> None:
        """Some of the prefills of a loop that runs all tokens again for each cut; it need not compare anything here."""
        for _ in range(PREFILLS):
            self.prefill()

    def sensible(self) -> np.ndarray:
        """One prefill that keeps its states, one replay per cut on top of it, then all states compared.

        Returns diff2 and ref2 of `hidden`, summed over each layer's rows [cuts, layers, 2].
        """
        full, *arms = self.line.plan.requests
        executor = Executor(self.model, keep_state=True)
        # Room for the longest replay is taken at once, so that the pool never moves.
        longest = max(arms, key=lambda r: r.stop - r.start)
        executor.start(Plan((full, longest)), {"prompt": self.ids})
        theirs = self._kept(executor, [full.stop, longest.start], 0)
        kept = []
        for arm in arms:
            executor.start(Plan((full, arm)), {"prompt": self.ids})
            executor.done = [full.stop, arm.start]
            kept.append(self._kept(executor, [full.stop, arm.stop], 1))
        out = np.zeros((len(arms), self.model.config.num_hidden_layers, 2))
        for i, mine in enumerate(kept):
            for (layer, point), (first, rows) in mine.items():
                at, ref = theirs[layer, point]
                sums = self._compared(point, rows, ref[first - at :][: len(rows)], first)
                if point == "hidden":
                    out[i, layer or 0] = float(sums["diff2"].sum()), float(sums["ref2"].sum())
        return out

    def _compared(self, point: str, rows: Tensor, ref: Tensor, first: int) -> dict[str, Tensor]:
        if kind_of(point) == "discrete":
            return {"changed": (rows != ref).any(-1)}
        sums = row_sums(rows[: len(ref)], ref)
        if point == "logits":
            following = torch.nn.functional.pad(self.ids[1:], (0, 1), value=-1)[first : first + len(rows)]
            sums |= logits_rows(rows, ref, following)
        return sums

    def _kept(
        self, executor: Executor, stops: list[int], request: int
    ) -> dict[tuple[int | None, str], tuple[int, Tensor]]:
        """(layer, point) → first position (or entry) and rows of one request."""
        out = {}
        for frame in executor.advance(stops, POINT_SET):
            for point in POINT_SET & frame.tensors.keys():
                span = frame.spans[point][request]
                if span.count:
                    out[frame.layer, point] = span.first, frame.tensors[point][span.rows].clone()
        return out

    def _run(self, executor: Executor, plan: Plan) -> None:
        for _ in executor.run(plan, {"prompt": self.ids}):
            pass


def on_one_thread(f: Callable[[], object]) -> None:
    """f with one torch thread, on which the small operations of one replay are as fast as on several, or faster."""
    with one_thread():
        f()


def mini_sweep(tokens: int = 2048, cuts: int = 64, suffix: int = 64) -> Callable[[torch.device], Contest]:
    """The goal's shape on the embedded model."""

    def make(device: torch.device) -> Contest:
        model, _ = presets.load_any("mini", torch.float32, [device])
        assert isinstance(model, Model)
        case = Sweep(model, tokens, cuts, suffix)

        def check() -> None:
            fold, _ = case.sweep()
            found = metric(fold.tables["full", "hidden"], "rel_l2")[1:, :, 0]
            sums = case.sensible()
            with np.errstate(invalid="ignore"):
                wanted = np.nan_to_num(np.sqrt(sums[..., 0] / sums[..., 1]))
            # In fp32 a choice near its border may fall either way and moves a row by as much as replay itself does, so
            # single cells differ; over all cuts a layer must not.
            np.testing.assert_allclose(found.mean(0), wanted.mean(0), rtol=0.05, atol=1e-6)
            assert found.mean() > 1e-3, "replay changes nothing: there is nothing to compare"

        variants = {
            "ideal": case.prefill,
            "sweep": case.sweep,
            "sensible loop": lambda: on_one_thread(case.sensible),
            "obvious loop": case.obvious,
        }
        scale = {"ideal": case.rows / tokens, "obvious loop": cuts / PREFILLS}
        return Contest(variants, check, work=case.rows, unit="rows", scale=scale)

    return make


def short_prompt(device: torch.device) -> Contest:
    """64 tokens through the embedded model, whose operations are so small that waking a thread may cost more than it
    takes off."""
    model, _ = presets.load_any("mini", torch.float32, [device])
    assert isinstance(model, Model)
    case = Sweep(model, 64, 1, 16)

    def last() -> Tensor:
        *_, end = Executor(model).run(Plan(case.line.plan.requests[:1]), {"prompt": case.ids}, frozenset({"logits"}))
        return end.tensors["logits"].clone()

    def check() -> None:
        found: list[Tensor] = []
        on_one_thread(lambda: found.append(last()))
        torch.testing.assert_close(found[0], last(), rtol=1e-3, atol=1e-4)

    variants: dict[str, Callable[[], object]] = {
        "on one torch thread": lambda: on_one_thread(case.prefill),
        "on all": case.prefill,
    }
    return Contest(variants, check, work=case.tokens, unit="tokens")
