"""Which runs of two traces belong together, and why two traces cannot be set against each other."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from replayscope.inspector.errors import CompareError
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import RunInfo

_ARM_FIELDS = ("arm", "semantics", "cut", "replay")


def same_model(first: TraceReader, second: TraceReader) -> None:
    """Raises CompareError naming the first field in which config, prompt or tokenizer differ."""
    if differs := _difference(first.config, second.config, "config"):
        raise CompareError(f"the models differ: {differs}")
    a, b = first.tokens.ids, second.tokens.ids
    common = min(len(a), len(b))
    if (odd := np.flatnonzero(a[:common] != b[:common])).size:
        at = int(odd[0])
        raise CompareError(f"the prompts differ: tokens.ids[{at}] is {a[at]} in the first, {b[at]} in the second")
    if len(a) != len(b):
        raise CompareError(f"the prompts differ: tokens.ids has {len(a)} tokens in the first, {len(b)} in the second")
    pairs = zip(a.tolist(), first.tokens.texts, second.tokens.texts, strict=True)
    for at, (number, here, there) in enumerate(pairs):
        if here != there and not {here, there} & {"", str(number)}:
            # A trace of bare ids shows each as its number, or as nothing, which says nothing of a tokenizer.
            shown = f"{here[:40]!a} in the first, {there[:40]!a} in the second"
            raise CompareError(f"the tokenizers differ: tokens.texts[{at}] (id {number}) is {shown}")


def _difference(a: Any, b: Any, name: str) -> str | None:
    """The first field in which two JSON documents differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            if key not in a or key not in b:
                return f"{name}.{key} is only in the {'first' if key in a else 'second'}"
            if found := _difference(a[key], b[key], f"{name}.{key}"):
                return found
        return None
    return None if a == b else f"{name} is {a} in the first, {b} in the second"


def provenance_notes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What two comparable traces still differ in: dtype and weights; of an imported trace, whose it is."""
    notes = []
    for name in ("dtype", "weights_sha256"):
        here, there = first.get(name), second.get(name)
        if here != there and here is not None and there is not None:
            notes.append(f"{name} is {here} in the first, {there} in the second")
    for where, about in (("first", first), ("second", second)):
        engine = about.get("engine")
        if isinstance(engine, Mapping):
            told = f"{engine.get('name')} {engine.get('version')} ({engine.get('commit')})"
            notes.append(f"the {where} was imported from {told}; that it ran these weights is not known")
    return notes


def states_by_run(trace: TraceReader) -> dict[int, set[str]]:
    """Names of the raw states that each run holds."""
    held: dict[int, set[str]] = {run.index: set() for run in trace.runs}
    for run, name in trace.states():
        held.setdefault(run, set()).add(name)
    return held


def pairs_of(
    first: TraceReader, second: TraceReader, cross_arm: bool
) -> tuple[list[tuple[RunInfo, RunInfo]], list[str]]:
    """Runs that belong together, and notes on those that stay alone. Only runs with raw states count.

    They agree in arm, semantics, cut and replay length; cross_arm pairs what is left, if that is one run on each side.
    Raises CompareError naming the fields that differ if no runs belong together or a pair has two windows.
    """
    held = states_by_run(first), states_by_run(second)
    left = [run for run in first.runs if held[0][run.index]]
    right = [run for run in second.runs if held[1][run.index]]
    if not left or not right:
        raise CompareError(f"{(second if left else first).path} holds no raw states; record it with --hooks")
    pairs, alone = [], []
    for run in left:
        same = next((other for other in right if _key(other) == _key(run)), None)
        if same is None:
            alone.append(run)
        else:
            right.remove(same)
            pairs.append((run, same))
    if cross_arm and len(alone) == len(right) == 1:
        pairs.append((alone.pop(), right.pop()))
    if not pairs:
        raise CompareError(_no_pair(alone, right, cross_arm))
    for a, b in pairs:
        if a.window != b.window:
            raise CompareError(f"{a.label}: window is {a.window} in the first, {b.window} in the second")
    notes = [
        f"only in the {where}: {run.label}" for where, runs in (("first", alone), ("second", right)) for run in runs
    ]
    return pairs, notes


def _key(run: RunInfo) -> tuple:
    return tuple(getattr(run, name) for name in _ARM_FIELDS)


def _no_pair(left: list[RunInfo], right: list[RunInfo], cross_arm: bool) -> str:
    """Why no runs belong together, by the two that are most alike."""
    a, b = max(
        ((a, b) for a in left for b in right),
        key=lambda pair: sum(x == y for x, y in zip(_key(pair[0]), _key(pair[1]), strict=True)),
    )
    odd = [
        f"{name} is {getattr(a, name)} in the first, {getattr(b, name)} in the second"
        for name in _ARM_FIELDS
        if getattr(a, name) != getattr(b, name)
    ]
    how = "record one arm in each to pair them" if cross_arm else "add --cross-arm to compare them all the same"
    return f"no runs belong together; the nearest: {'; '.join(odd)}; {how}"
