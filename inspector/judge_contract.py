"""The release contract: what replay must keep, written in TOML before anything runs. No torch.

A contract is known by the SHA-256 of what it says: comments, order and layout may change, and the stamp that `freeze`
adds is not part of it.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from replayscope.inspector.engines import ENGINES
from replayscope.inspector.errors import UsageError
from replayscope.inspector.features import FEATURES, feature
from replayscope.inspector.judge_files import beside, task_files
from replayscope.inspector.judge_stats import pairs_needed, statistic
from replayscope.inspector.judge_tables import filled, table, tables, texts, typed
from replayscope.inspector.names import choose, short
from replayscope.inspector.task_files import TaskFile
from replayscope.model.tasks import PLACES, SUFFIXES, TASKS

DEFAULT = "default"
# Far above what a day can run; a slip of the keyboard is refused before it fills the memory.
MOST_CELLS, MOST_PROMPTS = 20_000, 10_000_000
ARMS = ("encoder", "decoder", "both", "exact")
CUTS = {
    "start": "nothing is cached",
    "window": "one window is cached",
    "middle": "half of the prompt is cached",
    "task": "where the task wants it: before, between or behind its facts",
    "end": "all but the last token is cached",
}
OUTPUTS = {
    "short": "the answer and one token more",
    "long": "40 tokens",
    "turns": "three turns, each over the cache as the turns before left it",
}
METRICS = {
    "share": "share of the answer's fields that are right, reference minus arm",
    "kl": "nats per output token, KL(full‖arm) with full's own tokens forced, mean over the output",
    "kl_max": "the same, largest step of the output",
    "kl_free": "nats per output token, each arm on its own tokens",
    "disagreement": "share of output steps whose greedy token differs",
    "sampled": "the same when sampling with shared random numbers",
    "jump": "kl minus its mean at the two cuts next to this one, on the same prompt",
    "window_kv": "relative L2 of the window KV, by layer, region window",
    "hidden": "relative L2 of the hidden states, by layer, region suffix or last",
    "ttft": "time to first token, arm over full",
    "total": "time to the last token, arm over full",
    "cost": "time per successful task, arm over full",
}
STATES = {"window_kv": ("window",), "hidden": ("suffix", "last")}
COSTS = ("ttft", "total", "cost")


@dataclass(frozen=True)
class Evidence:
    """confidence: of every interval. budget: largest drop of the success rate. samples: prompts per cell. reference:
    least success of full that makes a cell able to show a drop. temperature: of the sampled outputs. seed: of the
    first prompt, and of the resamples."""

    confidence: float = 0.95
    budget: float = 0.05
    samples: int = 60
    reference: float = 0.5
    resamples: int = 2000
    temperature: float = 0.7
    seed: int = 1000


@dataclass(frozen=True)
class Limit:
    """One number that may not be exceeded, in every cell that the globs name. layer: 'all' or one layer's number."""

    metric: str
    at_most: float
    statistic: str = "mean"
    task: str = "*"
    length: str = "*"
    suffix: str = "*"
    output: str = "*"
    arm: str = "*"
    semantics: str = "*"
    cut: str = "*"
    region: str = "*"
    layer: str = "*"

    @property
    def text(self) -> str:
        named = {f.name: getattr(self, f.name) for f in fields(self)[3:]}
        where = ", ".join(f"{key} {short(value)}" for key, value in named.items() if value != "*")
        return f"{self.statistic} {self.metric} ≤ {self.at_most:g}" + (f" ({where})" if where else "")


@dataclass(frozen=True)
class Block:
    """Cells as the product of its lists. tasks: 'passkey.straddle' or globs. neighbours: cuts this far to each side.

    task_file: a file of own tasks instead, whose prompts have their lengths and suffixes.
    """

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    cuts: tuple[str, ...] = ("task",)
    neighbours: int = 1
    suffixes: tuple[str, ...] = ("short",)
    outputs: tuple[str, ...] = ("short",)
    concurrency: tuple[int, ...] = (8,)
    arms: tuple[str, ...] = ("encoder", "decoder", "both")
    semantics: tuple[str, ...] = ("paper",)
    task_file: str = ""


