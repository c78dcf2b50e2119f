"""Hook points: their names for a number of layers, and globs over them."""

import fnmatch
import itertools
import re
from collections.abc import Iterable, Sequence

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import unknown

POINTS = {
    "embed": "token embeddings, before layer 0",
    "attn_in": "what enters a layer's attention, after mixing and norm",
    "window_kv": "window KV as attended: after RoPE and rounding",
    "global_kv": "entries of the compressed global KV, at the layers that write them",
    "index_k": "index keys of the global entries, at the layers that write them",
    "topk": "global entries that the index selects, as sets",
    "attn_out": "attention after its output projection",
    "router": "experts that the router chooses, as sets",
    "ffn_out": "output of the experts",
    "hidden": "the collapsed residual that a layer hands on",
    "streams": "the residual streams (mHC) that a layer hands on",
    "mix": "coefficients that mix the streams (mHC)",
    "final": "the last residual after the final norm",
    "logits": "logits of the next token",
}
LAYER_POINTS = tuple(name for name in POINTS if name not in ("embed", "final", "logits"))

_MOST_NAMES = 100_000  # what braces may write out
_BRACE = re.compile(r"\{([^{}]*)\}")


def point_names(layers: int) -> tuple[str, ...]:
    """Every hook point of a model with `layers` layers, in the order of the data flow."""
    inner = (f"layers.{layer}.{point}" for layer in range(layers) for point in LAYER_POINTS)
    return ("embed", *inner, "final", "logits")


def split_globs(text: str) -> tuple[str, ...]:
    """Globs between commas; a comma inside braces belongs to its glob."""
    return tuple(part.strip() for part in re.split(r",(?![^{}]*\})", text))


def expand_points(globs: Iterable[str], valid: Sequence[str]) -> tuple[str, ...]:
    """The names of `valid`, in its order, that any glob matches; a glob that matches none is a UsageError.

    A glob may hold `*` (also over dots), `?`, `[0-3]`, `{a,b}` and `{0..5}`.
    """
    chosen: set[str] = set()
    for glob in itertools.chain.from_iterable(map(split_globs, globs)):
        for pattern in _braces(glob):
            matched = [pattern] if pattern in valid else fnmatch.filter(valid, pattern)
            if not matched and pattern in LAYER_POINTS:
                raise UsageError(f"hook point {pattern!r} belongs to a layer; write 'layers.*.{pattern}'")
            if not matched:
                raise unknown("hook point", pattern, valid, shown=_folded(valid))
            chosen.update(matched)
    return tuple(name for name in valid if name in chosen)


def _braces(glob: str) -> list[str]:
    """`glob` with every `{a,b}` and `{0..5}` written out; innermost first, so that braces may be nested."""
    done, open_ = [], [glob]
    while open_:
        pattern = open_.pop()
        brace = _BRACE.search(pattern)
        if brace is None:
            if "{" in pattern or "}" in pattern:
                raise UsageError(f"hook points {glob!r} have a brace without its partner")
            done.append(pattern)
            continue
        span = re.fullmatch(r"([0-9]{1,6})\.\.([0-9]{1,6})", brace[1])
        parts = map(str, range(int(span[1]), int(span[2]) + 1)) if span else brace[1].split(",")
        open_.extend(pattern[: brace.start()] + part + pattern[brace.end() :] for part in parts)
        if len(open_) + len(done) > _MOST_NAMES:
            raise UsageError(f"hook points {glob!r} write out more than {_MOST_NAMES} names; use *")
    return done


def _folded(names: Sequence[str]) -> str:
    """Names of hook points with the layers folded: `embed, layers.{0..19}.{attn_in,hidden}, final, logits`."""
    layers: dict[str, list[int]] = {}
    other: list[str] = []
    for name in names:
        if found := re.fullmatch(r"layers\.([0-9]+)\.(\w+)", name):
            layers.setdefault(found[2], []).append(int(found[1]))
        else:
            other.append(name)
    spans: dict[str, list[str]] = {}
    for point, held in layers.items():
        whole = held == list(range(held[0], held[-1] + 1))
        span = f"{{{held[0]}..{held[-1]}}}" if whole and len(held) > 1 else f"{{{','.join(map(str, held))}}}"
        spans.setdefault(span, []).append(point)
    folded = [
        f"layers.{span}.{points[0] if len(points) == 1 else '{' + ','.join(points) + '}'}"
        for span, points in spans.items()
    ]
    return ", ".join(other[:1] + folded + other[1:])
