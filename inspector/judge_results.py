"""The results of a matrix as JSON lines: a header, a line per prompt and per timing, and a seal. No torch.

A line is written whole and flushed before the next prompt runs, so that a run can be taken up where it stopped. The
seal holds the number of lines before it and their SHA-256: a file with one is complete and unchanged.
"""

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from replayscope.inspector.errors import UsageError, system_error
from replayscope.inspector.judge_contract import Contract, parse
from replayscope.inspector.task_files import TaskFile
from replayscope.traces.disk import lock

KIND, SCHEMA = "replayscope judge results", 1
# More than any matrix writes: a foreign file must not fill the memory.
_LARGEST = 4 << 30


@dataclass(frozen=True)
class Results:
    """header: contract, model, settings. prompts: one per prompt, with what every run of it gave; costs: one per prompt
    timed. complete: sealed, and as it was sealed."""

    header: Mapping[str, Any]
    prompts: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False


def read(path: Path) -> Results:
    """Results of a file. Raises UsageError for one that is none, holds a prompt twice (it would count as new evidence),
    or was changed after it was sealed.

    A last line that is cut off is what a killed run leaves; it is passed over.
    """
    header, lines, sealed = _lines(path)
    found = Results(header, complete=sealed)
    for line in lines:
        (found.prompts if line["kind"] == "prompt" else found.costs).append(line)
    return found


def _known(line: dict[str, Any]) -> bool:
    if line["kind"] == "end":
        return True
    return line["kind"] in ("prompt", "cost") and isinstance(line["group"], str) and isinstance(line["seed"], int)


def _lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{path.name} is larger than any results; give the file that judge run wrote")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {system_error(error)}") from None
    whole, _, _ = data.rpartition(b"\n")
    raw = whole.split(b"\n")
    try:
        parsed = [json.loads(line) for line in raw]
        header = parsed[0]
        fits = header["kind"] == KIND and all(_known(line) for line in parsed[1:])
    except (ValueError, TypeError, KeyError, RecursionError):
        fits = False
    if not fits:
        raise UsageError(f"{path.name} holds no results of judge run")
    if header.get("schema") != SCHEMA:
        raise UsageError(f"{path.name} has results of schema {header.get('schema')}; this version reads {SCHEMA}")
    ends = [i for i, line in enumerate(parsed) if line["kind"] == "end"]
    if ends:
        body = b"\n".join(raw[: ends[0]]) + b"\n"
        right = ends == [len(parsed) - 1] and parsed[-1]["sha256"] == hashlib.sha256(body).hexdigest()
        if not right:
            raise UsageError(f"{path.name} was changed after it was sealed; run the matrix again")
    lines = [line for line in parsed[1:] if line["kind"] != "end"]
    twice = [k for k, n in Counter((line["kind"], line["group"], line["seed"]) for line in lines).items() if n > 1]
    if twice:
        kind, group, seed = twice[0]
        raise UsageError(f"{path.name} holds {kind} {seed} of {group} twice; run the matrix again with --force")
    return header, lines, bool(ends)


def header_of(contract: Contract, model: str, cells: str, source: str) -> dict:
    """What results say of how they were made. 'made' is not compared when a run is taken up again."""
    files = {name: {"sha256": file.sha256, "tasks": list(file.tasks)} for name, file in contract.files.items()}
    return {
        "contract": {
            "name": contract.name,
            "sha256": contract.sha256,
            "frozen": dict(contract.frozen) if contract.frozen else None,
            "text": contract.text,
            **({"task_files": files} if files else {}),
        },
        "model": model,
        "cells": cells,
        "made": {
            "source": source,
            "on": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("replayscope", "torch", "numpy")},
        },
    }


def contract_of(results: Results, name: str) -> Contract:
    """The contract that results hold. Of its task files they hold hashes and names: none is looked for."""

    def find(file: str) -> TaskFile:
        found = held["task_files"][file]
        return TaskFile(found["sha256"], {task: {} for task in found["tasks"]})

    try:
        held = results.header["contract"]
        return parse(held["text"], f"the contract in {name}", find=find)
    except (KeyError, TypeError):
        raise UsageError(f"{name} does not hold what its contract needs; run the matrix again") from None


# Of what a file can hold results, where "another" and the key is no English.
_OTHER = {
    "cells": "other cells",
    "plants": "other plants",
    "weights_sha256": "other weights",
    "refused": "an engine that refuses other fields",
}


class Store:
    """Appends to a results file; a context manager. done: (group, seed) of the prompts that it holds already.

    Where the file exists it is continued if its header is the same, else UsageError (or it is replaced with ``force``).
    Raises TraceLockedError while another run writes to it.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], force: bool = False) -> None:
        self.path = path
        wanted = {"kind": KIND, "schema": SCHEMA, **header}
        self.done: set[tuple[str, int]] = set()
        self.timed: set[tuple[str, int]] = set()
        self.complete = False
        going_on = path.exists() and not force
        # Opened without emptying it, so that a file that another run writes to is refused as it is.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            lock(self._file.fileno(), path)
            self._begin(wanted, going_on)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, wanted: Mapping[str, Any], going_on: bool) -> None:
        path = self.path
        if going_on:
            old, lines, self.complete = _lines(path)
            same = json.loads(json.dumps(wanted))
            if differs := [k for k in wanted if k != "made" and old.get(k) != same[k]]:
                of = _OTHER.get(differs[0], f"another {differs[0]}")
                raise UsageError(f"{path} holds results of {of}; give another -o, or --force to start over")
            self.done = {(line["group"], line["seed"]) for line in lines if line["kind"] == "prompt"}
            self.timed = {(line["group"], line["seed"]) for line in lines if line["kind"] == "cost"}
            # What a killed run left of its last line.
            self._file.truncate(self._file.read().rfind(b"\n") + 1)
            self._file.seek(0, os.SEEK_END)
        else:
            self._file.truncate(0)
            self.add(wanted)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one line, and see that it reaches the file."""
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def seal(self) -> None:
        """Say that nothing follows."""
        if self.complete:
            return
        self._file.flush()
        body = self.path.read_bytes()
        self.add({"kind": "end", "lines": body.count(b"\n"), "sha256": hashlib.sha256(body).hexdigest()})
        os.fsync(self._file.fileno())
        self.complete = True

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
