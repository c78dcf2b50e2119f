"""Tasks of a user's own: a JSONL file, one prompt with its answer and its cut per line. No torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import UsageError, system_error
from replayscope.inspector.names import short
from replayscope.model.tasks import Sample

FIELDS = {"prompt": str, "answer": str, "cut": int, "task": str}


@dataclass(frozen=True)
class TaskFile:
    """sha256: of the file's bytes. tasks: name → line number → sample, in the order of the file; names without samples
    where only results tell of the file."""

    sha256: str
    tasks: Mapping[str, Mapping[int, Sample]]


def load(path: str | Path) -> TaskFile:
    """A file by its tasks. A line is an object with ``prompt`` (it ends where the answer begins), ``answer``, ``cut``
    (the character of the prompt at which the cached prefix ends) and, if it is to be told from others, ``task``. A
    sample's seed is its line number.

    Raises UsageError that names the line and the field, also for a prompt that a task has twice.
    """
    try:
        data = Path(path).read_bytes()
        # An editor may have put a byte order mark before it.
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"task file {path} cannot be read: {system_error(error)}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"task file {path} is not UTF-8 text (byte {error.start})") from None
    tasks: dict[str, dict[int, Sample]] = {}
    seen: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            sample = _sample(f"{path}:{number}", number, line)
            first = seen.setdefault((sample.task, sample.prompt), number)
            if first != number:
                raise UsageError(f"{path}:{number}: the prompt of line {first} again, which is no new evidence")
            tasks.setdefault(sample.task, {})[number] = sample
    if not tasks:
        raise UsageError(f"task file {path} is empty; give one JSON object per line with {', '.join(FIELDS)}")
    return TaskFile(hashlib.sha256(data).hexdigest(), tasks)


def _sample(where: str, number: int, line: str) -> Sample:
    try:
        raw: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: no JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise UsageError(f"{where}: no JSON that can be used ({error!s:.80})") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{where}: one object per line is wanted, with {', '.join(FIELDS)}")
    unknown = sorted(set(raw) - set(FIELDS))
    if unknown:
        raise UsageError(f"{where}: unknown field {short(unknown[0])!r}; there are {', '.join(FIELDS)}")
    raw = {"task": "own", **raw}
    for name, kind in FIELDS.items():
        if not isinstance(raw.get(name), kind) or isinstance(raw[name], bool):
            raise UsageError(f"{where}: {name} must be given as {'a number' if kind is int else 'text'}")
    if not raw["prompt"] or not raw["answer"]:
        raise UsageError(f"{where}: an empty {'answer' if raw['prompt'] else 'prompt'} cannot be scored")
    if not any(c.isalnum() for c in raw["answer"]):
        raise UsageError(f"{where}: an answer without a letter or digit cannot be scored")
    if any("\ud800" <= c <= "\udfff" for c in raw["prompt"] + raw["answer"]):
        raise UsageError(f"{where}: a lone surrogate (\\ud800 to \\udfff) is no character that a model can be given")
    if not 0 <= raw["cut"] <= len(raw["prompt"]):
        raise UsageError(f"{where}: cut {raw['cut']!s:.20} is outside the prompt's {len(raw['prompt'])} characters")
    return Sample(raw["task"], raw["prompt"], raw["answer"], raw["cut"], number, "own", "own")
