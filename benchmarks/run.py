"""Run the table of cases and print one JSON object a line: `python benchmarks/run.py [--only NAME] [--device cuda]`.

The first line is the environment. Exit code 1 if a check failed.
"""

import argparse
import json
import sys

import torch
from cases import CASES
from harness import environment, run_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", choices=[case.name for case in CASES])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args()
    device = torch.device(options.device)
    chosen = [case for case in CASES if options.only is None or case.name in options.only]
    if options.list:
        for case in chosen:
            print(f"{case.name}: {case.about}")
        return 0
    print(json.dumps(environment(device)), flush=True)
    failed = False
    for case in chosen:
        if device.type not in case.devices:
            continue
        for record in run_case(case, device, options.rounds):
            failed |= "failed" in record
            print(json.dumps(record), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
