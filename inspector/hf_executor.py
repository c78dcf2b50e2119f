"""The executor of Hugging Face models: the requests of a plan as passes in step, their layers as frames."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from replayscope.inspector.frame import Frame
from replayscope.inspector.hf_cache import KeyValues, ReplayCache, Rows
from replayscope.inspector.hf_frozen import Choices
from replayscope.inspector.hf_oracle import HFOracles
from replayscope.inspector.layout import PrefixCheck
from replayscope.inspector.packing import Span
from replayscope.inspector.plan import Plan
from replayscope.model.hf import HFModel
from replayscope.model.hf_hooks import hooked
from replayscope.model.hf_passes import Pass, States

Tap = Callable[[Frame], None]


class HFExecutor:
    """Runs plans on one model; the same calls as ``executor.Executor``.

    block: rows of one request per pass. budget: rows of a batch of requests that run together; by default few on a CPU,
    where keys of different lengths are padded at a cost, and many on a GPU, which they fill. keep_state: the keys and
    values of every layer are kept, so that ``advance`` can be called again (decoding). frozen: the experts of every
    request are those of the plan's first one.
    """

    def __init__(
        self,
        model: HFModel,
        *,
        block: int = 512,
        budget: int | None = None,
        keep_state: bool = False,
        frozen: bool = False,
    ) -> None:
        self.model, self.block, self.decodes, self.frozen = model, block, keep_state, frozen
        self.budget = budget or (512 if model.device.type == "cpu" else 4096)
        self.taps: list[Tap] = []

    @property
    def prefix_check(self) -> PrefixCheck:
        """What the byte comparison of cached entries found so far, since ``start``."""
        return PrefixCheck(self.kv.compared, self.kv.changed)

    def oracles(self, ids: Tensor, dense: bool) -> HFOracles:
        """Oracle passes over ids [N]; there is no top-k of entries that could be dense."""
        return HFOracles(self.model, ids)

    def start(self, plan: Plan, tokens: dict[str, Tensor]) -> None:
        """Take up a plan; nothing has run. tokens: name → ids [N]."""
        for r in plan.requests:
            r.check(self.model.config)
            if len(tokens[r.tokens]) < r.stop:
                raise ValueError(f"{r.name} runs to row {r.stop}, but {r.tokens} has {len(tokens[r.tokens])} tokens")
        self.plan = plan
        # One copy per request: decoding writes each request's own continuation into it.
        self.ids = [tokens[r.tokens][: r.stop].clone() for r in plan.requests]
        self.done = [r.start for r in plan.requests]
        self.kv = KeyValues(plan, self.model.config, keep=self.decodes)

    def run(self, plan: Plan, tokens: dict[str, Tensor], want: frozenset[str] = frozenset()) -> Iterator[Frame]:
        """Start the plan and advance every request to its end.

        want: points to capture besides ``hidden`` and ``logits``.
        """
        self.start(plan, tokens)
        return self.advance([r.stop for r in plan.requests], want | {"hidden", "logits"})

    def advance(
        self, stops: list[int], want: frozenset[str] = frozenset(), *, tail: int | None = None
    ) -> Iterator[Frame]:
        """Run request i's rows from where it stands up to stops[i]; a frame of what came before layer 0, of every
        layer, and of what comes behind the last.

        want: points to capture. tail: of each request only the logits of its last so many rows are computed.
        """
        running = [Rows(i, at, stop) for i, (at, stop) in enumerate(zip(self.done, stops, strict=True)) if at < stop]
        if not running:
            raise ValueError("nothing to run: every request already stands at its stop")
        self.kv.run(rows.request for rows in running)
        choices = Choices(self.plan, self.frozen)
        want |= {"router"} if any(choices.takes) else frozenset()
        passes = [
            _ArmPass(self.model, self.kv, batch, self.ids, want, _last(batch, stops, tail))
            for batch in self._batches(running, choices.takes)
        ]
        try:
            with hooked(self.model.parts):
                for layer in (None, *self.model.config.layers, None):
                    self.kv.begin(layer)
                    choices.begin()
                    states = []
                    for one in passes:
                        one.forced = choices.of(one.batch)
                        states.append((one.batch, one.step()))
                        choices.keep(*states[-1])
                    if layer is not None:
                        self.kv.check(layer)
                    yield self._hand_out(self._frame(self.plan, layer, states))
        finally:
            for one in passes:
                one.close()
        self.done = list(stops)

    def go_on(self, plan: Plan, done: list[int]) -> None:
        """Swap the rules of the requests, which keep their places and their state; each stands at done[i] now."""
        for r in plan.requests:
            r.check(self.model.config)
        self.plan = self.kv.plan = plan
        self.done = list(done)

    def _batches(self, running: list[Rows], frozen: Sequence[bool]) -> list[tuple[Rows, ...]]:
        """Passes in the order in which they run: those that others read from first, blocks of a request in their order,
        requests of as many rows together. frozen: requests whose experts are the first one's."""
        requests = self.plan.requests
        owners = {name for r in requests for name in (r.prefix, r.window_owner)}
        out: list[list[Rows]] = []
        open_: dict[tuple[bool, bool, int], list[Rows]] = {}
        for rows in sorted(running, key=lambda rows: requests[rows.request].name not in owners):
            r, count = requests[rows.request], rows.count
            block = min(r.chunk or self.block, self.block)
            if r.arm == "rechunk" and block == self.block:
                # As long as full's blocks it would measure no noise.
                block = block * 2 // 3 + 1
            if count > block or r.chunk is not None:
                firsts = range(rows.first, rows.stop, block)
                out += [[Rows(rows.request, first, min(first + block, rows.stop))] for first in firsts]
                continue
            key = r.name in owners, frozen[rows.request], count
            batch = open_.get(key)
            if batch is None or (len(batch) + 1) * count > self.budget:
                open_[key] = batch = []
                out.append(batch)
            batch.append(rows)
        return [tuple(batch) for batch in out]

    def _frame(self, plan: Plan, layer: int | None, states: list[tuple[tuple[Rows, ...], States]]) -> Frame:
        frame = Frame(layer)
        for point in dict.fromkeys(name for _, found in states for name in found):
            pieces: list[tuple[Rows, Tensor]] = []
            for batch, found in states:
                values = found[point].reshape(len(batch), -1, *found[point].shape[_inner(point) :])
                # Of the logits there may be the last rows only.
                rows = [Rows(b.request, b.stop - values.shape[1], b.stop) for b in batch]
                pieces += zip(rows, values, strict=True)
            if point == "global_kv" and layer is not None:
                pieces = [_from(rows, x, plan.requests[rows.request].first_entry[layer]) for rows, x in pieces]
            pieces.sort(key=lambda piece: (piece[0].request, piece[0].first))
            values = [x.to(self.model.home) for _, x in pieces]
            frame.tensors[point] = values[0] if len(values) == 1 else torch.cat(values)
            frame.spans[point] = _spans(plan, [rows for rows, _ in pieces])
        return frame

    def _hand_out(self, frame: Frame) -> Frame:
        for tap in list(self.taps):
            tap(frame)
        return frame


