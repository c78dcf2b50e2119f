"""Timing of cases: variants that do the same work, checked against each other first, then timed in turns.

Times on a shared machine drift, so the variants run in rounds (a b c, c b a, …) and are compared within a round. A case
whose check fails is not timed at all.
"""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Contest:
    """Variants of one case on one device.

    variants: name -> what is timed. check: raises AssertionError unless the variants agree. work: what one call does,
    in `unit` (rows, bytes, tokens), so that a rate can be told. scale: name -> what its time is multiplied by, where
    one call does only a part that repeats. before: what is done before each call and not timed.
    """

    variants: dict[str, Callable[[], object]]
    check: Callable[[], None]
    work: float = 0.0
    unit: str = ""
    scale: Mapping[str, float] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Case:
    """A line of the table. `against` is the variant that ratios are relative to: ratio 2 is twice as fast as it.

    rounds: how often it is timed unless told otherwise.
    """

    name: str
    about: str
    against: str
    make: Callable[[torch.device], Contest]
    devices: tuple[str, ...] = ("cpu", "cuda")
    rounds: int = 7


def environment(device: torch.device) -> dict[str, Any]:
    """What a time depends on besides the code: machine, threads, versions, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return {
        "device": str(device),
        "device_name": name,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy", "h5py", "replayscope")},
        "commit": _commit(),
    }


def run_case(case: Case, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """One record for each variant: median and spread in seconds, rate, and ratio to `case.against`.

    If the check fails, the only record holds `failed` and no time. Raises ValueError for a case without its baseline.
    """
    contest = case.make(device)
    if case.against not in contest.variants:
        raise ValueError(f"case {case.name} has no variant {case.against!r} to compare with")
    head = {"case": case.name, "about": case.about}
    try:
        contest.check()
    except AssertionError as error:
        yield {**head, "failed": str(error) or "the variants do not agree"}
        return
    times: dict[str, list[float]] = {name: [] for name in contest.variants}
    processor: dict[str, list[float]] = {name: [] for name in contest.variants}
    for call in contest.variants.values():  # allocators, caches and compilers settle
        contest.before()
        _seconds(call, device)
    for number in range(rounds):
        # The other way round in every second one: whoever comes first may find the machine in another state.
        for name, call in list(contest.variants.items())[:: -1 if number % 2 else 1]:
            contest.before()
            began = time.process_time()
            times[name].append(_seconds(call, device) * contest.scale.get(name, 1.0))
            processor[name].append(time.process_time() - began)
    for name, taken in times.items():
        median = statistics.median(taken)
        ratios = [base / own for base, own in zip(times[case.against], taken, strict=True)]
        rate = {"rate": contest.work / median, "unit": f"{contest.unit}/s"} if contest.work else {}
        yield {
            **head,
            "variant": name,
            "rounds": rounds,
            "median_s": median,
            "spread": (max(taken) - min(taken)) / median,
            "scale": contest.scale.get(name, 1.0),
            "against": case.against,
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            # Of all threads: on a busy machine it says more than the clock does.
            "processor_s": statistics.median(processor[name]),
            "ratio_quartiles": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)],
            **rate,
        }


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, all queued GPU work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _cpu() -> str:
    """Name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short hash of the checkout, with + for uncommitted changes; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
