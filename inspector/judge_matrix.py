"""The acceptance matrix: which prompts run, and which cells they fill. Integers and text, no torch, no model.

A group is a set of prompts of one kind; every prompt of it goes through the cold prefill, through a hit with its window
kept, and through each arm at each cut, side by side. A cell is one arm at one cut over the prompts of a group.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from replayscope.inspector.engines import granularity
from replayscope.inspector.errors import UsageError
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.judge_contract import Block, Contract, Evidence, tasks
from replayscope.inspector.judge_tokens import Text, shared
from replayscope.inspector.plan import Request
from replayscope.inspector.semantics import Shape, has_cut, request
from replayscope.model.tasks import Sample, make

LONG, TURNS = 40, 3
OWN = "own"
CONTROL = "hit"


@dataclass(frozen=True)
class Run:
    """One arm at one cut. cut: name with its offset in units of the semantics' block ('task+1'), None without one."""

    arm: str
    semantics: str
    cut: str | None

    @property
    def label(self) -> str:
        return f"{self.arm}/{self.semantics}/{self.cut or 'none'}"


@dataclass(frozen=True)
class Group:
    """Prompts of one kind, and the runs that each goes through after ``full``.

    length: None where the prompts come from a ``file``; own: these, by line number, in order.
    """

    task: str
    length: int | None
    suffix: str
    output: str
    concurrency: int
    runs: tuple[Run, ...] = ()
    own: Mapping[int, Sample] = field(default_factory=dict, compare=False, repr=False)
    file: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        length = OWN if self.length is None else f"n{self.length}"
        return f"{self.task}/{length}/suffix-{self.suffix}/out-{self.output}/x{self.concurrency}"

    def seeds(self, e: Evidence) -> Sequence[int]:
        """Of its prompts: of a file as many as there are, at most those that are asked for."""
        return range(e.seed, e.seed + e.samples) if self.length is not None else list(self.own)[: e.samples]

    def kinds(self, e: Evidence) -> Sequence[int]:
        """Seeds of the prompts that have to be looked at to know all: the first, whose form the others have; of a file
        each, since none is like another."""
        return self.seeds(e)[:1] if self.length is not None else self.seeds(e)

    def named(self, seed: int) -> str:
        """A prompt in a message."""
        return self.label if self.length is not None else f"{self.file}:{seed}"

    def cell(self, run: Run) -> str:
        """The name of a cell, which --cells takes."""
        return f"{self.label}/{run.label}"


@dataclass(frozen=True)
class Prompt:
    """A sample as the model sees it. cut: tokens of the prefix that the task wants cached. turn: what every later turn
    of a conversation adds, the answer of the turn before not included."""

    sample: Sample
    ids: tuple[int, ...]
    answer: tuple[int, ...]
    cut: int
    turn: tuple[int, ...]


def groups(contract: Contract, cells: str = "*", without: Collection[str] = ()) -> list[Group]:
    """Every group of the contract once, with those runs whose cell a glob names, their controls and neighbours.

    without: arms that the model does not have.
    """
    found: dict[Group, dict[Run, None]] = {}
    for block in contract.matrix:
        for group in _products(block, contract):
            runs = found.setdefault(group, {})
            for semantics in block.semantics:
                for arm in (arm for arm in block.arms if arm not in without):
                    cuts = list(_cuts(block)) if has_cut(arm) else [None]
                    runs |= dict.fromkeys(Run(arm, semantics, cut) for cut in cuts)
    out = []
    for group, asked in found.items():
        wanted = [run for run in asked if named(group, run, cells)]
        chosen = set(wanted)
        around = {one for run in wanted for one in neighbours(run)}
        # A jump is judged against the cuts on both sides, which have to run for it.
        beside = [run for run in asked if run in around and run not in chosen]
        wanted += beside
        # One control for each base cut: it is the measure of the noise, which a token more or less does not change.
        cuts = [run.cut for run in wanted if run.cut is not None and parse_cut(run.cut)[1] == 0]
        controls = dict.fromkeys(Run(CONTROL, "paper", cut) for cut in cuts)
        if wanted:
            out.append(replace(group, runs=(*controls, *wanted)))
    if not out:
        raise UsageError(f"no cell is called {cells!r}; replayscope judge plan --json lists them")
    return out


