"""Tensors of a dump put together into the rows of one hook point: ranks, dimensions, packed slots, steps, positions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from replayscope.inspector.dumps import Item, Loaded
from replayscope.inspector.errors import UsageError
from replayscope.inspector.name_maps import Entry, Match, NameMap, find
from replayscope.inspector.unpack import unpack
from replayscope.traces.dtypes import decode, storage_dtype
from replayscope.traces.schema import DISCRETE_POINTS, natural_key

ENTRY_POINTS = ("global_kv", "index_k")
# Hook point -> the key of the config that says how wide a row is.
_WIDTHS: dict[str, str] = {
    **dict.fromkeys(("embed", "attn_in", "attn_out", "ffn_out", "hidden", "streams", "final"), "hidden_size"),
    "window_kv": "head_dim",
    "global_kv": "head_dim",
    "index_k": "index_head_dim",
    "logits": "vocab_size",
}
_DIM = re.compile(r"([A-Za-z0-9_*]+)(?:\[([A-Za-z0-9_:,]+)\])?")
# Groups of ranks that split a dimension into neighbouring parts; of others the order or a sum would have to be guessed.
_JOINED = ("tp", "attn_tp")


@dataclass(frozen=True)
class Rows:
    """positions [row] of the prompt (entries: their number), ascending; values [row, …] as a trace stores them."""

    positions: ndarray
    values: ndarray
    logical: str


@dataclass(frozen=True)
class _Piece:
    item: Item
    match: Match


class Dump:
    """The tensors of one dump by hook point. Raises UsageError where names and layers do not fit the map."""

    def __init__(self, items: Sequence[Item], names: NameMap, layers: int):
        self._names = names
        self._side = [item for item in items if item.name in (names.tokens, names.positions)]
        self._all = items
        self.points: dict[str, dict[int, list[_Piece]]] = {}
        self.unused = 0
        for item in items:
            match = find(names.points, item.name)
            if match is None:
                self.unused += item not in self._side
                continue
            layer = match.layer if match.layer is not None else item.layer
            name = match.entry.target(layer, layers)
            self.points.setdefault(name, {}).setdefault(item.step, []).append(_Piece(item, match))
        if not self.points:
            shown = list(dict.fromkeys(item.name for item in items))
            raise UsageError(
                f"map {names.name} knows none of the {len(shown)} names in the dump; "
                f"among them: {', '.join(ascii(name)[1:-1][:60] for name in shown[:6])}"
            )
        self.points = dict(sorted(self.points.items(), key=lambda found: natural_key(found[0])))

    def ids(self, start: int) -> dict[int, int]:
        """position -> token id, as far as the dump says. start: position of the first row, if it has no positions."""
        found: dict[int, int] = {}
        following = start
        for step in sorted({item.step for item in self._all if item.name == self._names.tokens}):
            ids = self._vector(self._names.tokens, step)
            at = self._vector(self._names.positions, step)
            if at is None or ids is None or len(at) != len(ids):
                at = np.arange(following, following + len(ids if ids is not None else ()))
            following = int(at[-1]) + 1 if len(at) else following
            found |= dict(zip(at.tolist(), ids.tolist() if ids is not None else (), strict=True))
        return found

    def rows(self, name: str, start: int, tokens: int) -> Rows:
        """All rows of a hook point. start: position of the first row, where the dump has no positions."""
        parts: list[Rows] = []
        following = start
        for step, pieces in sorted(self.points[name].items()):
            part = self._step(
                name, step, pieces, following if parts or name.rsplit(".", 1)[-1] not in ENTRY_POINTS else 0
            )
            following = int(part.positions[-1]) + 1 if len(part.positions) else following
            parts.append(part)
        logical, shape = parts[0].logical, parts[0].values.shape[1:]
        if any(part.logical != logical or part.values.shape[1:] != shape for part in parts):
            raise UsageError(f"{name} has another dtype or row shape in step {sorted(self.points[name])[-1]}")
        positions = np.concatenate([part.positions for part in parts])
        values = np.concatenate([part.values for part in parts])
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
        if len(twice := np.flatnonzero(np.diff(positions) == 0)):
            steps = ", ".join(map(str, sorted(self.points[name])[:6]))
            raise UsageError(
                f"{name} holds position {positions[twice[0]]} twice, in steps {steps}; choose with --steps"
            )
        if len(positions) and not 0 <= positions[0] <= positions[-1] < tokens:
            wrong = positions[0] if positions[0] < 0 else positions[-1]
            raise UsageError(f"{name} holds position {wrong}; the prompt has {tokens} tokens")
        return Rows(positions, values[order], logical)

    def check_held(self, name: str, rows: Rows) -> None:
        """Raises UsageError with the tensors that a hook point comes from if they leave it no row, or empty rows."""
        if not rows.values.size:
            pieces = [piece.item.where for _, found in sorted(self.points[name].items()) for piece in found]
            shown = f"{', '.join(pieces[:3])}{' …' if len(pieces) > 3 else ''}"
            raise UsageError(
                f"{name} holds no number: {list(rows.values.shape)} is what is left of {shown}; capture it again, or "
                "take it out of the map"
            )

    def _step(self, name: str, step: int, pieces: list[_Piece], following: int) -> Rows:
        entry = pieces[0].match.entry
        where = f"{name} in step {step}"
        if any(piece.match.entry is not entry for piece in pieces):
            names = sorted({piece.item.name for piece in pieces})
            raise UsageError(f"{where} comes from {' and '.join(names[:3])}; take one of them out of the map")
        at = self._positions(entry, name, step)
        terms = []
        for term in range(max(1, len(entry.terms))):
            same = [piece for piece in pieces if piece.match.term == term or not entry.terms]
            if not same:
                raise UsageError(f"{where} lacks {entry.terms[term]}, which the map adds to it")
            if len(odd := sorted({p.item.name for p in same if p.match.rank is None})) > 1:
                raise UsageError(f"{where} comes from {' and '.join(odd[:3])}; take one of them out of the map")
            terms.append(_whole(same, entry, where, None if at is None else len(at)))
        values, logical = terms[0]
        if len(terms) > 1:
            values, logical = _sum(terms, where), "float32"
        if entry.packed:
            values, logical = unpack(values, entry.packed, entry.page), "float32"
        values, logical = _fits(values, logical, name, where)
        if entry.slots:
            slots = self._vector(_at_layer(entry.slots, name), step)
            if slots is None:
                raise UsageError(f"{where} lacks {entry.slots}, the slots of its rows")
            if len(slots) and not 0 <= slots.min() <= slots.max() < len(values):
                raise UsageError(f"{where} has {len(values)} slots, and {entry.slots} asks for {slots.max()}")
            values = values[slots]
        if at is None:
            first = entry.first if entry.first is not None and step == min(self.points[name]) else following
            at = np.arange(first, first + len(values))
        elif name == "logits" and len(values) == 1:
            # An engine computes the logits of a prompt's last row only.
            at = at[-1:]
        if len(at) != len(values):
            raise UsageError(f"{where} has {len(values)} rows, and there are {len(at)} positions")
        kept = at >= 0
        return Rows(at[kept], values[kept], logical)

    def _positions(self, entry: Entry, name: str, step: int) -> ndarray | None:
        if entry.positions:
            at = self._vector(_at_layer(entry.positions, name), step)
            if at is None:
                raise UsageError(f"{name} in step {step} lacks {entry.positions}, the positions of its rows")
            return at
        if name.rsplit(".", 1)[-1] in ENTRY_POINTS or entry.packed:
            return None
        at = self._vector(self._names.positions, step)
        if at is not None and len(down := np.flatnonzero(np.diff(at) <= 0)):
            raise UsageError(
                f"positions fall at row {down[0] + 1} of step {step}: several requests, or rows that pad a graph; "
                "capture one request alone, with graphs off"
            )
        return at

    def _vector(self, name: str | None, step: int) -> ndarray | None:
        """A tensor of whole numbers [row] in a step, of the lowest rank; None if the dump has none."""
        found = [item for item in self._all if item.name == name and item.step == step]
        if not found:
            return None
        item = min(found, key=lambda item: item.rank or 0)
        values = item.load().values
        values = values[0] if values.ndim == 2 and len(values) == 1 else values
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise UsageError(f"{item.where} is {values.dtype} {list(values.shape)}, not one whole number per row")
        return values.astype(np.int64)


def _at_layer(pattern: str, name: str) -> str:
    return pattern.replace("{layer}", str(natural_key(name)[0]))


def _whole(pieces: list[_Piece], entry: Entry, where: str, rows: int | None) -> tuple[ndarray, str]:
    """The tensor of all ranks, rows first, and its logical dtype."""
    loaded = [piece.item.load() for piece in pieces]
    for part in loaded:
        if part.logical != loaded[0].logical or part.values.ndim != loaded[0].values.ndim:
            raise UsageError(f"{where}: ranks hold {loaded[0].logical} and {part.logical}, or other dimensions")
    dims = entry.dims or loaded[0].dims
    names = _dims(dims, loaded[0].values.ndim, where) if dims else None
    split = [i for i, (_, group) in enumerate(names or ()) if group]
    if len(split) > 1:
        raise UsageError(f"{where}: {dims} splits more than one dimension")
    group = (names or ())[split[0]][1] if split and names else None
    by_rank: dict[int, Loaded] = {}
    size = 1
    for piece, part in zip(pieces, loaded, strict=True):
        rank, of = _rank(piece, part, group)
        if rank in by_rank:
            raise UsageError(f"{where}: {piece.item.where} is a second tensor of rank {rank}; was it dumped twice?")
        by_rank[rank], size = part, max(size, of)
    size = max(size, max(by_rank) + 1)
    parts = [by_rank[rank].values for rank in sorted(by_rank)]
    if split:
        if missing := sorted(set(range(size)) - set(by_rank)):
            raise UsageError(f"{where}: {len(missing)} of {size} shards are missing, the first is rank {missing[0]}")
        shapes = {tuple(np.delete(part.shape, split[0])) for part in parts}
        if len(shapes) > 1:
            raise UsageError(f"{where}: shards of {' and '.join(str(list(p.shape)) for p in parts[:2])} do not join")
        values = np.concatenate(parts, split[0])
    else:
        if len(parts) < size and not dims:
            raise UsageError(
                f"{where}: {len(parts)} of {size} ranks are here; if all hold the same, say so in the map: dims 't h'"
            )
        if any(part.shape != parts[0].shape or part.tobytes() != parts[0].tobytes() for part in parts):
            hint = "; name the dimension that is split in the map: dims 't h[tp]'"
            hint = f", though {dims!r} splits none of its dimensions" if dims else hint
            raise UsageError(f"{where} differs between ranks{hint}")
        values = parts[0]
    if entry.dtype:
        if values.dtype != storage_dtype(entry.dtype):
            raise UsageError(f"{where} holds {values.dtype}, whose bits are no {entry.dtype}")
        return _rows_first(values, names, where, rows, entry), entry.dtype
    return _rows_first(values, names, where, rows, entry), loaded[0].logical


def _rank(piece: _Piece, part: Loaded, group: str | None) -> tuple[int, int]:
    """Rank in the group that splits the tensor, and the group's size."""
    if piece.match.rank is not None:
        return piece.match.rank, 1
    if group is not None and group in part.ranks:
        return part.ranks[group]
    # Ranks of other stages of a pipeline hold other layers: within a stage the tensor-parallel group is everybody.
    return part.ranks.get("tp", part.ranks.get("", (piece.item.rank or 0, 1)))


