"""What can be checked of typed paths and names before anything is loaded. Each raises UsageError in one line."""

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import choose, unknown
from replayscope.inspector.specs import parse_count


def names(text: str, what: str) -> Iterable[str]:
    """Names between commas, each once, in the order typed."""
    found = dict.fromkeys(part.strip() for part in text.split(","))
    if "" in found:
        raise UsageError(f"an empty {what} in {text!r}; give names with a comma between them")
    return found


def arm(name: str) -> str:
    """`name` if it is an arm, or a glob such as `broken:*` that stands for some."""
    from replayscope.inspector.semantics import arm_names

    valid = arm_names()
    known = re.sub(r"^broken:floor@[0-9]+$", "broken:floor@L", name) in valid and name != "broken:floor@L"
    if not known and not ("*" in name and any(fnmatchcase(one, name) for one in valid)):
        raise unknown("arm", name, valid)
    return name


def semantics(name: str) -> str:
    """`name` if it is of a semantics."""
    from replayscope.inspector.semantics import SEMANTICS

    return choose("semantics", name, list(SEMANTICS))


def steps(text: str) -> tuple[int, int | None]:
    """`3` or `3:5`, which ends before 5, or `3:`."""
    first, colon, stop = text.partition(":")
    start = parse_count(first, "--steps")
    if not colon:
        return start, start + 1
    return start, parse_count(stop, "--steps", least=start + 1) if stop else None


def trace(path: Path) -> None:
    """Refuse a trace that is not there."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a trace file, or open the folder with replayscope ui --root {path}")
    if not path.exists():
        near = path.with_name(path.name + ".partial")
        hint = f"; its writer did not finish: {near} is there" if near.exists() else "; check the path"
        raise UsageError(f"no trace {path}{hint}")


def folder_of(path: Path) -> None:
    """Refuse a path in a folder that is not there."""
    if not path.parent.is_dir():
        raise UsageError(f"no folder {path.parent} to write {path.name} into; make it first")


def named(path: Path) -> None:
    """Refuse an empty name, which is this folder to pathlib, and `-`, which is standard output to other programs."""
    if str(path) in ("-", "."):
        raise UsageError("-o needs a name: results are never written to standard output or loose into this folder")


def plain(path: Path) -> None:
    """Refuse a pipe, a socket or a device, which `--force` must not replace; a pipe is waited for by who opens it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is no plain file but a pipe, a socket or a device; give another -o")


def output(path: Path, force: bool) -> None:
    """Refuse output that could not or must not be written, before anything is computed."""
    named(path)
    folder_of(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; -o needs a file name")
    plain(path)
    if path.exists() and not force:
        raise UsageError(f"{path} exists; add --force to replace it, or give another -o")


def apart(path: Path, read: Iterable[str | os.PathLike[str] | None]) -> None:
    """Refuse output that is a file the command reads, under whatever spelling or link: `--force` is leave to replace
    results, not what they come from. None, and names of no file, are passed over."""
    for one in read:
        # A trace is written under the second name until it is whole.
        for target in (path, path.parent / f"{path.name}.partial"):
            if one is not None and _same(target, one):
                over = f"-o {path} would be written over" if target is path else f"-o {path} is first written as"
                raise UsageError(f"{over} {one}, which this command reads; give another -o")


def _same(a: Path, b: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samefile(a, b)
    except (OSError, ValueError):
        return False


def port(text: str) -> int:
    """The number of a port."""
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise UsageError(f"port {text!r} is not a number from 1 to 65535")
    return int(text)
