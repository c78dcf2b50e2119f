"""Runs of the command line started from the page: one at a time, the others wait in order.

Each is a process of its own, so that the page stays quick, a run can be stopped, and one that runs out of memory takes
nothing else with it.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from replayscope.inspector.errors import UsageError

Phase = Literal["waiting", "running", "done", "failed", "cancelled"]
MOST_WAITING = 20
_KEPT = 200  # jobs that are remembered after they ended
_GRACE = 5.0  # seconds from the request to stop until a process is killed
_PROGRESS = re.compile(r"(\d+)/(\d+) (.*)")
_ESTIMATE = re.compile(r"\d[\d,]* runs, .*about .*")
_TOO_LARGE = re.compile(r"the trace would take about [\d,]+ bytes, --max-bytes allows")


@dataclass(frozen=True)
class Job:
    """What is known of a run at one moment.

    words: the command line after `replayscope`. out: name of the trace it writes. text: the prompt for standard input.
    ahead: jobs before it. done, total: of the run's own steps, 0 while unknown. doing: the step's name. estimate:
    runs, rows, time and size as the command line put them. said: its last line, or the reason why it failed.
    """

    id: str
    words: tuple[str, ...]
    out: str
    text: str = ""
    phase: Phase = "waiting"
    ahead: int = 0
    done: int = 0
    total: int = 0
    doing: str = ""
    estimate: str = ""
    said: str = ""
    began: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.phase in ("done", "failed", "cancelled")

    @property
    def asks(self) -> bool:
        """Whether it only asks what the run would cost."""
        return "--max-bytes=1" in self.words


@dataclass
class _Queue:
    waiting: list[str] = field(default_factory=list)
    running: str | None = None
    process: subprocess.Popen | None = None


class Jobs:
    """The jobs of one page server. Safe for many threads; `close` stops what runs and drops what waits."""

    def __init__(self, root: Path):
        self.root = root
        self._jobs: dict[str, Job] = {}
        self._queue = _Queue()
        self._lock = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, words: Sequence[str], out: str, text: str = "") -> str:
        """Put a run behind the others and return its id. Raises UsageError when too many wait."""
        with self._lock:
            if len(self._queue.waiting) >= MOST_WAITING:
                raise UsageError(f"{MOST_WAITING} runs wait already; try again when some are done")
            job = Job(secrets.token_urlsafe(12), tuple(words), out, text)
            self._jobs[job.id] = job
            self._queue.waiting.append(job.id)
            for old in [i for i, j in self._jobs.items() if j.over][:-_KEPT]:
                del self._jobs[old]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="replayscope-jobs", daemon=True)
                self._thread.start()
            self._lock.notify_all()
            return job.id

    def get(self, id_: str) -> Job | None:
        """A job as it stands; None for an id that this server does not know."""
        with self._lock:
            job = self._jobs.get(id_)
            if job is None or job.phase != "waiting":
                return job
            return replace(job, ahead=self._queue.waiting.index(id_) + (self._queue.running is not None))

    def busy(self) -> int:
        """How many jobs run or wait, whoever started them."""
        with self._lock:
            return len(self._queue.waiting) + (self._queue.running is not None)

    def cancel(self, id_: str) -> None:
        """Stop a run, or take it out of the queue. What it wrote so far is removed."""
        with self._lock:
            if id_ in self._queue.waiting:
                self._queue.waiting.remove(id_)
                self._put(id_, phase="cancelled", said="cancelled before it began")
            elif self._queue.running == id_:
                self._put(id_, phase="cancelled", said="cancelled")
                self._stop()

    def close(self) -> None:
        """Stop everything, and wait until the process is gone."""
        with self._lock:
            self._closed = True
            self._queue.waiting.clear()
            self._stop()
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(2 * _GRACE)

    def _put(self, id_: str, **changes) -> None:
        self._jobs[id_] = replace(self._jobs[id_], **changes)

    def _stop(self) -> None:
        process = self._queue.process
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGINT)
        threading.Timer(_GRACE, _kill, (process,)).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue.waiting and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                id_ = self._queue.running = self._queue.waiting.pop(0)
                self._put(id_, phase="running", began=time.monotonic())
            try:
                self._run(self._jobs[id_])
            finally:
                with self._lock:
                    self._queue.running = self._queue.process = None

    def _run(self, job: Job) -> None:
        import pty  # not on every system; all but this tab works without it

        # Only to a terminal the command line tells its progress.
        terminal, theirs = pty.openpty()
        calm = ["nice", "-n", "5"] if shutil.which("nice") else []
        with self._lock:
            if self._jobs[job.id].over:  # cancelled in between
                return
            process = self._queue.process = subprocess.Popen(
                [*calm, sys.executable, "-m", "replayscope.inspector", *job.words],
                cwd=self.root, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True,
            )  # fmt: skip
        os.close(theirs)
        threading.Thread(target=_feed, args=(process, job.text), daemon=True).start()
        last = self._follow(job.id, terminal)
        code = process.wait()
        with self._lock:
            if self._jobs[job.id].phase == "cancelled" or self._closed:
                for ending in ("partial", "resume"):
                    for left in self.root.glob(f"{glob.escape(job.out)}.{ending}*"):
                        left.unlink(missing_ok=True)
            elif code == 0 or (code == 1 and (self.root / job.out).is_file()):
                self._put(job.id, phase="done", said="" if code == 0 else "a fault was found; see the verdict")
            elif _TOO_LARGE.search(last) and job.asks:
                self._put(job.id, phase="done", said="")
            else:
                said = last.removeprefix("replayscope: ") or f"it ended with exit code {code}"
                self._put(job.id, phase="failed", said=said)

    def _follow(self, id_: str, terminal: int) -> str:
        """Reads what a run says until it ends, and returns its last whole line."""
        last, left = "", b""
        while True:
            try:
                chunk = os.read(terminal, 4096)
            except OSError:  # a terminal whose other side is closed
                chunk = b""
            if not chunk:
                break
            *lines, left = re.split(rb"[\r\n]+", left + chunk)
            # A line of progress that is written over has no end.
            for line in [*lines, left]:
                text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line.decode("utf-8", "replace")).strip()
                if progress := _PROGRESS.fullmatch(text):
                    done, total = int(progress[1]), int(progress[2])
                    with self._lock:
                        self._put(id_, done=min(done, total), total=total, doing=progress[3])
                elif _ESTIMATE.fullmatch(text):
                    with self._lock:
                        self._put(id_, estimate=text)
                elif text:
                    last = text
        os.close(terminal)
        return last


def _feed(process: subprocess.Popen, text: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(text.encode("utf-8", "surrogatepass"))
        process.stdin.close()
    except OSError:  # it ended without reading
        pass


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
