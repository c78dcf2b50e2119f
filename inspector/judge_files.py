"""The task files that a contract names: found beside it, and what cannot be a task of its cells. No torch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.inspector.names import short
from replayscope.inspector.task_files import TaskFile, load
from replayscope.model.tasks import TASKS


def beside(path: Path) -> Callable[[str], TaskFile]:
    """Reads task files whose names are relative to the folder of a contract's ``path``."""
    return lambda file: load(path.parent / file)


def task_files(matrix: Any, name: str, find: Callable[[str], TaskFile] | None) -> dict[str, TaskFile]:
    """The task files that the tables of a matrix name, as ``find`` reads them; what else is wrong with these tables is
    said when they are filled.

    Raises UsageError for a task that cannot be part of a cell's name, or is there already.
    """
    blocks = matrix if isinstance(matrix, list) else []
    asked = [block["task_file"] for block in blocks if isinstance(block, dict) and "task_file" in block]
    out: dict[str, TaskFile] = {}
    of = dict.fromkeys(TASKS, "a task of the project")
    for file in dict.fromkeys(one for one in asked if isinstance(one, str)):
        if find is None:
            raise UsageError(f"{name} names the task file {short(file)}, which cannot be found from here")
        out[file] = find(file)
        for task in out[file].tasks:
            if not re.fullmatch(r"[\w-]{1,64}", task):
                raise UsageError(f"{file}: task {short(task)!r} is part of a cell's name: use letters, digits, _ and -")
            if task in of:
                raise UsageError(f"{file}: {task} is {of[task]} already; give its lines another task")
            of[task] = f"a task of {file}"
    return out