@dataclass(frozen=True)
class Contract:
    """A contract as read; sha256 is that of what it says, its task files included, frozen its stamp.

    files: task files by the names that the contract gives them.
    """

    name: str
    evidence: Evidence
    budgets: Mapping[str, float]
    needs: tuple[str, ...]
    critical: tuple[str, ...]
    limits: tuple[Limit, ...]
    matrix: tuple[Block, ...]
    sha256: str
    text: str = field(repr=False)
    frozen: Mapping[str, str] | None = None
    files: Mapping[str, TaskFile] = field(default_factory=dict, repr=False)

    def budget(self, task: str) -> float:
        """Of a task, by its name without the place."""
        return self.budgets.get(task.split(".")[0], self.evidence.budget)

    def needed(self, task: str) -> int:
        """Pairs that a cell needs where nothing differs."""
        return pairs_needed(self.budget(task), self.evidence.confidence)

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the tasks that come from files."""
        return tuple(task for file in self.files.values() for task in file.tasks)

    @property
    def semantics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for block in self.matrix for name in block.semantics))

    @property
    def stamp(self) -> str:
        """In words, whether it was frozen."""
        frozen = "not frozen" if self.frozen is None else f"frozen on {self.frozen['date']}"
        return f"contract {short(self.name)} ({self.sha256[:12]}), {frozen}"


def shipped() -> str:
    return files("replayscope.inspector").joinpath(f"contracts/{DEFAULT}.toml").read_text(encoding="utf-8")


def load(source: str, again: bool = False) -> Contract:
    """The shipped contract (``default``) or a file. again: to be frozen anew, so that an old stamp need not fit.

    Raises UsageError with one line that names the key.
    """
    if source == DEFAULT:
        return parse(shipped(), DEFAULT)
    path = Path(source)
    if not path.is_file():
        raise UsageError(f"no contract {source}; give a TOML file, or {DEFAULT} for the shipped one")
    try:
        # An editor may have put a byte order mark before it.
        return parse(path.read_text(encoding="utf-8-sig"), path.name, again, beside(path))
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is no text in UTF-8") from None


def task_paths(contract: Contract, source: str) -> list[Path]:
    """Where the task files lie of a contract that was loaded from ``source``."""
    return [Path(source).parent / name for name in contract.files]


def parse(text: str, name: str, again: bool = False, find: Callable[[str], TaskFile] | None = None) -> Contract:
    """A contract from its text. ``name`` is for errors; again: its stamp is not looked at; find: its task files."""
    try:
        raw = tomllib.loads(text)
        stamp = raw.pop("frozen", None)
        stamp = None if again else stamp
        files = task_files(raw.get("matrix"), name, find)
        # Of a task file counts what it holds. No key of a contract is called so.
        said = raw | ({"task files": {file: found.sha256 for file, found in files.items()}} if files else {})
        # Also a whole number of thousands of digits, which Python refuses to read or write, is a ValueError.
        digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no TOML that can be used: {error!s:.200}") from None
    if stamp is not None and not _is_stamp(stamp):
        raise UsageError(f"{name}: [frozen] holds sha256 and date; let replayscope judge freeze write it")
    if stamp is not None and stamp["sha256"] != digest:
        what = " or ".join([name, *files])
        raise UsageError(
            f"{what} was changed after it was frozen on {stamp['date']}; freeze it again (judge freeze {name}), or "
            "take the change back"
        )
    known = ("name", "evidence", "budgets", "service", "limit", "matrix")
    for key in raw:
        choose(f"key of {name}", key, known)
    service = table(raw.get("service", {}), f"{name} [service]")
    for key in service:
        choose(f"key of {name} [service]", key, ("needs", "critical"))
    needs, critical = (texts(service.get(key, []), key, f"{name} [service]") for key in ("needs", "critical"))
    budgets = table(raw.get("budgets", {}), f"{name} [budgets]")
    limits, matrix = (tables(raw.get(key, []), f"{name} [[{key}]]") for key in ("limit", "matrix"))
    own = [task for found in files.values() for task in found.tasks]
    contract = Contract(
        name=typed(raw.get("name", name), str, "name", name),
        evidence=filled(Evidence, raw.get("evidence", {}), f"{name} [evidence]"),
        budgets={
            choose(f"task of {name} [budgets]", task, [*TASKS, *own]): typed(
                value, float, task, f"{name} [budgets]", within="budget"
            )
            for task, value in budgets.items()
        },
        needs=tuple(choose(f"feature of {name} [service] needs", one, list(FEATURES)) for one in needs),
        critical=tuple(one for one in critical if tasks(one, f"{name} [service] critical", own)),
        limits=tuple(_limit(one, f"{name} [[limit]] {i + 1}") for i, one in enumerate(limits)),
        matrix=tuple(_block(one, f"{name} [[matrix]] {i + 1}") for i, one in enumerate(matrix)),
        sha256=digest,
        text=text,
        frozen=stamp,
        files=files,
    )
    _check(contract, name)
    return contract


def _is_stamp(raw: Any) -> bool:
    if not isinstance(raw, dict) or set(raw) != {"sha256", "date"}:
        return False
    return isinstance(raw["date"], str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", raw["date"]) is not None


def _limit(raw: Any, where: str) -> Limit:
    if isinstance(raw, dict):
        raw = {k: str(v) if k in ("layer", "length") and type(v) is int else v for k, v in raw.items()}
    limit = filled(Limit, raw, where)
    choose(f"metric of {where}", limit.metric, list(METRICS))
    try:
        statistic(limit.statistic)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    for key in ("region", "layer"):
        if getattr(limit, key) != "*" and limit.metric not in STATES:
            raise UsageError(f"{where}: {limit.metric} has no {key}s; they are of {' and '.join(STATES)}")
    if limit.region != "*":
        choose(f"region of {limit.metric} in {where}", limit.region, STATES[limit.metric])
    return limit


def _block(raw: Any, where: str) -> Block:
    block = filled(Block, raw, where)
    if block.task_file:
        if given := [key for key in ("tasks", "lengths", "suffixes") if key in raw]:
            raise UsageError(f"{where}: the prompts of a task_file are as they are; leave {given[0]} out of this table")
    elif missing := [key for key in ("tasks", "lengths") if key not in raw]:
        raise UsageError(f"{where} lacks {missing[0]}, or a task_file")
    for kind, values, valid in (
        ("cut", block.cuts, CUTS),
        ("suffix", block.suffixes, SUFFIXES),
        ("output", block.outputs, OUTPUTS),
        ("arm", block.arms, ARMS),
        ("semantics", block.semantics, ENGINES),
    ):
        for value in values:
            choose(f"{kind} of {where}", value, list(valid))
    for glob in block.tasks:
        tasks(glob, where)
    return block


def _check(contract: Contract, name: str) -> None:
    if not contract.matrix:
        raise UsageError(f"{name} has no [[matrix]]: nothing would run")
    # Counted before any is made, the cuts beside the named ones included.
    cells = sum(
        math.prod(map(len, (block.suffixes, block.outputs, block.concurrency, block.arms, block.cuts)))
        * (
            len(contract.files[block.task_file].tasks)
            if block.task_file
            else len(block.lengths) * len({task for glob in block.tasks for task in tasks(glob, name)})
        )
        * len(block.semantics)
        * (2 * block.neighbours + 1)
        for block in contract.matrix
    )
    if cells > MOST_CELLS:
        raise UsageError(f"{name} [[matrix]]: {cells:,} cells are more than {MOST_CELLS:,}; shorten its lists")
    if (prompts := cells * contract.evidence.samples) > MOST_PROMPTS:
        raise UsageError(
            f"{name}: samples × cells of [[matrix]] is {prompts:,}, more than {MOST_PROMPTS:,}; lower samples"
        )


def tasks(glob: str, where: str, own: Collection[str] = ()) -> list[str]:
    """Labels 'task.place' that a glob stands for, or a task's name alone for all its places. own: tasks of files."""
    from fnmatch import fnmatchcase

    labels = [f"{task}.{place}" for task in TASKS for place in PLACES] + [*own]
    found = [label for label in labels if fnmatchcase(label, glob) or label.split(".")[0] == glob]
    if not found:
        choose(f"task of {where}", glob, [*TASKS, *labels[: len(PLACES)], *own])
    return found


