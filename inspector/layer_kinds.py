"""What kind of KV each layer of a recorded model keeps, in a word or two for axes, tables and files. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replayscope.traces.schema import natural_key

# Of V4.1: what a layer's compress ratio means for its keys. Every layer has a window there.
_BY_RATIO = {0: "window", 1: "ratio 1", 2: "ratio 2"}


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of each layer ``window`` or ``global``; of V4.1, where every layer has a window, ``window`` or ``ratio M`` of the
    global KV that it reads besides. From the config in a trace; empty where that does not say.
    """
    ours = config.get("replayscope")
    kinds = ours.get("layers") if isinstance(ours, Mapping) else None
    if isinstance(kinds, list | tuple) and all(kind in ("window", "global") for kind in kinds):
        return tuple(kinds)
    text = config.get("text_config", config)
    ratios = text.get("compress_ratios") if isinstance(text, Mapping) else None
    if isinstance(ratios, list | tuple) and all(type(ratio) is int and ratio in _BY_RATIO for ratio in ratios):
        return tuple(_BY_RATIO[ratio] for ratio in ratios)
    return ()


def by_kind(kinds: Sequence[str]) -> dict[str, str]:
    """Kind → its layers, as `0-4, 6-10`, in the order in which the kinds come."""
    return {kind: spans(l for l, other in enumerate(kinds) if other == kind) for kind in dict.fromkeys(kinds)}


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers, three and more without a gap as one span: `0-4, 6, 7`."""
    groups: list[list[int]] = []
    for n in numbers:
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups)


def named(layer: int | str, kinds: Sequence[str]) -> str:
    """`6, window`; the number alone where the kind is not known."""
    at = int(layer)
    return f"{layer}, {kinds[at]}" if 0 <= at < len(kinds) else f"{layer}"


def kind_beside(name: str, kinds: Sequence[str]) -> str:
    """`layers.6.hidden (window)`; the name alone of a hook point in no layer, in models of one kind, or where nobody
    knows."""
    layer = natural_key(name)[0]
    return f"{name} ({kinds[layer]})" if len(set(kinds)) > 1 and 0 <= layer < len(kinds) else name