def _dims(text: str, ndim: int, where: str) -> list[tuple[str, str | None]]:
    """'t h[tp] d' -> [('t', None), ('h', 'tp'), ('d', None)]: names, and what splits them."""
    out: list[tuple[str, str | None]] = []
    for part in text.split("#")[0].split():
        found = _DIM.fullmatch(part)
        if found is None or (found[2] and found[2] not in _JOINED):
            raise UsageError(f"{where}: dimension {part[:40]!r} cannot be joined; known: name, {', '.join(_JOINED)}")
        out.append((found[1], found[2]))
    if len(out) != ndim:
        raise UsageError(f"{where} has {ndim} dimensions, and dims names {len(out)}: {text[:60]!r}")
    return out


def _rows_first(
    values: ndarray, names: Sequence[tuple[str, str | None]] | None, where: str, rows: int | None, entry: Entry
) -> ndarray:
    if values.ndim == 0:
        raise UsageError(f"{where} is a single number")
    if names is None:
        if values.ndim > 1 and len(values) == 1 and not entry.packed:
            one_of_many = values.ndim > 2 and not entry.to.endswith(("streams", "mix")) if rows is None else rows != 1
            # One prompt in a batch; logits of a last row are one row.
            if one_of_many and not (entry.to == "logits" and values.ndim == 2):
                values = values[0]
        return values
    drop = tuple(i for i, (name, _) in enumerate(names) if name in ("b", "1"))
    if any(values.shape[i] != 1 for i in drop):
        raise UsageError(f"{where} holds a batch of {max(values.shape[i] for i in drop)}; capture one request alone")
    left = [name for i, (name, _) in enumerate(names) if i not in drop]
    row = next((i for i, name in enumerate(left) if name in ("t", "s")), 0)
    return np.moveaxis(values.reshape([n for i, n in enumerate(values.shape) if i not in drop]), row, 0)


