"""Which cells the limits of a contract select, and whether each selects any: one that does not protects nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from replayscope.inspector.errors import UsageError
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.judge_contract import COSTS, STATES, Contract, Limit, tasks
from replayscope.inspector.judge_matrix import CONTROL, Group, Run, groups, neighbours
from replayscope.inspector.names import nearest, short

KEYS = ("task", "length", "suffix", "output", "arm", "semantics", "cut")
ENGINE = "engine"
_SHOWN = 12  # of what the matrix has; lengths may be thousands


@dataclass(frozen=True)
class Name:
    """A cell's name in parts, as limits select it."""

    task: str
    length: str
    suffix: str
    output: str
    concurrency: str
    arm: str
    semantics: str
    cut: str

    @classmethod
    def of(cls, group: str, run: str) -> "Name":
        task, length, suffix, output, concurrency = group.split("/")
        arm, semantics, cut = run.split("/")
        strip = (length.removeprefix("n"), suffix.removeprefix("suffix-"), output.removeprefix("out-"))
        return cls(task, *strip, concurrency.removeprefix("x"), arm, semantics, cut)

    def fits(self, limit: Limit, key: str) -> bool:
        """Whether one of KEYS is as a limit has it."""
        mine, glob = getattr(self, key), getattr(limit, key)
        return fnmatchcase(mine, glob) or (key == "task" and mine.split(".")[0] == glob)

    def matches(self, limit: Limit) -> bool:
        return all(self.fits(limit, key) for key in KEYS)


def check(contract: Contract, source: str, semantics: str | None = None) -> None:
    """Raises UsageError for a limit, a budget or a critical task that no cell of the matrix can be held to.

    source: what the contract is called in the message. semantics: of a running engine, whose cells are those of the
    matrix under the arm ``engine``.
    """
    found = groups(contract)
    have = {group.task for group in found}
    for what, task in [("budgets", one) for one in contract.budgets] + [("critical", one) for one in contract.critical]:
        if not have.intersection(tasks(task, source, contract.own)):
            raise _none(f"{source} {what}", "task", task, sorted(have))
    names = list(_names(found))
    if semantics is not None:
        names += [(replace(name, arm=ENGINE, semantics=semantics), beside) for name, beside in names]
    for i, limit in enumerate(contract.limits, 1):
        _check(limit, f"{source} [[limit]] {i}, {limit.text}", names)


def check_layers(contract: Contract, source: str, model: str, config: Geometry) -> None:
    """Raises UsageError for a limit on layers that the model does not have."""
    for i, limit in enumerate(contract.limits, 1):
        if limit.metric in STATES:
            layers = [str(layer) for layer in config.layers if config.has(limit.metric, layer)]
            if not any(fnmatchcase(layer, limit.layer) for layer in layers):
                there = f"in layers {_listed(layers)}" if layers else "in no layer"
                raise UsageError(f"{source} [[limit]] {i}, {limit.text}: {model} has {limit.metric} {there}")


def _names(found: Iterable[Group]) -> Iterator[tuple[Name, bool]]:
    """Every cell, and whether a cell at a neighbouring cut stands beside it."""
    for group in found:
        runs: set[Run] = set(group.runs)
        for run in group.runs:
            yield Name.of(group.label, run.label), not runs.isdisjoint(neighbours(run))


def _check(limit: Limit, where: str, names: list[tuple[Name, bool]]) -> None:
    # Controls run by themselves; a limit that selects nothing else is meant for them only if it says so.
    judged = [(name, beside) for name, beside in names if (name.arm == CONTROL) == (limit.arm == CONTROL)]
    if limit.metric in COSTS:
        if extra := [key for key in KEYS if key != "arm" and getattr(limit, key) != "*"]:
            raise UsageError(f"{where}: {limit.metric} is of an arm over all its cells; leave {extra[0]} out")
        if limit.arm == CONTROL:
            raise UsageError(f"{where}: {limit.metric} is not judged of the control; name another arm")
    for key in KEYS:
        if not any(name.fits(limit, key) for name, _ in judged):
            there = dict.fromkeys(getattr(name, key) for name, _ in judged)
            raise _none(where, key, getattr(limit, key), list(there))
    chosen = [(name, beside) for name, beside in judged if name.matches(limit)]
    if not chosen:
        raise UsageError(f"{where}: each of these is in the matrix, but no cell has all; judge plan --json lists them")
    if limit.metric == "jump" and not any(beside for _, beside in chosen):
        raise UsageError(f"{where}: a jump is against the cuts beside; give its cells neighbours = 1 in [[matrix]]")
    if limit.metric == "window_kv" and all(name.cut in ("none", "start") for name, _ in chosen):
        cuts = ", ".join(dict.fromkeys(name.cut for name, _ in chosen))
        raise UsageError(f"{where}: before the cut {cuts} there is no window; name cells with another cut")


def _none(where: str, key: str, asked: str, there: list[str]) -> UsageError:
    """The error for what no cell has: the nearest that one has, and what there is."""
    near = nearest(asked, [*there, *{name.split(".")[0]: None for name in there}])
    guess = f"did you mean {near!r}? " if near else ""
    return UsageError(f"{where}: no cell of the matrix has {key} {short(asked)!r}; {guess}there are: {_listed(there)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
