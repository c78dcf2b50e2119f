"""One executor for every plan, layer-major: project and write, attend and feed forward, hand the layer out."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from replayscope.inspector.cores import fitting
from replayscope.inspector.entries import Progress, Settings
from replayscope.inspector.frame import Frame
from replayscope.inspector.layout import Layout, PrefixCheck
from replayscope.inspector.oracle import Oracles
from replayscope.inspector.packing import pack
from replayscope.inspector.plan import Plan
from replayscope.inspector.pool import Pool
from replayscope.inspector.step import Step
from replayscope.kernels.impl import choose
from replayscope.model import ops
from replayscope.model.weights import Model

Tap = Callable[[Frame], None]


class Executor:
    """Runs plans on one model.

    block: rows per block. reproducible: fixed tiles, so that a row's bits do not depend on what else runs.
    frozen: top-k and experts of every request are taken from the plan's first request (``full``) at the same position;
    frozen_experts: the experts only. dense: attention reads every visible entry, whatever the indexer chooses.
    keep_state: window KV of every layer stays in the pool, so that ``advance`` can be called again (decoding, chunks).
    impl: form of the kernels, ``auto``, ``torch`` or ``triton``; ValueError if it cannot run on a device of the model.
    """

    def __init__(
        self,
        model: Model,
        pool: Pool | None = None,
        *,
        block: int = 512,
        reproducible: bool = False,
        frozen: bool = False,
        keep_state: bool = False,
        frozen_experts: bool = False,
        dense: bool = False,
        impl: str = "auto",
    ) -> None:
        self.model, self.pool = model, pool or Pool()
        for device in model.kernel_devices:
            choose(impl, device, model.dtype)
        self.settings = Settings(block, reproducible, frozen, keep_state, frozen_experts, dense, impl)
        self.taps: list[Tap] = []

    @property
    def decodes(self) -> bool:
        """Whether it can go on after a run: it keeps its state, and every request chooses for itself."""
        return self.settings.keep_state and not self.settings.frozen

    @property
    def prefix_check(self) -> PrefixCheck:
        """What the byte comparison of cached entries found so far, since ``start``."""
        return self.layout.check

    def oracles(self, ids: Tensor, dense: bool) -> Oracles:
        """Oracles over ids [N]; dense: attention over every visible entry."""
        return Oracles(self.model, ids, "dense" if dense else "sparse")

    def start(self, plan: Plan, tokens: dict[str, Tensor]) -> None:
        """Lay the plan's requests out in the pool. tokens: name → ids [N] (``prompt``, and ``foreign`` where used)."""
        c = self.model.config
        for r in plan.requests:
            r.check(c)
            if len(tokens[r.tokens]) < r.stop:
                raise ValueError(f"{r.name} runs to row {r.stop}, but {r.tokens} has {len(tokens[r.tokens])} tokens")
        self.plan = plan
        # One copy per request: decoding writes each request's own continuation into it.
        self.ids = [tokens[r.tokens][: r.stop].clone() for r in plan.requests]
        self.done = [r.start for r in plan.requests]
        self.layout = Layout(plan, self.model, self.pool)
        longest = max(r.stop for r in plan.requests)
        self.ropes = {flag: ops.rope_tables(c, flag, longest, self.model.embed) for flag in (False, True)}

    def run(
        self,
        plan: Plan,
        tokens: dict[str, Tensor],
        want: frozenset[str] = frozenset(),
        take_up: Callable[[Step], int] | None = None,
    ) -> Iterator[Frame]:
        """Start the plan and advance every request to its end.

        take_up: puts the step where an earlier run of the plan stood, and says which layer comes first.
        """
        self.start(plan, tokens)
        return self.advance([r.stop for r in plan.requests], want, take_up)

    @torch.no_grad()
    def advance(
        self,
        stops: list[int],
        want: frozenset[str] = frozenset(),
        take_up: Callable[[Step], int] | None = None,
        *,
        tail: int | None = None,
    ) -> Iterator[Frame]:
        """Run request i's rows from where it stands up to stops[i] through all layers, yielding a frame per layer.

        want: points to keep in the frames besides those that are there anyway (streams, mix, window_kv, attn_in,
        global_kv, index_k, topk, router, final). tail: behind the last layer only the last so many rows of a request.
        """
        m, c = self.model, self.model.config
        spans = pack([(d, s) for d, s in zip(self.done, stops, strict=True)])
        rows = sum(s.count for s in spans)
        if rows == 0:
            raise ValueError("nothing to run: every request already stands at its stop")
        step = Step(self.layout, self.settings, Progress(self.ids, self.done, self.ropes), spans, rows, want)
        self.step, first = step, 0
        if take_up is not None:
            first = take_up(step)
        else:
            embed = m.embed[step.ids]
            step.streams = embed.unsqueeze(-2).repeat(1, c.hc_mult, 1)
            step.mix = F.one_hot(torch.zeros_like(step.ids), c.hc_mult).to(ops.acc_dtype(m.dtype))
            yield self._hand_out(Frame(None, {"embed": embed}, {"embed": spans}))
        for l in c.layers[first:]:
            with fitting(rows, c.hidden_size):
                frame = step.layer(l, m.layers[l])
            yield self._hand_out(frame)
        with fitting(rows, c.hidden_size):
            frame = step.finish(tail)
        yield self._hand_out(frame)
        self.done = list(stops)

    def go_on(self, plan: Plan, done: list[int]) -> None:
        """Swap the rules of the requests, which keep their places and their state; each stands at done[i] now."""
        for r in plan.requests:
            r.check(self.model.config)
        self.plan = self.layout.plan = plan
        self.done = list(done)

    def _hand_out(self, frame: Frame) -> Frame:
        for tap in list(self.taps):
            tap(frame)
        return frame