def freeze(contract: Contract, today: str | None = None) -> str:
    """The contract's text with a stamp: its hash, and the day (UTC)."""
    body = re.sub(r"\n*^\[frozen\][^\[]*", "\n\n", contract.text, flags=re.MULTILINE).rstrip()
    date = today or datetime.now(UTC).date().isoformat()
    return f'{body}\n\n[frozen]\nsha256 = "{contract.sha256}"\ndate = "{date}"\n'


@dataclass(frozen=True)
class Support:
    """What the needs of a service come to. refused: in words, each ends the judgement; unknown: nobody says it;
    notes: what is served with a limit."""

    refused: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def support(contract: Contract) -> Support:
    """The needs of the service against what each semantics of the matrix serves with replay on."""
    found: dict[str, list[str]] = {"refused": [], "unknown": [], "notes": []}
    for name in contract.semantics:
        for need in contract.needs:
            says = feature(name, need)
            why = ": ".join(part for part in (says.limits, says.source) if part)
            if says.verdict == "refused":
                found["refused"].append(f"{name} does not serve {need} with replay on ({why})")
            elif says.verdict == "unknown":
                found["unknown"].append(f"no public source says whether {name} serves {need} with replay on")
            elif says.verdict == "untrimmed":
                found["notes"].append(f"{name} runs the decoder half untrimmed for {need} ({why})")
            elif says.limits:
                found["notes"].append(f"{name} serves {need}: {why}")
    return Support(**{key: tuple(value) for key, value in found.items()})
