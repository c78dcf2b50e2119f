"""The traces that a page may show: those under one folder, found by name, opened anew when they change.

Whatever a browser sends is a name under the root, never a path; whatever it is told names the trace, never a path.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

from replayscope.inspector.errors import UsageError
from replayscope.traces import TraceReader
from replayscope.ui.checked import CheckedReader

T = TypeVar("T")
MOST_LISTED = 500
_READERS = 8
_CACHED = 64 << 20  # characters of drawn figures; what is no text counts as _OBJECT
_OBJECT = 1 << 20


class Library:
    """Traces under `root`, links and `..` resolved. Safe for many threads; holds no open file."""

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root).resolve()
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[str, int, int], TraceReader] = OrderedDict()
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._size = 0

    def names(self, ending: str = ".h5") -> list[str]:
        """Names of the traces, or of the files with another ending, newest first, at most 500."""
        found: list[tuple[float, str]] = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for file in files:
                path = Path(folder, file)
                if not file.endswith(ending) or not self._inside(path):
                    continue
                with suppress(OSError):  # gone between the listing and the question
                    info = path.stat()
                    if S_ISREG(info.st_mode):
                        found.append((info.st_mtime, path.relative_to(self.root).as_posix()))
            if len(found) >= MOST_LISTED:
                break
        return [name for _, name in sorted(found, key=lambda item: (-item[0], item[1]))[:MOST_LISTED]]

    def open(self, name: str) -> TraceReader:
        """The trace of a name. Raises UsageError for a name that is not one of a trace under the root."""
        path = self.file(name)
        stamp = self._stamp(path)
        with self._lock:
            if stamp in self._readers:
                self._readers.move_to_end(stamp)
                return self._readers[stamp]
        reader = CheckedReader(path)
        with self._lock:
            self._readers[stamp] = reader
            while len(self._readers) > _READERS:
                self._readers.popitem(last=False)
        return reader

    def version(self, name: str, ending: str = ".h5") -> tuple:
        """Changes when the file does."""
        return self._stamp(self.file(name, ending))

    def cached(self, name: str, what: Hashable, make: Callable[[TraceReader], T]) -> T:
        """What is made from a trace: text, or numbers that nobody changes. Kept as long as the file is the same and
        there is room; made once, however many ask for it at the same time."""
        reader = self.open(name)
        return self.kept((self._stamp(reader.path), what), lambda: make(reader))

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The same for what is made from other files: `key` says of which, in which version."""
        with self._lock:
            gate = self._making.setdefault(key, threading.Lock())
        try:
            with gate:
                with self._lock:
                    if key in self._made:
                        self._made.move_to_end(key)
                        return self._made[key]
                value = make()
                with self._lock:
                    self._made[key] = value
                    self._size += _size(value)
                    while self._size > _CACHED and len(self._made) > 1:
                        self._size -= _size(self._made.popitem(last=False)[1])
                return value
        finally:
            with self._lock:
                self._making.pop(key, None)

    def public(self, error: Exception, name: str) -> str:
        """An error as the browser may read it: one line that names the trace, folders of this machine cut out."""
        text, name = " ".join(str(error).split()), name if isinstance(name, str) else ""
        here = {str(self.root / name), str(self.root)} if "\0" not in name else {str(self.root)}
        for path in sorted(here | {os.path.realpath(path) for path in here}, key=len, reverse=True):
            text = text.replace(path, name if name and path.endswith(name) else "").replace(f"{path}{os.sep}", "")
        return text if not name or name in text else f"{name[:200]}: {text}"

    def file(self, name: str, ending: str = ".h5") -> Path:
        """Where the file of a name is. Raises UsageError for a name that is not one of a file under the root."""
        what = "trace" if ending == ".h5" else "file"
        if not isinstance(name, str) or "\0" in name or not name.endswith(ending):
            raise UsageError(f"no such {what} as {name!r:.80}; choose one of the list")
        path = self.root / name
        if os.path.isabs(name) or not self._inside(path) or path.is_dir():
            raise UsageError(f"no such {what} as {name!r:.80}; choose one of the list")
        if not path.is_file():
            raise UsageError(f"{name} is not there any more; choose another {what}")
        return path

    def _inside(self, path: Path) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(self.root)

    @staticmethod
    def _stamp(path: Path) -> tuple[str, int, int]:
        try:
            info = path.stat()
        except OSError:
            raise UsageError(f"{path.name} is not there any more; choose another") from None
        return str(path), info.st_mtime_ns, info.st_size


def _size(value: object) -> int:
    return len(value) if isinstance(value, str) else _OBJECT
