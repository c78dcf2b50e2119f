"""The executor of Hugging Face models: the requests of a plan as passes in step, their layers as frames."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from replayscope.inspector.frame import Frame
from replayscope.inspector.hf_cache import KeyValues, ReplayCache, Rows
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
    where keys of different lengths are padded at a cost, and many on a GPU, which they fill.
    """

    def __init__(self, model: HFModel, *, block: int = 512, budget: int | None = None) -> None:
        self.model, self.block = model, block
        self.budget = budget or (512 if model.device.type == "cpu" else 4096)
        self.taps: list[Tap] = []

    @property
    def prefix_check(self) -> PrefixCheck:
        """What the byte comparison of cached entries found in the last run."""
        return PrefixCheck(self.kv.compared, self.kv.changed)

    def oracles(self, ids: Tensor, dense: bool) -> HFOracles:
        """Oracle passes over ids [N]; there is no top-k of entries that could be dense."""
        return HFOracles(self.model, ids)

    def run(self, plan: Plan, tokens: dict[str, Tensor], want: frozenset[str] = frozenset()) -> Iterator[Frame]:
        """Yield a frame of what came before layer 0, of every layer, and of what comes behind the last.

        tokens: name → ids [N]. want: points to capture besides ``hidden`` and ``logits``.
        """
        c = self.model.config
        for r in plan.requests:
            r.check(c)
            if len(tokens[r.tokens]) < r.stop:
                raise ValueError(f"{r.name} runs to row {r.stop}, but {r.tokens} has {len(tokens[r.tokens])} tokens")
        self.kv = KeyValues(plan, c)
        points = want | {"hidden", "logits"}
        passes = [_ArmPass(self.model, self.kv, batch, tokens, points) for batch in self._batches(plan)]
        try:
            with hooked(self.model.parts):
                for layer in (None, *c.layers, None):
                    self.kv.begin()
                    states = [(one.batch, one.step()) for one in passes]
                    if layer is not None:
                        self.kv.check(layer)
                    yield self._hand_out(self._frame(plan, layer, states))
        finally:
            for one in passes:
                one.close()

    def _batches(self, plan: Plan) -> list[tuple[Rows, ...]]:
        """Passes in the order in which they run: blocks of a request in theirs, owners alone, equals together."""
        owners = {name for r in plan.requests for name in (r.prefix, r.window_owner)}
        out: list[list[Rows]] = []
        open_: dict[int, list[Rows]] = {}
        for i, r in enumerate(plan.requests):
            count = r.stop - r.start
            block = min(r.chunk or self.block, self.block)
            if r.arm == "rechunk" and block == self.block:
                # As long as full's blocks it would measure no noise.
                block = block * 2 // 3 + 1
            if count > block or r.name in owners or r.chunk is not None:
                firsts = range(r.start, r.stop, block)
                out += [[Rows(i, first, min(first + block, r.stop))] for first in firsts]
                continue
            batch = open_.get(count)
            if batch is None or (len(batch) + 1) * count > self.budget:
                open_[count] = batch = []
                out.append(batch)
            batch.append(Rows(i, r.start, r.stop))
        return [tuple(batch) for batch in out]

    def _frame(self, plan: Plan, layer: int | None, states: list[tuple[tuple[Rows, ...], States]]) -> Frame:
        frame = Frame(layer)
        for point in dict.fromkeys(name for _, found in states for name in found):
            pieces: list[tuple[Rows, Tensor]] = []
            for batch, found in states:
                values = found[point].reshape(len(batch), batch[0].count, *found[point].shape[_inner(point) :])
                pieces += zip(batch, values, strict=True)
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
        tokens: dict[str, Tensor],
        want: frozenset[str],
    ) -> None:
        super().__init__(self._forward, model.dtype, want)
        self.model, self.batch = model, batch
        self.cache = ReplayCache(kv, batch)
        requests = kv.plan.requests
        self.ids = torch.stack([tokens[requests[b.request].tokens][b.first : b.stop] for b in batch]).to(model.device)
        self.positions = torch.tensor([list(range(b.first, b.stop)) for b in batch], device=model.device)
        self._masks: dict[tuple, Tensor] = {}

    def _forward(self) -> Tensor:
        # A mask of four dimensions is taken as it is, so none is made of ours; every layer is then given its own.
        mask = self.mask(0, self.model.device)
        return self.model.logits(self.ids, self.positions, mask, self.cache)

    def mask(self, layer: int, device: torch.device) -> Tensor:
        plan, role = self.cache.kv.plan, self.model.config.role(layer)
        floors = tuple(plan.requests[b.request].floor[layer] for b in self.batch) if role == "window" else ()
        key = role, floors, device
        if key not in self._masks:
            self._masks[key] = self.cache.mask(layer, self.dtype, device)
        return self._masks[key]


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