def engine_groups(contract: Contract, cells: str, semantics: str) -> list[Group]:
    """The groups as a running engine can be asked: one arm, ``engine``, at each cut that needs no window's length, one
    request at a time, without later turns."""
    out: dict[Group, dict[Run, None]] = {}
    for group in groups(contract):
        some = [run.cut for run in group.runs if run.arm != CONTROL and run.cut is not None]
        cuts = [cut for cut in some if parse_cut(cut)[0] != "window"]
        asked = replace(group, concurrency=1, runs=())
        runs = [Run("engine", semantics, cut) for cut in cuts if cut != "start"]
        wanted = dict.fromkeys(run for run in runs if named(asked, run, cells))
        if wanted and group.output != "turns":
            out.setdefault(asked, {}).update(wanted)
    if not out:
        raise UsageError(f"no cell that an engine can be asked is called {cells!r}")
    return [replace(group, runs=tuple(runs)) for group, runs in out.items()]


def character_cut(run: Run, sample: Sample) -> int:
    """The cut in characters, for an engine whose tokens are not known; an offset moves it by as many."""
    name, offset = parse_cut(run.cut or "task")
    last = len(sample.prompt) - 1
    at = {"start": 0, "middle": len(sample.prompt) // 2, "task": sample.cut, "end": last}[name]
    return min(at + offset, last)


def named(group: Group, run: Run, glob: str) -> bool:
    """Whether a glob names a cell."""
    return fnmatchcase(group.cell(run), glob)


def neighbours(run: Run) -> list[Run]:
    """The same arm at the cuts on both sides."""
    if run.cut is None:
        return []
    name, offset = parse_cut(run.cut)
    return [replace(run, cut=cut_name(name, offset + step)) for step in (-1, 1)]


def parse_cut(cut: str) -> tuple[str, int]:
    """'task-1' as ('task', -1)."""
    for sign in "+-":
        name, found, number = cut.partition(sign)
        if found:
            return name, int(sign + number)
    return cut, 0


def cut_name(name: str, offset: int) -> str:
    return f"{name}{offset:+d}" if offset else name


def _cuts(block: Block) -> Iterator[str]:
    for name in block.cuts:
        for offset in range(-block.neighbours, block.neighbours + 1):
            outside = (name == "start" and offset < 0) or (name == "end" and offset > 0)
            if not outside:
                yield cut_name(name, offset)


def _products(block: Block, contract: Contract) -> Iterator[Group]:
    if block.task_file:
        for task, own in contract.files[block.task_file].tasks.items():
            for output in block.outputs:
                for concurrency in block.concurrency:
                    yield Group(task, None, OWN, output, concurrency, own=own, file=block.task_file)
        return
    for task in dict.fromkeys(label for glob in block.tasks for label in tasks(glob, "[[matrix]]")):
        for length in block.lengths:
            for suffix in block.suffixes:
                for output in block.outputs:
                    for concurrency in block.concurrency:
                        yield Group(task, length, suffix, output, concurrency)


def sample_of(group: Group, seed: int, filler: str) -> Sample:
    """Raises UsageError where the task does not fit into the length."""
    if group.length is None:
        return group.own[seed]
    task, place = group.task.split(".")
    try:
        return make(task, seed, group.length, place, group.suffix, filler)
    except ValueError as error:
        raise UsageError(f"{group.label}: {error}") from None


def prompt(group: Group, seed: int, text: Text) -> Prompt:
    """The sample of a group and seed. Raises UsageError where the task does not fit into the length."""
    sample = sample_of(group, seed, text.filler)
    asked, left = text.asked(sample.prompt)
    ids = text.encode(asked)
    # A task's cut is a character: what a cache of the text before it would find of the prompt is whole tokens.
    cut = shared(text.encode(sample.prompt[: sample.cut]), ids)
    # A later turn asks again: what lies behind the cut is said once more.
    return Prompt(
        sample,
        tuple(ids),
        tuple(text.inside(left + sample.answer)),
        min(cut, len(ids) - 1),
        tuple(text.inside(";\n" + asked[sample.cut :])),
    )


def cut_of(run: Run, one: Prompt, window: int, block: int | None = None) -> int | None:
    """The cut in tokens, snapped down to what the semantics admits; None where it would lie outside the prompt."""
    assert run.cut is not None
    name, offset = parse_cut(run.cut)
    last = len(one.ids) - 1
    at = {"start": 0, "window": window, "middle": len(one.ids) // 2, "task": one.cut, "end": last}[name]
    unit = granularity(run.semantics, block)
    cut = at // unit * unit + offset * unit
    return cut if 0 <= cut <= last else None


def steps(group: Group, prompts: Sequence[Prompt]) -> int:
    """Tokens that are produced per turn by prompts that run together; of a short output each counts its own part."""
    return LONG if group.output == "long" else max(len(one.answer) for one in prompts) + 1


def turns(group: Group) -> int:
    return TURNS if group.output == "turns" else 1


def total(group: Group, one: Prompt, room: int) -> int:
    """Tokens at the end of the last turn: prompts, answers, and the ``room`` for what is produced last."""
    return len(one.ids) + (turns(group) - 1) * (len(one.answer) + len(one.turn)) + room


def requests(config: Geometry, group: Group, one: Prompt, name: str, room: int) -> list[tuple[Run | None, Request]]:
    """``full`` (run None) and every run that the prompt admits, called after the prompt's ``name``, with room for all
    that is produced. Many prompts can share a plan, since each names its own tokens, prefix and window owner."""
    N = total(group, one, room)
    shape = Shape(config, N, forced=N - len(one.ids))
    out: list[tuple[Run | None, Request]] = [(None, _called(request(shape, "full"), name))]
    made = {out[0][1].name}
    for run in group.runs:
        cut = None
        if run.cut is not None:
            cut = cut_of(run, one, config.sliding_window)
            if cut is None:
                continue
        # Two names may mean one cut, as window and middle do in a short prompt: each is a cell, and runs.
        made_one = replace(request(shape, run.arm, cut, semantics=run.semantics), arm=run.label)
        made_one = _called(made_one, name)
        if made_one.name not in made:
            made.add(made_one.name)
            out.append((run, made_one))
    return out


def next_turn(config: Geometry, first: Request, run: Run | None, end: int, prompt_end: int) -> tuple[Request, int]:
    """The rules of a later turn over the cache that the turns before left, and the row from which it runs.

    first: the request of the first turn, whose slots it keeps. end: tokens so far, all of them cached; prompt_end: with
    the new ones. ``full`` and the control go on where they stand, which is what a cold prefill would compute.
    """
    if run is None or run.arm == CONTROL:
        return replace(first, prompt_end=prompt_end), end
    shape = Shape(config, first.stop, forced=first.stop - prompt_end)
    unit = granularity(run.semantics)
    like = request(shape, run.arm, end // unit * unit if has_cut(run.arm) else None, semantics=run.semantics)
    if has_cut(run.arm):
        at, entries = like.start, like.first_entry
    else:
        # All but the tail is as the turn before left it: a cold prefill would write the same again.
        at, entries = min(end, max(like.first_row)), tuple(end // r if r else 0 for r in config.compress_ratios)
    if at < first.start:
        raise ValueError(f"{first.name}: a later turn starts at row {at}, below the first row that it keeps")

    def since(rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(row, first.start) for row in rows)

    return replace(
        first,
        prompt_end=prompt_end,
        floor=like.floor,
        floor_steps=like.floor_steps,
        first_row=since(like.first_row),
        first_window=since(like.first_window),
        first_entry=entries,
    ), at


def _called(r: Request, name: str) -> Request:
    """The request under a prompt's name, packed with all others."""
    return replace(
        r,
        arm=f"{name}:{r.arm}",
        tokens=name,
        prefix=r.prefix and f"{name}:{r.prefix}",
        window_owner=r.window_owner and f"{name}:{r.window_owner}",
        chunk=None,
    )


def rows(config: Geometry, group: Group, one: Prompt) -> int:
    """About as many rows as a prompt of the group costs: its prefills, and what its requests produce."""
    produced = steps(group, [one])
    made = [r for _, r in requests(config, group, one, "p", produced)]
    later = (turns(group) - 1) * len(made) * (config.sliding_window + len(one.turn) + len(one.answer))
    return sum(r.prompt_end - r.start for r in made) + 2 * turns(group) * len(made) * produced + later
