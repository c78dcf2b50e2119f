"""Whose rules a replay follows: one value per implementation, and the rules as pure functions on positions.

``paper`` is the technical report (arXiv 2609.19969, section 3.2.2), the others are what engines do of it. Every
position is absolute, every length is in tokens, W is the window with the query itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose

Chunks = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Engine:
    """The rules of one implementation.

    block: cuts are multiples of it, or of the block size given in its place, itself a multiple of ``unit``; None where
    every cut is admitted. keeps_short_hits: False if a hit of at most R tokens is dropped and everything runs cold.
    source: what the decoder's source layer does for rows below the tail besides writing their global KV: ``nothing``,
    write their ``window`` KV, or run these ``rows`` in full; unless it is nothing, the tail's own rows see their whole
    window there. trims: what a prefill in chunks keeps in the decoder half: the ``last`` chunk's last W rows (of others
    one row, which nothing reads), each chunk's last W rows with the floor there (``each``), or the same for chunks
    longer than W only, shorter ones seeing whatever is there (``long``). first_chunk: what the first chunk of several
    must hold: ``any``, the whole ``replay``, or W rows and a ``page`` more. withholds: whether the last W tokens of a
    hit are run again where decoder replay is on and encoder replay is off. needs_encoder: whether decoder replay is
    refused without encoder replay. sources: rule → where it was read.
    """

    about: str
    block: int | None = None
    unit: int = 1
    keeps_short_hits: bool = True
    source: str = "nothing"
    trims: str = "last"
    first_chunk: str = "any"
    withholds: bool = False
    needs_encoder: bool = False
    sources: dict[str, str] = field(default_factory=dict)


_PAPER = "arXiv 2609.19969 section 3.2.2"
_VLLM = "vLLM 0.33.0 models/deepseek_v41, vllm-project/vllm#56227"
_DAY0 = "SGLang day-0 support of V4.1, sgl-project/sglang#38957"
_SGLANG = "SGLang 0.5.23 model_executor/encoder_swa_replay.py"
_TAIL = "SGLang 0.5.23 models/deepseek_v4"
_TOKENSPEED = "lightseekorg/tokenspeed#1593, #1594"

ENGINES = {
    "paper": Engine(
        "technical report: every cut H is admitted, s = max(0, H-R), decoder tail cut at the source layer",
        sources={
            **dict.fromkeys(("cuts", "short hit", "source layer"), _PAPER),
            "chunks": f"{_TOKENSPEED}; the report speaks of whole prompts",
        },
    ),
    "vllm-0.33": Engine(
        "vLLM 0.33: block ends, a hit of at most R tokens runs cold, source layer keeps its whole window",
        block=128,
        keeps_short_hits=False,
        source="window",
        trims="long",
        needs_encoder=True,
        sources={
            "cuts": _VLLM,
            "short hit": _VLLM,
            "source layer": f"{_VLLM}, write_kv",
            "chunks": _VLLM,
            "decoder replay alone": _VLLM,
        },
    ),
    "sglang-0.5.23": Engine(
        "SGLang 0.5.23: even cuts, decoder tail cut at the source layer, each extend's last W rows",
        block=2,
        unit=2,
        trims="each",
        first_chunk="page",
        withholds=True,
        sources={
            "cuts": _SGLANG,
            "short hit": _SGLANG,
            "source layer": f"{_TAIL}, write_tail_source_kv",
            "chunks": _TAIL,
            "first chunk": _SGLANG,
            "decoder replay alone": _TAIL,
        },
    ),
    "sglang-day0": Engine(
        "SGLang day-0: even cuts, source layer runs on all rows, each extend's last W rows behind it",
        block=2,
        unit=2,
        source="rows",
        trims="each",
        first_chunk="page",
        withholds=True,
        sources=dict.fromkeys(
            ("cuts", "short hit", "source layer", "chunks", "first chunk", "decoder replay alone"), _DAY0
        ),
    ),
    "tokenspeed": Engine(
        "tokenspeed: multiples of 128, replays min(W, H), decoder tail cut at the source layer",
        block=128,
        unit=128,
        first_chunk="replay",
        sources=dict.fromkeys(("cuts", "short hit", "source layer", "chunks", "first chunk"), _TOKENSPEED),
    ),
}


def engine(semantics: str) -> Engine:
    """The rules of that name; UsageError for an unknown one."""
    return ENGINES[choose("semantics", semantics, list(ENGINES))]


def granularity(semantics: str, block: int | None = None) -> int:
    """What cuts must be a multiple of, with that block (vLLM) or page (SGLang) size; UsageError if it cannot be one."""
    rules = engine(semantics)
    if rules.block is None:
        return 1
    size = rules.block if block is None else block
    if size < 1 or size % rules.unit:
        raise UsageError(f"block size {size} does not suit {semantics}: it must be a multiple of {rules.unit}")
    return size


def page_hit(tokens: int, page: int) -> int:
    """Longest hit of a prompt that is cached whole: ⌊(N-1)/page⌋·page, since the last token must be computed."""
    return max(tokens - 1, 0) // page * page


def usable_hit(
    semantics: str, hit: int, window: int, block: int | None = None, *, encoder: bool = True, decoder: bool = True
) -> int:
    """What remains of ``hit`` cached tokens, as an external cache may report them: floored to whole blocks.

    With decoder replay but no encoder replay, late layers lack the window of what is reused: SGLang withholds the last
    W tokens of the hit, vLLM refuses the combination (UsageError).
    """
    rules, size = engine(semantics), granularity(semantics, block)
    if decoder and not encoder:
        if rules.needs_encoder:
            raise UsageError(f"{semantics} has no decoder replay without encoder replay")
        if rules.withholds:
            hit = max(hit - window, 0)
    return hit // size * size


def replay_start(semantics: str, cut: int, replay: int, carried: bool = False) -> tuple[int, int]:
    """(first row run, tokens of the hit whose global KV is used) after a hit of ``cut`` tokens.

    carried: the window came with the hit, as a transfer between prefill and decode brings it: nothing is replayed.
    """
    if carried:
        return cut, cut
    if cut <= replay and not engine(semantics).keeps_short_hits:
        return 0, 0
    return cut - min(replay, cut), cut


def chunk_ends(
    semantics: str, chunks: Chunks, start: int, cut: int, end: int, window: int, block: int | None = None
) -> tuple[int, ...]:
    """Ends of the chunks in which rows [start, end) are prefilled; the last is ``end``, replayed rows count.

    chunks: rows per chunk, or the ends themselves (those outside (start, end) fall away), None for one chunk. A size
    that would leave a last chunk below W moves the last boundary where the engine's scheduler does; ends given by hand
    that break a rule of the engine raise UsageError.
    """
    rules = engine(semantics)
    if isinstance(chunks, tuple) and (list(chunks) != sorted(set(chunks)) or (chunks and chunks[0] < 1)):
        raise UsageError(f"chunk ends {','.join(map(str, chunks))} must be positive and ascending")
    if isinstance(chunks, int) and chunks < 1:
        raise UsageError(f"chunk size {chunks} is below 1")
    made = isinstance(chunks, int)
    inner = list(range(start + chunks, end, chunks)) if made else [e for e in chunks or () if start < e < end]
    if rules.trims == "last" and inner and end - inner[-1] < window:
        if not made:
            raise UsageError(f"{semantics} needs a last chunk of at least W = {window} rows, not {end - inner[-1]}")
        inner = [e for e in inner if e < end - window] + [end - window] * (end - window > start)
    if inner and cut > start:
        least = {"any": 0, "replay": cut - start, "page": window + granularity(semantics, block)}[rules.first_chunk]
        if inner[0] - start < least:
            raise UsageError(f"{semantics} needs a first chunk of at least {least} rows, not {inner[0] - start}")
    return (*inner, end)


def kept_rows(semantics: str, begin: int, end: int, window: int, *, last: bool = True) -> int:
    """Decoder rows that an engine keeps of one chunk [begin, end); ``last``: the prompt ends with it."""
    rows = end - begin
    return min(rows, 1) if engine(semantics).trims == "last" and not last else min(rows, window)


@dataclass(frozen=True)
class Tail:
    """Rows of the decoder half: from ``row`` on, seeing no key below ``floor``; (row, floor) of later chunks."""

    row: int
    floor: int
    steps: tuple[tuple[int, int], ...] = ()


def decoder_tail(semantics: str, start: int, ends: tuple[int, ...], window: int) -> Tail:
    """The decoder rows that anything at or behind the prompt's end can still see, as one contiguous range.

    An engine also runs the kept rows of earlier chunks. Below a chunk of at least W rows the floor of that chunk, or
    the window itself, hides them from all that follows; decoder rows write no global KV and their outputs are dropped.
    So they need not be run: the range starts with the tail of the last chunk that has at least W rows (more than W
    where shorter chunks stay whole), and holds every later, shorter chunk.
    """
    trims, end = engine(semantics).trims, ends[-1]
    if trims == "last":
        row = max(start, end - window)
        return Tail(row, row)
    row, floors = start, list[tuple[int, int]]()
    for begin, stop in reversed(list(pairwise((start, *ends)))):
        # A row behind a trimmed chunk reaches back to its last W-1 rows at most, so vLLM's lower floor never shows.
        floors.insert(0, (begin, max(start, stop - window) if trims == "each" else start))
        if stop - begin > window or (trims == "each" and stop - begin == window):
            row = stop - window
            floors[0] = begin, row
            break
    return Tail(row, floors[0][1], tuple(step for step in floors[1:] if step[1] > floors[0][1]))


def rule_table() -> Iterator[tuple[str, str, str, str]]:
    """(semantics, rule, what it says, source) of every rule, in words."""
    for name, e in ENGINES.items():
        yield name, "about", e.about, ""
        for rule, text in _words(e).items():
            yield name, rule, text, e.sources.get(rule, "")


def _words(e: Engine) -> dict[str, str]:
    cuts = "every H" if e.block is None else f"multiples of {e.block}"
    if e.block is not None:
        cuts += ", or of a --block that is even" if e.unit == 2 else ", or of --block"
    words = {
        "cuts": cuts if e.unit < 128 else f"multiples of {e.unit}",
        "short hit": "H ≤ R: replayed from 0" if e.keeps_short_hits else "H ≤ R: hit dropped, all runs cold",
        "source layer": {
            "nothing": "decoder tail cut here; window cut at the tail",
            "window": "decoder tail cut here; window written for all rows and seen whole",
            "rows": "runs on all rows; decoder tail cut one layer later",
        }[e.source],
        "chunks": {
            "last": "the last chunk, at least W long, keeps W rows; others one row",
            "each": "each chunk keeps its last min(W, rows), floor at its end - W",
            "long": "a chunk longer than W keeps its last W rows, floor at its end - W; shorter ones stay whole",
        }[e.trims],
    }
    if e.first_chunk != "any":
        words["first chunk"] = "holds the whole replay" if e.first_chunk == "replay" else "at least W + page rows"
    if e.needs_encoder:
        words["decoder replay alone"] = "refused"
    if e.withholds:
        words["decoder replay alone"] = "the last W tokens of a hit are withheld"
    return words
