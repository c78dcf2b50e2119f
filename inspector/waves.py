"""A line-up cut into waves of at most so many rows: what is in memory at once."""

from dataclasses import dataclass

from replayscope.inspector.errors import UsageError
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.lineup import Lineup
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import NOISE

# By default a wave holds so many times the prompt: running full again for each costs at most a fifteenth.
PROMPTS = 16
# Of an oracle's dense pass against a row of the executor (measured on the embedded model).
ORACLE_COST = 2


@dataclass(frozen=True)
class Wave:
    """Requests and oracle passes that go through the layers together.

    of: request of the plan → the runs that it is; none for one that only serves the others, as full does in every wave
    but the first. oracles: places in the line-up's oracle_runs; fresh: those that no earlier wave has run.
    """

    plan: Plan
    of: tuple[tuple[int, ...], ...]
    oracles: tuple[int, ...]
    fresh: frozenset[int]

    def work(self, line: Lineup, layer: int) -> int:
        """What a layer costs, in rows of the executor."""
        rows = sum(r.stop - r.first_row[layer] for r in self.plan.requests)
        return rows + ORACLE_COST * sum(line.oracle_runs[k][2].stop for k in self.oracles)

    def total(self, line: Lineup, config: Geometry) -> int:
        """What the wave costs, in rows times layers."""
        return sum(self.work(line, l) for l in config.layers)


def waves(line: Lineup, tokens: int, budget: int | None = None) -> list[Wave]:
    """The line-up in waves of at most ``budget`` rows, those of oracle passes included; PROMPTS · tokens by default.

    Every wave runs full, and the oracle of full where there are oracles: the others are compared with them and read
    their entries. Nothing else runs twice, and nothing is kept from one wave to the next. Noise runs come first, so
    that what a margin's floor is known from has been seen. Raises UsageError for a budget that one cut does not fit in.
    """
    requests = line.plan.requests
    oracle_at = {run: k for k, (run, _, _) in enumerate(line.oracle_runs)}
    size = [r.stop - r.start for r in requests]
    dense = [r.stop for _, _, r in line.oracle_runs]
    owners = {i: _owners(line.plan, i) for i in range(len(requests))}
    judges = {i: oracle_at.get(line.runs[own[0]].oracle or -1, 0) for i, own in enumerate(line.runs_of) if own}

    def rows(some: set[int], passes: set[int]) -> int:
        return sum(size[i] for i in some) + sum(dense[k] for k in passes)

    first_pass = {0} if line.oracle_runs else set[int]()
    items = [({i, *owners[i]}, first_pass | ({judges[i]} if line.oracle_runs else set())) for i in judges if i]
    items.sort(key=lambda item: requests[max(item[0])].arm not in NOISE)
    judging = {k for _, passes in items for k in passes}
    items += [({0}, {0, k}) for k in range(1, len(dense)) if k not in judging]
    least = max((rows(*item) for item in items), default=0)
    limit = max(PROMPTS * tokens, least) if budget is None else budget
    if limit < least:
        raise UsageError(f"--budget {budget} is too small: full and the longest run beside it take {least} rows")
    packed: list[tuple[set[int], set[int]]] = [({0}, first_pass)]
    for some, passes in items:
        if rows(packed[-1][0] | some, packed[-1][1] | passes) > limit:
            packed.append(({0}, first_pass))
        packed[-1] = packed[-1][0] | some, packed[-1][1] | passes
    return _waves(line, packed)


def _owners(plan: Plan, i: int) -> set[int]:
    """The requests that one reads from, and those that they read from."""
    needed = {plan.owner(name) for name in (plan.requests[i].prefix, plan.requests[i].window_owner)} - {-1}
    return needed.union(*(_owners(plan, k) for k in needed))


def _waves(line: Lineup, packed: list[tuple[set[int], set[int]]]) -> list[Wave]:
    out, ran, judged = [], set[int](), set[int]()
    for some, passes in packed:
        order = sorted(some)
        plan = Plan(tuple(line.plan.requests[i] for i in order))
        of = tuple(() if i in ran else line.runs_of[i] for i in order)
        out.append(Wave(plan, of, tuple(sorted(passes)), frozenset(passes - judged)))
        ran |= some
        judged |= passes
    return out
