"""Tasks with one known answer, and where their facts lie relative to a cut. No torch.

A task is a few facts, a question and its answer; text of no importance fills the space between. `make` lays one out
around a cut for measuring, `pieces` scatters one over a training sequence. All are plain text, so that any model can be
asked; the answers are short enough to be scored exactly.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

NOUNS = (
    "apple bridge candle desert engine forest garden harbor island jacket kettle ladder marble needle orange pencil "
    "quartz ribbon saddle temple umbra velvet window yellow zephyr anchor basket copper dragon falcon"
).split()
COLOURS = "red blue green black white brown pink gray".split()
PLACES = ("straddle", "touch", "before", "after")
# What comes between the cut and the question: nothing, a user's turn, what a tool returned.
SUFFIXES = {"none": 0, "short": 48, "long": 400}
STATES = 5  # the chain counts modulo this
REACH = 160  # characters over which a relay is asked for: five windows of `mini`


@dataclass(frozen=True)
class Fact:
    """A line of a task: ``text`` with what cannot be predicted at [start, stop)."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Material:
    """Facts in order, the question (it ends where the answer begins), the answer, and what it ends on.

    The facts from ``key`` on are those that a cut is placed at; ``near`` says that they lie close to each other.
    ``reach``: how many characters behind the last fact the question may be asked, where there is a limit.
    """

    facts: tuple[Fact, ...]
    ask: str
    answer: str
    end: str = ";\n"
    key: int = 0
    near: bool = False
    reach: int | None = None


@dataclass(frozen=True)
class Sample:
    """A prompt that ends where ``answer`` begins; ``cut``: the character at which the cached prefix ends."""

    task: str
    prompt: str
    answer: str
    cut: int
    seed: int
    place: str
    suffix: str


@dataclass(frozen=True)
class Score:
    """``exact``: the produced text begins with the answer. ``share``: share of the answer's fields that are right."""

    exact: bool
    share: float


@dataclass(frozen=True)
class Task:
    """``chance``: the share of exact answers of a guesser that knows the form, and picks every value at random.

    ``most``: how many may stand in one text, where their nouns must differ for the question to have one answer.
    """

    says: str
    chance: float
    build: Callable[[random.Random, int], Material]
    most: int | None = None


def _fact(before: str, payload: str, after: str) -> Fact:
    return Fact(before + payload + after, len(before), len(before) + len(payload))


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _passkey(rng: random.Random, level: int) -> Material:
    key = _digits(rng, 4)
    return Material((_fact("\npasskey = ", key, ";\n"),), "\npasskey? ", key)


def _hops(rng: random.Random, level: int) -> Material:
    """Names that lead to names, and the last of them to a number; ``level`` links, and as many that lead elsewhere."""
    length = min(level, 2)
    names = rng.sample(NOUNS, 2 * length)
    values = _digits(rng, 2), _digits(rng, 2)
    facts = []
    for own, value in ((names[:length], values[0]), (names[length:], values[1])):
        facts += [_fact("\n", f"{a} -> {b}", ";\n") for a, b in itertools.pairwise(own)]
        facts.append(_fact("\n", f"{own[-1]} = {value}", ";\n"))
    rng.shuffle(facts)
    return Material(tuple(facts), f"\n{names[0]} => ", values[0], key=len(facts) - 1)


def _chain(rng: random.Random, level: int) -> Material:
    """A number that is set, then changed without being said again."""
    state = rng.randrange(STATES)
    facts = [_fact("\nset ", str(state), ";\n")]
    for _ in range(rng.randint(1, level)):
        change = rng.randrange(1, STATES)
        state = (state + change) % STATES
        facts.append(_fact("\nadd ", str(change), ";\n"))
    return Material(tuple(facts), "\nsum? ", str(state), near=True)


def _mode(rng: random.Random, level: int) -> Material:
    """The same thing said again and again with other values: only the last one counts."""
    colours = rng.sample(COLOURS, rng.randint(1, min(2 * level, 6)))
    facts = tuple(_fact("\nmode = ", c, ";\n") for c in colours)
    return Material(facts, "\nmode? ", colours[-1], key=len(facts) - 1)


def _extract(rng: random.Random, level: int) -> Material:
    names = rng.sample(NOUNS, rng.randint(1, level + 1))
    said = [(n, rng.randint(1, 9), rng.choice(COLOURS)) for n in names]
    facts = tuple(_fact("\nitem ", f"{n}: {count} {colour}", ";\n") for n, count, colour in said)
    name, count, colour = rng.choice(said)
    return Material(facts, f"\njson {name}: ", f'{{"count": {count}, "colour": "{colour}"}}', "\n", key=len(facts) - 1)


