"""Which rows of a hot layer are compared: runs against full, runs against their oracles, oracles against full."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from replayscope.inspector.fold import Fold, Group, Pairs, Piece, Side
from replayscope.inspector.frame import ENTRY_POINTS, Frame
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.metrics import ENTERING
from replayscope.inspector.packing import Span
from replayscope.model import reference
from replayscope.traces.schema import RunInfo, kind_of


@dataclass(frozen=True)
class _Matched:
    """Pairs of rows and which of them are exact, for what enters and what leaves each layer [layers, rows]."""

    pairs: Pairs
    enters: np.ndarray
    leaves: np.ndarray

    def exact(self, point: str, layer: int) -> np.ndarray:
        """[rows] bool; embed is exact everywhere, final and logits as what leaves the last layer."""
        if point == "embed":
            return np.ones(self.pairs.rows, bool)
        if point in ("final", "logits"):
            return self.leaves[-1]
        return self.enters[layer] if point in ENTERING else self.leaves[layer]


@dataclass
class Comparison:
    """Compares the layers of one plan as they come.

    runs: of the trace. exact: run → exact rows [layers, rows] of what enters and leaves. of: request → its runs, empty
    where it is not compared; request 0 is full. oracles: the runs that oracle passes stand for, in their order; fresh:
    those that have not been compared before.
    """

    config: Geometry
    fold: Fold
    runs: Sequence[RunInfo]
    exact: Mapping[int, tuple[np.ndarray, np.ndarray]]
    of: Sequence[tuple[int, ...]]
    oracles: Sequence[int]
    points: Sequence[str]
    fresh: frozenset[int]
    # Layers that run the same rows share what tells them apart.
    _matched: dict[tuple, _Matched | None] = field(default_factory=dict)

    def with_full(self, frame: Frame) -> None:
        """Every request's rows against full's."""
        layer = frame.layer or 0
        groups: dict[tuple, tuple[_Matched, np.ndarray, dict[str, tuple[Side, Side]]]] = {}
        for point in self._points(frame):
            side, spans = _side(frame, point), frame.spans[point]
            if side.margin is not None:
                full = side.margin[spans[0].rows]
                finite = full[torch.isfinite(full)].abs()
                scale = float(finite.max()) if len(finite) else 0.0
                self.fold.margin_scale[point, layer] = scale
            key, arms = (
                ("full", *self._key(point, layer, spans)),
                [(own, s) for own, s in zip(self.of, spans, strict=True)],
            )
            matched = self._match(key, point, layer, arms[1:], [spans[0]] * (len(arms) - 1))
            if matched is None:
                continue
            exact = matched.exact(point, layer)
            # States that share rows and exactness are folded in one go.
            group = key, kind_of(point), point in ENTERING
            alone = () if kind_of(point) == "state" else (point,)
            groups.setdefault((*group, *alone), (matched, exact, {}))[2][point] = side, side
        made = [Group("full", matched.pairs, exact, points) for matched, exact, points in groups.values()]
        self.fold.add(layer, made)

    def with_oracles(self, frame: Frame, passes: Sequence[reference.Frame]) -> None:
        """Every request's rows against its oracle's, and every oracle's against full's."""
        layer = frame.layer or 0
        for point in self._points(frame):
            side, spans = _side(frame, point), frame.spans[point]
            have = [(run, one) for run, one in zip(self.oracles, passes, strict=True) if point in one.tensors]
            if not have:
                continue
            dense, theirs = _joined([one for _, one in have], point)
            by_run = dict(zip((run for run, _ in have), theirs, strict=True))
            shape = self._key(point, layer, (*spans, *theirs))
            oracles = [((run,) if run in self.fresh else (), span) for run, span in by_run.items()]
            made = []
            design = self._match(("design", *shape), point, layer, oracles, [spans[0]] * len(oracles))
            if design is not None:
                made.append(Group("full", design.pairs, design.exact(point, layer), {point: (dense, side)}))
            judged = [
                (own, span, by_run[o])
                for own, span in zip(self.of, spans, strict=True)
                if own and (o := self.runs[own[0]].oracle) in by_run
            ]
            arms, refs = [(own, span) for own, span, _ in judged], [ref for _, _, ref in judged]
            matched = self._match(("oracle", *shape), point, layer, arms, refs)
            if matched is not None:
                made.append(Group("oracle", matched.pairs, matched.exact(point, layer), {point: (side, dense)}))
            self.fold.add(layer, made)

    def _points(self, frame: Frame) -> Iterator[str]:
        return (p for p in self.points if p in frame.tensors)

    def _ratio(self, point: str, layer: int) -> int:
        return self.config.compress_ratios[layer] if point in ENTRY_POINTS else 1

    def _key(self, point: str, layer: int, spans: Sequence[Span]) -> tuple:
        return point in ENTRY_POINTS, self._ratio(point, layer), tuple((s.at, s.first, s.count) for s in spans)

    def _match(
        self, key: tuple, point: str, layer: int, arms: Sequence[tuple[tuple[int, ...], Span]], refs: Sequence[Span]
    ) -> _Matched | None:
        """The rows that both sides have and that belong to the run (the first of its views has them all)."""
        if key not in self._matched:
            made = [
                one
                for (own, arm), ref in zip(arms, refs, strict=True)
                if own and (one := self._piece(own, point, layer, arm, ref)) is not None
            ]
            if made:
                enters, leaves = (np.concatenate([exact[i] for _, exact in made], 1) for i in range(2))
                self._matched[key] = _Matched(self.fold.pairs([piece for piece, _ in made]), enters, leaves)
            else:
                self._matched[key] = None
        return self._matched[key]

    def _piece(
        self, own: tuple[int, ...], point: str, layer: int, arm: Span, ref: Span
    ) -> tuple[Piece, tuple[np.ndarray, np.ndarray]] | None:
        info, ratio = self.runs[own[0]], self._ratio(point, layer)
        first = max(arm.first, ref.first, -(-info.start // ratio))
        stop = min(arm.first + arm.count, ref.first + ref.count, info.stop // ratio)
        if info.cut and point in ENTRY_POINTS:
            first = max(first, info.cut // ratio if not info.arm.startswith("broken:") else 0)
        n = stop - first
        if n <= 0:
            return None
        enters, leaves = (self._exact_rows(mask, info.start, first, n, ratio) for mask in self.exact[own[0]])
        position = np.arange(first, first + n) * ratio + ratio - 1
        return Piece(own, arm.at + first - arm.first, ref.at + first - ref.first, position), (enters, leaves)

    def _exact_rows(self, mask: np.ndarray, start: int, first: int, n: int, ratio: int) -> np.ndarray:
        """[layers, n] of rows (or entries of ``ratio`` rows) from the first on; mask [layers, rows since start]."""
        if ratio == 1:
            return mask[:, first - start : first - start + n]
        # An entry is exact if every row that it pools is; rows below the start are the cached prefix's.
        rows = np.concatenate((np.ones((len(mask), start), bool), mask), 1)[:, first * ratio : (first + n) * ratio]
        return np.logical_and.reduce(rows.reshape(len(mask), n, ratio), axis=2)


def _side(frame: Frame, point: str) -> Side:
    return Side(frame.tensors[point], frame.tensors.get(f"{point}_margin"))


def _joined(passes: Sequence[reference.Frame], point: str) -> tuple[Side, list[Span]]:
    """The rows of several dense passes one after another, and where each lies."""
    values = [one.tensors[point][0] for one in passes]
    margins = [one.tensors[f"{point}_margin"][0] for one in passes if f"{point}_margin" in one.tensors]
    spans, at = [], 0
    for i, rows in enumerate(values):
        spans.append(Span(i, at, len(rows), 0))
        at += len(rows)
    return Side(torch.cat(values), torch.cat(margins) if margins else None), spans
