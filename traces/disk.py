"""The file below HDF5: what is recorded reaches it in steps that a kill cannot tear.

HDF5 overwrites its own metadata in place, so a process killed inside a flush leaves a file that cannot be opened. Here
bytes behind the last commit go to the file, where nothing refers to them yet, and bytes that overwrite
committed ones wait in memory. A commit writes those behind the end first (the journal), then in place, then cuts the
journal off. Whoever finds a whole journal carries it out again; a torn one is ignored: nothing in front of it changed.

HDF5 writes a few hundred bytes at a time. They are gathered and written together: a call to the system for each costs
more than the writing, most of all where other threads wait for Python's lock before and after it.
"""

import ctypes
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from replayscope.traces.errors import TraceError, TraceLockedError

LOCKED = (11, 35)  # EAGAIN on Linux and on BSD
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # a pipe of that name is opened without waiting for who writes into it
_PAGE = 4096
_MAGIC = b"RSjournl"
_FOOTER = struct.Struct("<QQI8s")  # where the journal starts, bytes of its pages, their CRC-32, magic
_ENTRY = struct.Struct("<Q")  # where a page belongs; its bytes follow
_MOST_PARTS = 1024  # of one call: IOV_MAX of Linux, macOS and the BSDs
_COPIES = 8 << 20  # bytes of HDF5's own that may wait to be written
_AHEAD = 1 << 20  # committed bytes from which on it is worth asking the system to begin writing them