class _ArmPass(Pass):
    """The same rows of some requests through the model, on a cache of ours and under our masks."""

    def __init__(
        self,
        model: HFModel,
        kv: KeyValues,
        batch: tuple[Rows, ...],
        ids: list[Tensor],
        want: frozenset[str],
        last: int | None,
    ) -> None:
        super().__init__(self._forward, model.dtype, want)
        self.model, self.batch, self.last = model, batch, last
        self.cache = ReplayCache(kv, batch)
        self.ids = torch.stack([ids[b.request][b.first : b.stop] for b in batch]).to(model.device)
        self.positions = torch.tensor([list(range(b.first, b.stop)) for b in batch], device=model.device)
        self._masks: dict[tuple, Tensor] = {}

    def _forward(self) -> Tensor:
        # A mask of four dimensions is taken as it is, so none is made of ours; every layer is then given its own.
        mask = self.mask(0, self.model.device)
        return self.model.logits(self.ids, self.positions, mask, self.cache, self.last)

    def mask(self, layer: int, device: torch.device) -> Tensor:
        plan, role = self.cache.kv.plan, self.model.config.role(layer)
        floors = tuple(plan.requests[b.request].floor[layer] for b in self.batch) if role == "window" else ()
        key = role, floors, device
        if key not in self._masks:
            self._masks[key] = self.cache.mask(layer, self.dtype, device)
        return self._masks[key]


def _last(batch: tuple[Rows, ...], stops: list[int], tail: int | None) -> int | None:
    """How many of a pass's rows are among the last ``tail`` of their requests; all are as far from their stops."""
    rows = batch[0]
    return None if tail is None else min(max(tail - (stops[rows.request] - rows.stop), 0), rows.count)


def _inner(point: str) -> int:
    """Where the dimensions of a row begin: experts are captured with batch and rows in one."""
    return 1 if point in ("router", "router_margin") else 2


def _from(rows: Rows, x: Tensor, first: int) -> tuple[Rows, Tensor]:
    """The part of some rows [rows, …] from position ``first`` on, possibly empty."""
    skip = min(max(first - rows.first, 0), rows.count)
    return Rows(rows.request, rows.first + skip, rows.stop), x[skip:]


def _spans(plan: Plan, pieces: list[Rows]) -> list[Span]:
    """One span per request over its pieces, which lie in order; empty ones for requests without any."""
    spans, at = [], 0
    for i, r in enumerate(plan.requests):
        own = [p for p in pieces if p.request == i and p.count]
        count = sum(p.count for p in own)
        spans.append(Span(i, at, count, own[0].first if own else r.stop))
        at += count
    return spans
