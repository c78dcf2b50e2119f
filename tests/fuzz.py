"""Damages the small trace many times and reads it: `python -m tests.fuzz TRACE FIRST COUNT` prints one JSON object.

Every seed flips bytes or cuts the tail. What is read must be what was written, or a TraceError. HDF5 could take the
process down, and it keeps something of each file that it could not open, so that each batch runs in a process of its
own, in a bounded address space.
"""

import contextlib
import json
import os
import random
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from replayscope.traces import TraceError, TraceReader
from tests import small

BATCH = 100
ADDRESSES = 2 << 30  # bytes
SECONDS = 20  # of a batch on the CPU; a reader that turns in circles is killed


def damaged(whole: bytes, seed: int) -> bytes:
    """A cut tail in one of six, otherwise one to eight other bytes."""
    draw = random.Random(seed)
    data = bytearray(whole)
    if draw.random() < 1 / 6:
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def read(path: Path, verify: bool) -> str:
    """'same', 'refused', or what went wrong. verify: by all checks; what passes them must be what was written."""
    try:
        trace = TraceReader(path)
        if verify and trace.verify():
            return "refused"
        small.check(trace)
        return "same"
    except TraceError as error:
        return "refused" if "\n" not in str(error) and len(str(error)) < 600 else f"not one line: {error}"
    except AssertionError as error:
        return f"wrong: {error}"[:200]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:200]


def batch(whole: bytes, seeds: range, folder: Path, out: int) -> None:
    """Read each damaged file and write 'seed answer' lines; a seed without an answer took the process down."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    path = folder / "t.h5"
    for seed in seeds:
        path.write_bytes(damaged(whole, seed))
        os.write(out, f"{seed} {json.dumps(read(path, verify=seed % 2 == 1))}\n".encode())


def main(trace: str, first: int, count: int) -> None:
    """Count the answers; name the seeds of bad ones."""
    whole = Path(trace).read_bytes()
    told = {"same": 0, "refused": 0, "bad": {}}
    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        for start in range(first, first + count, BATCH):
            seeds = range(start, min(start + BATCH, first + count))
            source, out = os.pipe()
            if (child := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    batch(whole, seeds, Path(folder), out)
                os._exit(0)
            os.close(out)
            with os.fdopen(source) as answers:
                found = dict(line.split(" ", 1) for line in answers)
            os.waitpid(child, 0)
            for seed in seeds:
                answer = json.loads(found.get(str(seed), '"the process died here or before"'))
                if answer in told:
                    told[answer] += 1
                else:
                    told["bad"][seed] = answer
    told["kib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