def _sum(terms: Sequence[tuple[ndarray, str]], where: str) -> ndarray:
    if any(values.shape != terms[0][0].shape for values, _ in terms):
        raise UsageError(f"{where}: the tensors to add have shapes {[list(values.shape) for values, _ in terms]}")
    total = np.zeros(terms[0][0].shape, np.float32)
    for values, logical in terms:
        total += decode(values, logical).astype(np.float32)
    return total


def _fits(values: ndarray, logical: str, name: str, where: str) -> tuple[ndarray, str]:
    """Choices as int32; of states, refuse whole numbers, which are the bits of something that the map must name."""
    whole = values.dtype.kind in "iu" and logical == values.dtype.name
    if name.rsplit(".", 1)[-1] in DISCRETE_POINTS:
        if not whole or (values.size and not -1 <= values.min() <= values.max() < 2**31):
            raise UsageError(f"{where} holds {logical}, not ids from -1 up")
        return values.astype(np.int32), "int32"
    if whole:
        raise UsageError(f"{where} holds {logical}; name its dtype or its packed layout in the map")
    return values, logical


def check_width(name: str, values: ndarray, config: Mapping[str, object]) -> None:
    """Raises UsageError if a row is not as wide as the config says, which a shard taken for the whole is not."""
    key = _WIDTHS.get(name.rsplit(".", 1)[-1])
    want = config.get(key) if key else None
    if isinstance(want, int) and (values.ndim < 2 or values.shape[-1] != want):
        raise UsageError(f"{name} has rows of {list(values.shape[1:])}, {key} is {want}; is it a shard of several?")
