"""Rows of many requests laid one after another, and the blocks in which they run."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows per tile in reproducible mode. A row's place in its tile is its position modulo this number, so its bits cannot
# depend on which other rows run: BLAS gives other bits for other row counts and other places.
TILE = 32


@dataclass(frozen=True)
class Span:
    """Consecutive rows (or entries) of one request: packed [at, at+count), positions (entry numbers) from ``first``."""

    request: int
    at: int
    count: int
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.at, self.at + self.count)

    def since(self, first: int) -> "Span":
        """The part of it from position ``first`` on (possibly empty)."""
        skip = min(max(first - self.first, 0), self.count)
        return Span(self.request, self.at + skip, self.count - skip, self.first + skip)


@dataclass(frozen=True)
class Block:
    """Rows computed together. ``rows`` are gathered, results of ``keep`` places are stored at ``out``.

    segments: (request, first place, last place + 1) in the block, in order.
    """

    rows: slice | Tensor
    keep: Tensor | None
    segments: tuple[tuple[int, int, int], ...]

    def take(self, x: Tensor) -> Tensor:
        return x[self.rows]

    def put(self, target: Tensor, value: Tensor) -> None:
        if self.keep is None:
            target[self.rows] = value
        else:
            assert isinstance(self.rows, Tensor)
            target[self.rows[self.keep]] = value[self.keep]


def pack(counts: list[tuple[int, int]]) -> list[Span]:
    """Spans of (first, last+1) ranges, one per request, packed in order."""
    spans, at = [], 0
    for request, (first, stop) in enumerate(counts):
        spans.append(Span(request, at, max(stop - first, 0), first))
        at += spans[-1].count
    return spans


def blocks(
    spans: list[Span], chunks: list[int | None], budget: int, reproducible: bool, device: torch.device
) -> list[Block]:
    """Cut spans into blocks of at most ``budget`` rows (or a request's own chunk), or into fixed tiles."""
    if reproducible:
        return [b for s in spans for b in _tiles(s, device)]
    out: list[Block] = []
    open_: list[Span] = []

    def flush() -> None:
        if open_:
            out.append(_block(open_, device))
            open_.clear()

    for span in spans:
        own = chunks[span.request]
        if own is not None:
            flush()
            for at in range(0, span.count, min(own, budget)):
                out.append(_block([_cut(span, at, at + min(own, budget))], device))
            continue
        at = 0
        while at < span.count:
            room = budget - sum(s.count for s in open_)
            open_.append(_cut(span, at, min(span.count, at + room)))
            at += open_[-1].count
            if sum(s.count for s in open_) == budget:
                flush()
    flush()
    return out


def _cut(span: Span, a: int, b: int) -> Span:
    b = min(b, span.count)
    return Span(span.request, span.at + a, b - a, span.first + a)


def _block(spans: list[Span], device: torch.device) -> Block:
    segments, place = [], 0
    for s in spans:
        segments.append((s.request, place, place + s.count))
        place += s.count
    adjacent = all(a.at + a.count == b.at for a, b in itertools.pairwise(spans))
    if adjacent:
        rows: slice | Tensor = slice(spans[0].at, spans[-1].at + spans[-1].count)
    else:
        rows = torch.cat([torch.arange(s.at, s.at + s.count, device=device) for s in spans])
    return Block(rows, None, tuple(segments))


def _tiles(span: Span, device: torch.device) -> list[Block]:
    """Tiles aligned to absolute positions; places without a row repeat the first row and are thrown away."""
    out, at = [], 0
    while at < span.count:
        place = (span.first + at) % TILE
        n = min(TILE - place, span.count - at)
        rows = torch.full((TILE,), span.at + at, device=device)
        rows[place : place + n] = torch.arange(span.at + at, span.at + at + n, device=device)
        out.append(Block(rows, torch.arange(place, place + n, device=device), ((span.request, 0, TILE),)))
        at += n
    return out
