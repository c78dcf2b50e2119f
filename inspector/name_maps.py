"""Name maps: which tensor of an engine is which hook point. JSON, shipped in maps/ or the user's own.

    {"about": "…", "tokens": "input_ids", "positions": "positions", "layers": [1, 2],
     "points": [{"from": ["model.layers.{layer}.output", …], "to": "layers.{layer}.streams", …}]}

`from` holds names that mean the same, `sum` names whose tensors are added (engines that keep the residual apart). Of
`{layer}` the source's own tag is taken where the name has none. docs/capture-from-an-engine.md lists every key.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose, unknown
from replayscope.inspector.points import LAYER_POINTS, POINTS
from replayscope.inspector.unpack import LAYOUTS
from replayscope.traces.dtypes import BITVIEWS

_FIELDS = re.compile(r"\\\{(layer|rank)\\\}")


@dataclass(frozen=True)
class Entry:
    """One hook point.

    to: its name, with {layer} where it has one. names: tensors that mean the same. terms: tensors that are added, each
    needed. shift: added to the layer in the name. last: the hook point that the layer behind the last one stands for.
    packed, page: layout of a packed cache, and rows of a page. dims: names of the dimensions, as 't h[tp] d'.
    positions, slots: tensors with each row's position (-1: none), and with the slot that each row lies in. first:
    position of the first row. dtype: what the bits are, where the file cannot say.
    """

    to: str
    names: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    shift: int = 0
    last: str | None = None
    packed: str | None = None
    page: int | None = None
    dims: str | None = None
    positions: str | None = None
    slots: str | None = None
    first: int | None = None
    dtype: str | None = None

    def target(self, layer: int | None, layers: int) -> str:
        """The hook point at that layer of the source. Raises UsageError if the model of so many layers has none."""
        if "{layer}" not in self.to:
            return self.to
        if layer is None:
            raise UsageError(f"the map's {self.to} needs a layer, and neither the name nor a tag of the tensor has one")
        if self.last is not None and layer == layers:
            return self.last
        at = layer + self.shift
        if at == -1 and self.to.endswith(".hidden"):
            return "embed"
        if not 0 <= at < layers:
            raise UsageError(f"the source has a layer {layer} for {self.to}; the model has layers 0 to {layers - 1}")
        return self.to.replace("{layer}", str(at))


@dataclass(frozen=True)
class NameMap:
    """tokens, positions: names of the tensors with each row's token id and position; layers: the ids of vLLM's
    hidden_states, in their order. sha256: of the file, for the provenance."""

    name: str
    sha256: str
    points: tuple[Entry, ...]
    tokens: str | None = None
    positions: str | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Match:
    """Where a tensor belongs: the entry, which of its terms, and the layer and the rank that its name tells."""

    entry: Entry
    term: int
    layer: int | None
    rank: int | None


def shipped() -> dict[str, Any]:
    """name -> file of the maps that come with the package."""
    found = [file for file in files("replayscope.inspector").joinpath("maps").iterdir() if file.name.endswith(".json")]
    return {file.name.removesuffix(".json"): file for file in sorted(found, key=lambda file: file.name)}


def load_map(text: str) -> NameMap:
    """A shipped map by its name, or a file. Raises UsageError with one line that names the key."""
    known = shipped()
    file = known.get(text) or Path(text)
    if text not in known and not Path(text).is_file():
        raise unknown("map", text, list(known), shown=f"{', '.join(known)}, or a JSON file")
    data = file.read_bytes()
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"map {text} is not JSON: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("points", []), list):
        raise UsageError(f"map {text} is not an object with a list 'points'")
    _known_keys(raw, {"about", "tokens", "positions", "layers", "points"}, f"map {text}")
    layers = raw.get("layers", [])
    if not isinstance(layers, list) or not all(_whole(at) for at in layers) or len(set(layers)) != len(layers):
        raise UsageError(f"map {text}: layers is not a list of different layer ids")
    tokens, positions = (_text(raw, key, f"map {text}") for key in ("tokens", "positions"))
    points = tuple(_entry(entry, f"map {text}, point {i}") for i, entry in enumerate(raw.get("points", [])))
    if not points and not layers:
        raise UsageError(f"map {text} names no points")
    return NameMap(text, hashlib.sha256(data).hexdigest(), points, tokens, positions, tuple(layers))


def find(entries: tuple[Entry, ...], name: str) -> Match | None:
    """The first entry that the name of a tensor matches, or None."""
    for entry in entries:
        options = [(0, pattern) for pattern in entry.names] + list(enumerate(entry.terms))
        for term, pattern in options:
            if found := re.fullmatch(_regex(pattern), name):
                numbers = found.groupdict()
                layer, rank = (int(numbers[key]) if numbers.get(key) else None for key in ("layer", "rank"))
                return Match(entry, term, layer, rank)
    return None


def _regex(pattern: str) -> str:
    return _FIELDS.sub(lambda found: f"(?P<{found[1]}>[0-9]{{1,5}})", re.escape(pattern))


def _entry(raw: Any, where: str) -> Entry:
    if not isinstance(raw, dict):
        raise UsageError(f"{where} is not an object")
    _known_keys(raw, {"from", "sum"} | {f.name for f in fields(Entry)} - {"names", "terms"}, where)
    to = _text(raw, "to", where) or ""
    _hook_point(to, where)
    last = _text(raw, "last", where)
    if last is not None:
        _hook_point(last, where)
    names, terms = (_names(raw.get(key, []), key, where) for key in ("from", "sum"))
    if bool(names) == bool(terms):
        raise UsageError(f"{where} ({to}) needs either from or sum")
    numbers = {key: raw[key] for key in ("shift", "page", "first") if key in raw}
    for key, value in numbers.items():
        if not _whole(value, least=-1 if key == "shift" else 1 if key == "page" else 0):
            raise UsageError(f"{where} ({to}): {key} is {value!r}, not a whole number that can be")
    words = {key: _text(raw, key, where) for key in ("packed", "dims", "positions", "slots", "dtype")}
    if words["packed"] is not None:
        choose("packed layout", words["packed"], list(LAYOUTS))
    if words["dtype"] is not None:
        choose("dtype", words["dtype"], list(BITVIEWS))
    if "page" in numbers and words["packed"] is None:
        raise UsageError(f"{where} ({to}): page is for packed rows")
    shift, page, first = (numbers.get(key) for key in ("shift", "page", "first"))
    packed, dims, positions, slots, dtype = words.values()
    return Entry(to, names, terms, shift or 0, last, packed, page, dims, positions, slots, first, dtype)


def _hook_point(name: str, where: str) -> None:
    point = name.removeprefix("layers.{layer}.")
    valid = [f"layers.{{layer}}.{p}" if p in LAYER_POINTS else p for p in POINTS]
    if name not in valid:
        raise UsageError(f"{where}: {unknown('hook point', name, valid)}" if point else f"{where} has no 'to'")


def _names(value: Any, key: str, where: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{where}: {key} is not a name or a list of names")
    for name in names:
        if name.count("{layer}") > 1 or name.count("{rank}") > 1:
            raise UsageError(f"{where}: {name} has a field twice")
    return tuple(names)


def _text(raw: Mapping[str, Any], key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where}: {key} is not a text")
    return value


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _known_keys(raw: Mapping[str, Any], valid: set[str], where: str) -> None:
    for key in raw:
        if key not in valid:
            raise UsageError(f"{where}: {unknown('key', key, sorted(valid))}")
