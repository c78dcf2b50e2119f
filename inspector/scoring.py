"""Whether an arm still answers: a task's prompt with its answer forced, through full prefill and the arms at its cut.

An answer is right if every token of it is the likeliest given those before it, which is when greedy decoding would
produce it. So one pass over prompt and answer scores it, and the divergence of the answer's logits is at hand too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from replayscope.inspector.executor import Executor
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import Shape, request
from replayscope.model.tasks import Sample
from replayscope.model.weights import Model


@dataclass(frozen=True)
class Way:
    """One way of running a prompt: an arm, its replay length (None: the arm's own) and semantics."""

    arm: str
    replay: int | None = None
    semantics: str = "paper"


@dataclass(frozen=True)
class Answer:
    """What came of one sample under one way.

    exact: every token of the answer is the likeliest. kl: KL(full‖arm) in nats, mean over the answer's tokens; kl_max:
    the largest. log_p: log-probability of the whole answer in nats.
    """

    exact: bool
    kl: float
    kl_max: float
    log_p: float


def answers(
    model: Model, ids: Tensor, answer: int, cut: int, ways: Iterable[Way], executor: Executor | None = None
) -> dict[Way, Answer]:
    """``ids`` [N]: prompt and answer, whose last ``answer`` tokens are the answer, forced. ``full`` is always there.

    Raises UsageError for a cut that the semantics of a way refuse.
    """
    shape = Shape(model.config, len(ids), answer)
    ways = [Way("full"), *(w for w in ways if w.arm != "full")]
    plan = Plan(tuple(request(shape, w.arm, cut, w.replay, None, w.semantics) for w in ways))
    logits: list[Tensor] = []
    for frame in (executor or Executor(model)).run(plan, {"prompt": ids}, frozenset({"logits"})):
        if "logits" in frame.tensors:
            # The row of a token predicts the next one: the answer's first token is predicted by the prompt's last.
            for span in frame.spans["logits"]:
                stop = span.at + span.count - 1
                logits.append(frame.tensors["logits"][stop - answer : stop].double().log_softmax(-1))
    wanted = ids[-answer:].to(logits[0].device)
    found = {}
    for way, log_p in zip(ways, logits, strict=True):
        kl = (logits[0].exp() * (logits[0] - log_p)).sum(-1).clamp(min=0)
        found[way] = Answer(
            exact=bool((log_p.argmax(-1) == wanted).all()),
            kl=float(kl.mean()),
            kl_max=float(kl.max()),
            log_p=float(log_p.gather(-1, wanted[:, None]).sum()),
        )
    return found


def scored(
    model: Model,
    samples: Iterable[Sample],
    encode: Callable[[str], list[int]],
    ways: tuple[Way, ...],
    executor: Executor | None = None,
) -> Iterator[tuple[Sample, int, dict[Way, Answer]]]:
    """Each sample with its length in tokens and what came of it; the pool is reused from one to the next."""
    executor = executor or Executor(model)
    for sample in samples:
        before, behind = encode(sample.prompt[: sample.cut]), encode(sample.prompt[sample.cut :])
        answer = encode(sample.answer)
        ids = torch.tensor(before + behind + answer)
        yield sample, len(ids), answers(model, ids, len(answer), len(before), ways, executor)
