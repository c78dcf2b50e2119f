"""Judged results that a page may show: found under its root, judged by the command line in a process of its own.

A judgement resamples every number of a file that a stranger may have written, as often as the file says; so it gets a
process whose time and memory have an end, and the page stays quick meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.inspector.judge_contract import DEFAULT
from replayscope.inspector.judge_results import KIND
from replayscope.traces.errors import TraceFormatError
from replayscope.ui.library import Library

RESULTS, CONTRACT = ".jsonl", ".toml"
_LARGEST = 256 << 20  # bytes of results; larger ones are for the command line
_MEMORY = 4 << 30  # bytes of address space of a judgement
_SECONDS = 120.0


def results(library: Library) -> list[str]:
    """Names of the results of `judge run`, newest first."""
    return [name for name in library.names(RESULTS) if _holds(library, name, RESULTS, KIND.encode(), 256)]


def contracts(library: Library) -> list[str]:
    """Names of the contracts, newest first."""
    return [name for name in library.names(CONTRACT) if _holds(library, name, CONTRACT, b"[[matrix]]", 1 << 16)]


def judgement(library: Library, name: str, contract: str = "") -> str:
    """What `judge verdict --json` says of results, as text; kept as long as both files are the same.

    contract: a name under the root, `default` for the shipped one, empty for the one that the runs began with. Raises
    UsageError and TraceFormatError, whose text names no folder but the root.
    """
    own = contract in ("", DEFAULT)
    return library.kept(
        ("judgement", *version(library, name, contract)),
        lambda: _judge(library, name, contract if own else os.path.join(".", contract)),
    )


def version(library: Library, name: str, contract: str) -> tuple:
    """Changes when either file does. Raises UsageError where one is not there."""
    own = contract in ("", DEFAULT)
    return library.version(name, RESULTS), contract if own else library.version(contract, CONTRACT)


def _holds(library: Library, name: str, ending: str, words: bytes, within: int) -> bool:
    """Whether the beginning of a file has some words; not of one that cannot be read."""
    try:
        with library.file(name, ending).open("rb") as file:
            return words in file.read(within)
    except (OSError, UsageError):
        return False


def _judge(library: Library, name: str, contract: str) -> str:
    if (size := library.file(name, RESULTS).stat().st_size) > _LARGEST:
        raise UsageError(f"{name} has {size:,} bytes, too many for a page; replayscope judge verdict {name} takes it")
    words = [sys.executable, "-m", "replayscope.inspector", "judge", "verdict", os.path.join(".", name), "--json"]
    words += ["--contract", contract, "--unfrozen"] if contract else []
    with subprocess.Popen(
        words, cwd=library.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:  # fmt: skip
        if hasattr(resource, "prlimit"):
            resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        try:
            out, said = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise UsageError(
                f"{name} took more than {_SECONDS:.0f} seconds to judge; replayscope judge verdict {name} takes longer"
            ) from None
    line = said.decode("utf-8", "replace").strip().rpartition("\n")[2].removeprefix("replayscope: ")
    if process.returncode not in (0, 1):
        if line.startswith("internal error") or not line:
            raise TraceFormatError(f"{name}: no judgement can be made of it, its parts do not fit")
        raise UsageError(line.replace(f"./{name}", name))
    # What was typed when the runs began may be a path of this machine.
    return json.dumps(_without(json.loads(out), f"{library.root}{os.sep}"))


def _without(value: Any, path: str) -> Any:
    """Plain data whose texts do not name a folder."""
    if isinstance(value, dict):
        return {key: _without(item, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, path) for item in value]
    return value.replace(path, "") if isinstance(value, str) else value
