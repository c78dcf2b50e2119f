"""Decoding after each arm: every step is one more row of every request, over the state that the arm left.

A `Session` is prefilled once and continued as often as asked: greedily, by sampling, with tokens forced on it, and with
further turns of a conversation. Each continuation starts over from the prompt's end and writes its own rows anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayscope.inspector.backend import Decoder, Runnable
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.frame import Frame
from replayscope.inspector.plan import Plan
from replayscope.model.streaming import StreamedModel
from replayscope.model.weights import Model


@dataclass(frozen=True)
class Generated:
    """ids [requests, steps]: the tokens produced; logits [requests, steps, V]: what each was chosen from."""

    ids: Tensor
    logits: Tensor

    def first_difference(self, request: int, reference: int = 0) -> int | None:
        """Step at which a request's tokens first differ from the reference's, or None."""
        apart = (self.ids[request] != self.ids[reference]).nonzero()
        return int(apart[0]) if len(apart) else None


class Session:
    """The requests of a plan, prefilled to their prompt_end; the plan leaves room behind it (rows up to ``stop``).

    ends: where each request's prompt ends now. last [requests, V]: the logits there.
    Raises UsageError for a streamed model, ValueError for an executor that keeps no state.
    """

    def __init__(
        self,
        model: Runnable,
        plan: Plan,
        tokens: dict[str, Tensor],
        executor: Decoder | None = None,
        watch: Callable[[Frame], None] = lambda frame: None,
        want: frozenset[str] = frozenset(),
    ) -> None:
        """watch sees every frame of the prefill, with the points of ``want`` in it."""
        if isinstance(model, StreamedModel):
            raise UsageError("generation reads every layer again for each token; give a model that fits into memory")
        self.executor: Decoder = executor or _ours(model)
        if not self.executor.decodes:
            raise ValueError("generation needs an executor that keeps its state and chooses for itself")
        self.executor.start(plan, tokens)
        self.ends = [r.prompt_end for r in plan.requests]
        self.last = self._advance(self.ends, watch, want)[:, -1]

    def decode(
        self, steps: int, temperature: float = 0.0, seed: int = 0, which: Sequence[int] | None = None
    ) -> Generated:
        """Produce tokens from the prompt's end on, [requests, steps], of all requests or of ``which`` alone.

        temperature 0 is greedy; above it, one uniform number per step is shared by all requests, so that arms with
        equal logits produce equal tokens. Raises ValueError if a request leaves no room.
        """
        self._room(steps)
        some = list(range(len(self.ends)) if which is None else which)
        draws = torch.rand(steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ids, logits = [], []
        self._rewind()
        for step in range(steps):
            at = [e + step for e in self.ends]
            last = (self._advance(self._only(some, at))[:, -1] if step else self.last)[some]
            chosen = last.argmax(-1) if temperature == 0 else _sample(last, temperature, float(draws[step]))
            for i, token in zip(some, chosen.tolist(), strict=True):
                self.executor.ids[i][at[i]] = token
            ids.append(chosen.cpu())
            logits.append(last)
        return Generated(torch.stack(ids, 1), torch.stack(logits, 1))

    def follow(self, leaders: Sequence[int], steps: int) -> tuple[Generated, Tensor]:
        """Greedy output of every request, and its logits with the output of its leader forced on it.

        leaders: for each request the one whose output it may share. A request that would have chosen each of the forced
        tokens produces just those; only the others are decoded, from where they leave their leader.
        """
        first = sorted(set(leaders))
        led = self.decode(steps, which=first)
        ids = led.ids[[first.index(leader) for leader in leaders]]
        forced = self.force(ids)
        logits, own = forced.clone(), forced.argmax(-1).cpu()
        logits[first] = led.logits
        apart = own != ids
        apart[first] = False
        ids = ids.clone()
        at = {i: int(apart[i].nonzero()[0]) for i in apart.any(1).nonzero()[:, 0].tolist()}
        for i, step in at.items():
            row = self.ends[i] + step
            ids[i, step] = own[i, step]
            self.executor.ids[i][row] = own[i, step]
            self.executor.done[i] = max(row - row % 2, self.executor.plan.requests[i].start)
        while at := {i: step for i, step in at.items() if step + 1 < steps}:
            stops = self._only(list(at), [e + at.get(i, 0) + 1 for i, e in enumerate(self.ends)])
            last = self._advance(stops)[:, -1]
            for i, step in at.items():
                logits[i, step + 1] = last[i]
                ids[i, step + 1] = last[i].argmax()
                self.executor.ids[i][self.ends[i] + step + 1] = ids[i, step + 1]
            at = {i: step + 1 for i, step in at.items()}
        return Generated(ids, logits), forced

    def force(self, ids: Tensor) -> Tensor:
        """Logits [requests, steps, V] that ids [requests, steps] would have been chosen from, in one pass."""
        steps = ids.shape[1]
        self._room(steps)
        self._rewind()
        self._write(ids)
        if steps == 1:
            return self.last[:, None]
        behind = self._advance([e + steps - 1 for e in self.ends], rows=steps - 1)
        return torch.cat((self.last[:, None], behind), 1)

    def turn(self, answers: Sequence[Sequence[int]], says: Sequence[Sequence[int]], plan: Plan, at: list[int]) -> None:
        """Close the turn with ``answers`` instead of what was decoded, and prefill the next from position ``at`` on.

        says: what each request's next prompt adds. plan: the same requests, in the same places, with the rules of the
        next turn and its prompt_end; rows from ``at`` on run under them, over the state that the turns before left.
        """
        self._rewind()
        for i, (answer, more) in enumerate(zip(answers, says, strict=True)):
            text = torch.tensor([*answer, *more])
            self.executor.ids[i][self.ends[i] : self.ends[i] + len(text)] = text
        self._advance([e + len(answer) for e, answer in zip(self.ends, answers, strict=True)])
        self.executor.go_on(plan, at)
        self.ends = [r.prompt_end for r in plan.requests]
        self.last = self._advance(self.ends)[:, -1]

    def _rewind(self) -> None:
        # From an even row: the pair that an odd end leaves open is pooled from rows of one step.
        self.executor.done = [e - e % 2 for e in self.ends]

    def _only(self, some: Sequence[int], stops: list[int]) -> list[int]:
        """``stops`` of some requests; the others stay where they are."""
        return [stop if i in some else self.executor.done[i] for i, stop in enumerate(stops)]

    def _write(self, ids: Tensor) -> None:
        for i, end in enumerate(self.ends):
            self.executor.ids[i][end : end + ids.shape[1]] = ids[i].to(self.executor.ids[i].device)

    def _room(self, steps: int) -> None:
        for r, end in zip(self.executor.plan.requests, self.ends, strict=True):
            if r.stop - end < steps:
                raise ValueError(f"{r.name} ends at {r.stop}: no room for {steps} tokens after {end}")

    def _advance(
        self,
        stops: list[int],
        watch: Callable[[Frame], None] = lambda frame: None,
        want: frozenset[str] = frozenset(),
        rows: int = 1,
    ) -> Tensor:
        """Run to ``stops`` and return the logits [requests, rows, V] of the last rows of every request that ran."""
        last: Frame | None = None
        # To the end, not just to the logits: behind its last frame the executor notes where the requests stand.
        for last in self.executor.advance(stops, want | {"logits"}, tail=rows):
            watch(last)
        assert last is not None
        # Of a request that stays where it is there is nothing to return; any rows stand in.
        ends = [max(s.at + s.count, rows) for s in last.spans["logits"]]
        picked = [torch.arange(end - rows, end) for end in ends]
        logits = last.tensors["logits"]
        return logits[torch.stack(picked).to(logits.device)]


def generate(
    model: Model,
    plan: Plan,
    tokens: dict[str, Tensor],
    steps: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    executor: Executor | None = None,
) -> Generated:
    """Prefill every request of the plan to its prompt_end, then decode ``steps`` tokens.

    The plan is made for N + steps tokens of which the last ``steps`` are forced (their ids are placeholders that the
    produced tokens replace). Raises what `Session` raises, and ValueError if a request leaves no room.
    """
    for r in plan.requests:
        if r.stop - r.prompt_end < steps:
            raise ValueError(f"{r.name} ends at {r.stop}: no room for {steps} tokens after {r.prompt_end}")
    return Session(model, plan, tokens, executor).decode(steps, temperature, seed)


def _ours(model: Runnable) -> Decoder:
    """The executor of our own models; another model's has to be given."""
    if not isinstance(model, Model):
        raise ValueError(f"a {type(model).__name__} needs its own executor")
    return Executor(model, keep_state=True)


def _sample(logits: Tensor, temperature: float, draw: float) -> Tensor:
    """Inverse of the cumulative distribution, in order of token id, at ``draw`` in [0, 1)."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return (cumulative < draw * cumulative[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