def _edit(rng: random.Random, level: int) -> Material:
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", 2 + (level > 1))
    lines = {n: rng.randint(0, 9) for n in names}
    changed, value = rng.choice(names), rng.randint(0, 9)
    listing = "".join(f"{n} = {v}\n" for n, v in lines.items())
    after = "".join(f"{n} = {v}\n" for n, v in (lines | {changed: value}).items())
    return Material(
        (_fact("\nlisting\n", listing, "end\n"), _fact("\nedit ", f"{changed} = {value}", ";\n")),
        "\nedited\n",
        after + "end",
        "\n",
        key=1,
    )


def _tools(rng: random.Random, level: int) -> Material:
    """A plan of calls, some of them made, each given what the one before returned: which is next?"""
    plan = rng.sample(NOUNS, level + 1)
    done = rng.randint(1, level)
    passed, facts = "0", [_fact("\nplan ", ", ".join(plan), ";\n")]
    for name in plan[:done]:
        result = _digits(rng, 2)
        facts.append(_fact("\ncall ", f"{name}({passed}) -> {result}", ";\n"))
        passed = result
    return Material(tuple(facts), "\ncall ", f"{plan[done]}({passed})", key=len(facts) - 1)


def _relay(rng: random.Random, level: int) -> Material:
    """A number that is asked for within a few windows: near enough to be carried by them, without being looked up."""
    facts = tuple(_fact("\nlane ", d, ";\n") for d in rng.sample("0123456789", rng.randint(1, level)))
    return Material(facts, "\nlane? ", facts[-1].text[-3], key=len(facts) - 1, reach=REACH)


TASKS = {
    "passkey": Task("four digits said once, asked for later", 1e-4, _passkey),
    "hops": Task("a name that leads to a name that leads to a number", 0.01, _hops, most=5),
    "chain": Task(f"a number modulo {STATES}, set and changed step by step across the cut", 1 / STATES, _chain),
    "mode": Task("a setting said many times; only the last counts", 1 / len(COLOURS), _mode),
    "extract": Task("one record of several, as JSON", 1 / (9 * len(COLOURS)), _extract, most=5),
    "edit": Task("a listing with one line changed", 1e-3, _edit),
    "tools": Task("the next call of a plan, given the last result", 1e-2 / len(NOUNS), _tools),
    "relay": Task("a number asked for within five windows of where it was set", 0.1, _relay),
}
HARDEST = 3
"""The largest level that is trained: steps of a chain, calls of a plan, and how many settings and records there are."""
USUAL = 2