class Disk:
    """A file object for h5py with `commit` and `rollback`; holds an exclusive lock on the file until `close`.

    keep: go on behind the last commit of an earlier writer, which was stopped. Raises TraceLockedError if another
    process holds the file, OSError if it cannot be made.
    """

    def __init__(self, path: Path, keep: bool = False):
        self.path = path
        while True:
            if keep:
                recover(path)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                lock(self._fd, path)
                # Before it was locked, another writer may have given it its final name, or taken it away.
                if os.path.samestat(os.fstat(self._fd), os.stat(path)):
                    break
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)
        try:
            self.size = self.committed = self._at = _end(self._fd) if keep else 0
            os.ftruncate(self._fd, self.size)
        except BaseException:
            os.close(self._fd)
            raise
        self._pages: dict[int, bytearray] = {}
        self._gathered: list[tuple[int, int, Sequence[bytes | memoryview]]] = []  # (start, stop, bytes), by start
        self._copied = 0  # bytes of them that nobody else holds
        self._instead: Sequence[bytes | memoryview] | None = None
        self.error: OSError | None = None
        self._begun = self.committed  # in front of this the system was asked to write to the disk

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer from the current place; what was never written reads as zeros."""
        count, at = len(buffer), self._at
        if at + count > self.committed:
            self._flush()
        found = os.preadv(self._fd, [buffer], at)
        buffer[found:] = bytes(count - found)
        for page in range(at // _PAGE, (at + count - 1) // _PAGE + 1) if self._pages else ():
            if held := self._pages.get(page):
                first, stop = max(at, page * _PAGE), min(at + count, page * _PAGE + len(held))
                if stop > first:
                    buffer[first - at : stop - at] = held[first - page * _PAGE : stop - page * _PAGE]
        self._at += count
        return count

    def read(self, count: int = -1) -> bytes:
        buffer = bytearray(self.size - self._at if count < 0 else count)
        self.readinto(memoryview(buffer))
        return bytes(buffer)

    def write(self, data: bytes | memoryview) -> int:
        """Once a write has failed the rest is dropped: HDF5 must be able to close what will be rolled back."""
        parts, self._instead = self._instead, None
        if parts is None:
            parts = (bytes(data),)  # HDF5 uses the memory again
            self._copied += len(parts[0])
        count, at = sum(map(len, parts)), self._at
        if self.error is None:
            if (below := self.committed - at) > 0:
                whole = memoryview(b"".join(parts))
                self._hold(at, whole[:below])
                parts = (whole[below:],)
            if count > below:
                self._gather(max(at, self.committed), parts)
        self._at += count
        self.size = max(self.size, self._at)
        return count

    def put(self, parts: Sequence[bytes | memoryview], ask: Callable[[], None]) -> None:
        """Write `parts` where HDF5, asked to, writes as many bytes; those are not looked at. `parts` must not change
        before the commit."""
        self._instead = parts
        ask()
        if self._instead is not None:
            raise OSError("HDF5 kept to itself what it was asked to write")

    def truncate(self, size: int) -> int:
        # A file that shrinks below the last commit shrinks at the next one.
        if self.error is None and size >= self.committed:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                self.error = error
        self.size = size
        return size

    def flush(self) -> None:
        pass

    def commit(self) -> None:
        """Make everything written so far the content of the file. Raises OSError, and then nothing of it is."""
        self._flush()
        if self.error is not None:
            raise self.error
        pages = b"".join(_ENTRY.pack(page * _PAGE) + held for page, held in sorted(self._pages.items()))
        if pages:
            start = max(self.size, self.committed)
            os.ftruncate(self._fd, start)  # the journal is found by the end of the file
            footer = _FOOTER.pack(self.size, len(pages), zlib.crc32(pages), _MAGIC)
            _write(self._fd, (pages, footer), start)
            _apply(self._fd, pages)
        os.ftruncate(self._fd, self.size)
        self._pages.clear()
        self.committed = self.size
        # The last page is written again by what comes next.
        end = self.committed - self.committed % _PAGE
        if end - self._begun >= _AHEAD:
            _begin_to_sync(self._fd, self._begun, end)
            self._begun = end

    def rollback(self) -> None:
        """Forget everything since the last commit."""
        self._pages.clear()
        self._forget()
        self.error, self.size = None, self.committed
        os.ftruncate(self._fd, self.committed)

    def sync(self) -> None:
        """Push the file to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _gather(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Note what is to be written. Nothing overlaps in the list, so that it can be written in any order."""
        stop = start + sum(map(len, parts))
        after = bisect_left(self._gathered, (start,))
        if (after and self._gathered[after - 1][1] > start) or (
            after < len(self._gathered) and self._gathered[after][0] < stop
        ):
            self._flush()
            after = 0
        self._gathered.insert(after, (start, stop, parts))
        if self._copied > _COPIES:
            self._flush()

    def _flush(self) -> None:
        """Write what was gathered. Once that has failed nothing more is written."""
        runs: list[tuple[int, list[bytes | memoryview]]] = []
        end = -1
        for start, stop, parts in self._gathered:
            if start != end:
                runs.append((start, []))
            runs[-1][1].extend(parts)
            end = stop
        self._forget()
        try:
            for start, parts in runs if self.error is None else ():
                _write(self._fd, parts, start)
        except OSError as error:
            self.error = error

    def _forget(self) -> None:
        self._gathered, self._copied = [], 0

    def _hold(self, at: int, data: memoryview) -> None:
        while len(data):
            page, skip = divmod(at, _PAGE)
            if page not in self._pages:
                # Whole pages, the last one only as far as it is committed: behind that the file itself is written.
                end = min(_PAGE, self.committed - page * _PAGE)
                self._pages[page] = bytearray(os.pread(self._fd, end, page * _PAGE))
            count = min(len(data), len(self._pages[page]) - skip)
            self._pages[page][skip : skip + count] = data[:count]
            at, data = at + count, data[count:]


def recover(path: Path) -> None:
    """Carry out the journal that a killed writer left, if there is a whole one. Raises TraceError if the file needs it
    and cannot be written, TraceLockedError while its writer is alive."""
    with open(path, "rb") as file:
        if not _journal(file.fileno()):
            return
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise TraceError(
            f"{path} was left by a writer that was killed and has to be repaired, but: {error.strerror}"
        ) from None
    try:
        lock(fd, path)
        if found := _journal(fd):
            size, pages = found
            _apply(fd, pages)
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def lock(fd: int, shown: Path) -> None:
    """Lock a file as HDF5 does. Raises TraceLockedError if another process holds it."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network disks know no locks; a file there is as safe as its users are careful.
        if error.errno in LOCKED:
            raise TraceLockedError(
                f"{shown} is in use by another process; close it there or use another name"
            ) from None


def refuse_if_locked(path: Path, shown: Path) -> None:
    """Raise TraceLockedError, with another name for it, while another process has the file open."""
    try:
        fd = os.open(path, os.O_RDONLY | _AT_ONCE)
    except OSError:
        return
    try:
        lock(fd, shown)
    finally:
        os.close(fd)


def _end(fd: int) -> int:
    """Where HDF5 says that the file ends: a superblock of version 2 or 3 has it at byte 28."""
    return int.from_bytes(os.pread(fd, 8, 28), "little")


def _journal(fd: int) -> tuple[int, bytes] | None:
    """Size of the file when the journal is carried out, and its pages; None unless a whole one ends the file."""
    end = os.fstat(fd).st_size - _FOOTER.size
    if end < 0:
        return None
    size, length, checksum, magic = _FOOTER.unpack(os.pread(fd, _FOOTER.size, end))
    if magic != _MAGIC or length > end or size > end:
        return None
    pages = os.pread(fd, length, end - length)
    if zlib.crc32(pages) != checksum or any(where + len(held) > size for where, held in _entries(pages)):
        return None
    return size, pages


def _entries(pages: bytes) -> Iterator[tuple[int, memoryview]]:
    """(place in the file, bytes) of each page; only the last may be short."""
    for at in range(0, len(pages) - _ENTRY.size + 1, _ENTRY.size + _PAGE):
        (where,) = _ENTRY.unpack_from(pages, at)
        yield where, memoryview(pages)[at + _ENTRY.size : at + _ENTRY.size + _PAGE]


def _apply(fd: int, pages: bytes) -> None:
    for where, held in _entries(pages):
        _write(fd, (held,), where)


def _begin_to_sync(fd: int, start: int, end: int) -> None:
    """Have the system write bytes to the disk and do not wait for it, so that little is left for `sync` to wait for.
    `sync` is what says that they are there, and what could not be written; where there is no such call it does all."""
    if _sync_file_range is not None:
        _sync_file_range(fd, start, end - start, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux has it; Python has no name for it."""
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = _find_sync_file_range()


def _write(fd: int, parts: Sequence[bytes | memoryview], at: int) -> None:
    rest = [memoryview(part) for part in parts if len(part)]
    while rest:
        count = os.pwritev(fd, rest[:_MOST_PARTS], at)
        at += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
