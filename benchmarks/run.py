"""Run the table of cases and print one JSON object a line: `python benchmarks/run.py [--only NAME] [--device cuda]`.

The first line is the environment, the last ones how a sweep grows (on a CPU). Exit code 1 if a check failed.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# As the command line does: threads that wait by spinning take the time of those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from cases import CASES
from growth import AXES, BASE, QUICK, QUICK_BASE, grow
from harness import environment, run_case


def records(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """What was asked for, measured one after another."""
    for case in CASES:
        if device.type in case.devices and (options.only is None or case.name in options.only):
            yield from run_case(case, device, options.rounds or (1 if options.quick else case.rounds))
    if device.type == "cpu" and (options.only is None or "growth" in options.only):
        yield from grow(QUICK, QUICK_BASE, 1) if options.quick else grow(AXES, BASE, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*(case.name for case in CASES), "growth"]
    parser.add_argument("--only", action="append", metavar="NAME", choices=names)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="how often each variant is timed (default: as the case says)")
    parser.add_argument("--quick", action="store_true", help="everything once, growth at small sizes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the lines there as well")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args()
    if options.list:
        for case in CASES:
            print(f"{case.name}: {case.about}")
        print("growth: time and memory of a sweep over tokens, cuts and layers")
        return 0
    device = torch.device(options.device)
    failed = False
    with options.out.open("w") if options.out else nullcontext() as file:
        for record in itertools.chain([environment(device)], records(options, device)):
            failed |= "failed" in record
            for out in (sys.stdout, file):
                if out is not None:
                    print(json.dumps(record), file=out, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