def make(
    task: str,
    seed: int,
    length: int,
    place: str = "before",
    suffix: str = "none",
    filler: str = "",
    gap: int | None = None,
    level: int = USUAL,
) -> Sample:
    """A prompt of ``length`` characters (the answer not included) with the task's key facts at the cut.

    place: the cut lies in the middle of the key facts (``straddle``), just behind them (``touch``), ``gap`` characters
    behind them (``before``; drawn from the seed, log-uniform up to half the length, unless given) or just in front of
    them (``after``). suffix: characters of filler between the cut, or the facts behind it, and the question, at most
    half of what the task reaches over. The filler is cut from ``filler`` at a place that the seed chooses, repeated
    where it is too short.

    Raises ValueError for an unknown task, place or suffix, and where the task does not fit into the length.
    """
    for kind, value, known in (("task", task, TASKS), ("place", place, PLACES), ("suffix", suffix, SUFFIXES)):
        if value not in known:
            raise ValueError(f"unknown {kind} {value!r}; there are {', '.join(known)}")
    rng = random.Random(f"{task}/{seed}")
    material = TASKS[task].build(rng, level)
    text = _Filler(filler or " . ", rng)
    early, keys = material.facts[: material.key], material.facts[material.key :]
    between = 12
    key, start = "", 0
    for i, fact in enumerate(keys):
        start = len(key) + fact.start if i == 0 else start
        key += fact.text + (text.take(between) if i + 1 < len(keys) else "")
    stop = len(key) - (len(keys[-1].text) - keys[-1].stop)
    later = SUFFIXES[suffix] if material.reach is None else min(SUFFIXES[suffix], material.reach // 2)
    tail = text.take(later) + material.ask
    room = length - len(key) - len(tail) - sum(len(f.text) for f in early)
    if place != "before":
        gap = 0
    elif gap is None:
        far = min(room, length / 2, (material.reach or length) - later)
        gap = round(8 * max(1.0, far / 8) ** rng.random())
    if room < gap:
        raise ValueError(
            f"{task} with a {suffix} suffix does not fit into {length} characters; give {length - room + gap}"
        )
    head = ""
    for i, fact in enumerate(early):
        # The earlier facts lie evenly from the start to just before the key.
        head += text.take((room - gap) * (i + 1) // (len(early) + 1) - (room - gap) * i // (len(early) + 1)) + fact.text
    head += text.take(room - gap - (room - gap) * len(early) // (len(early) + 1) if early else room - gap)
    behind = text.take(gap)
    at = {"straddle": (start + stop) // 2, "touch": len(key), "before": len(key) + gap, "after": 0}[place]
    prompt = head + key + behind + tail
    assert len(prompt) == length
    return Sample(task, prompt, material.answer, len(head) + at, seed, place, suffix)


def score(sample: Sample, produced: str) -> Score:
    """Whether ``produced`` begins with the answer, and the share of its fields (split at what is not a letter or digit)
    that stand at their place."""
    want, got = _fields(sample.answer), _fields(produced)
    right = sum(a == b for a, b in zip(want, got, strict=False))
    return Score(produced.startswith(sample.answer), right / len(want))


def _fields(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text).split()


class _Filler:
    """Text without end: ``text`` from a place of the rng's choosing, then from its start again and again."""

    def __init__(self, text: str, rng: random.Random) -> None:
        self.text, self.at = text, rng.randrange(len(text))

    def take(self, count: int) -> str:
        out = ""
        while len(out) < count:
            out += self.text[self.at : self.at + count - len(out)]
            self.at = (self.at + count) % len(self.text) if self.at + count < len(self.text) else 0
        return out


@dataclass(frozen=True)
class Piece:
    """A run of text with what cannot be predicted, or the answer, at [start, stop)."""

    text: str
    start: int
    stop: int
    task: str | None  # of the answer; None where the span is unpredictable


def size(material: Material) -> int:
    """Characters of everything that the task writes, the answer included."""
    return len(material.ask + material.answer + material.end) + sum(len(f.text) for f in material.facts)


def _built(rng: random.Random, task: Task, level: int, count: int) -> list[Material]:
    made: list[Material] = []
    used: set[str] = set()
    while len(made) < count:
        material = task.build(rng, rng.randint(1, level))
        nouns = {n for n in NOUNS for f in material.facts if n in f.text} if task.most else set()
        if not nouns & used:
            made.append(material)
            used |= nouns
    return made


def pieces(
    rng: random.Random,
    length: int,
    levels: dict[str, int],
    again: dict[str, int],
    far: float = 0.0,
    reach: int | None = None,
) -> list[tuple[int, Piece]]:
    """Tasks scattered over a text that they make ``length`` characters long, as (place, piece).

    Places are those in the text before anything is inserted, in order. Distances between the last fact and the question
    are log-uniform: near ones teach the task, far ones make it global. They are uniform for a share ``far`` of the
    questions, and where there is a limit: that of the task, or ``reach``. ``again``: the tasks, and how often each
    comes, one after another; a new one makes the old one void. ``levels``: how hard each may get. The facts of a chain
    lie near each other.
    """
    built = [(name, _built(rng, TASKS[name], levels[name], count)) for name, count in again.items()]
    text = max(8, length - sum(size(m) for _, all_ in built for m in all_))
    placed: list[tuple[int, Piece]] = []
    for name, materials in built:
        room = text // len(materials)
        for turn, m in enumerate(materials):
            most = min(room, m.reach or room, reach or room)
            even = most < room or rng.random() < far
            distance = int(most * rng.random()) if even else min(room, int(4 * max(1.0, most / 4) ** rng.random()))
            spread = min(room - distance, int(rng.random() * (24 * len(m.facts) if m.near else room)))
            at = turn * room + rng.randint(0, max(0, room - distance - spread))
            offsets = [0, *sorted(rng.randint(0, max(0, spread)) for _ in m.facts[1:])]
            for offset, fact in zip(offsets, m.facts, strict=True):
                placed.append((at + offset, Piece(fact.text, fact.start, fact.stop, None)))
            # The mark behind the answer is part of it: where it ends has to be known too.
            stop = len(m.ask + m.answer) + 1
            placed.append((at + offsets[-1] + distance, Piece(m.ask + m.answer + m.end, len(m.ask), stop, name)))
    # Stable, so that facts at one place keep their order.
    return sorted(placed, key=lambda item: item[0])
