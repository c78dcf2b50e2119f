"""The tables of docs/performance.md from what run.py printed: `python benchmarks/table.py build/bench.jsonl --write`.

Without --write they go to stdout. They replace what stands between the two marks in the page, and nothing else.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- begin: make bench-docs -->", "<!-- end: make bench-docs -->"
# Above so much load a core the machine had other things to do.
_BUSY = 0.5


def tables(records: list[dict[str, Any]]) -> str:
    """Markdown: the machine, a table for each case and for each axis of growth. Raises ValueError without a machine."""
    if not records or "device_name" not in records[0]:
        raise ValueError("the first line must be the environment that run.py prints")
    machine, rest = records[0], records[1:]
    parts = [_machine(machine)]
    for name in dict.fromkeys(r["case"] for r in rest if r["case"] != "growth"):
        parts.append(_case([r for r in rest if r["case"] == name]))
    for axis in dict.fromkeys(r["axis"] for r in rest if r["case"] == "growth"):
        parts.append(_growth(axis, [r for r in rest if r.get("axis") == axis]))
    return "\n\n".join(parts)


def _machine(e: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items() if v)
    load = e.get("load")
    busy = load is not None and load > _BUSY * e["cpus"]
    note = (
        f" **The machine was busy (load {load:.1f}): only ratios mean something, and they are rough.**" if busy else ""
    )
    return (
        f"{e['cpus']} cores of {e['device_name']}, {e['threads']} torch threads, Python {e['python']}, {versions}; "
        f"commit {e['commit']}.{note}"
    )


def _case(records: list[dict[str, Any]]) -> str:
    first = records[0]
    if "failed" in first:
        return f"**{first['case']}**: {first['about']}. Not timed: {first['failed']}."
    lines = [
        f"**{first['case']}**: {first['about']} ({first['rounds']} rounds).",
        "",
        f"| variant | seconds | spread | time against {first['against']} |",
        "|---|---|---|---|",
    ]
    for r in records:
        low, high = (1 / x for x in reversed(r["ratio_range"]))
        lines.append(
            f"| {r['variant']} | {r['median_s']:.3g} | {100 * r['spread']:.0f} % "
            f"| {1 / r['ratio']:.2f} ({low:.2f} … {high:.2f}) |"
        )
    return "\n".join(lines)


def _growth(axis: str, records: list[dict[str, Any]]) -> str:
    lines = [f"**growth over {axis}**", "", f"| {axis} | rows | seconds | peak MB |", "|---|---|---|---|"]
    for r in records:
        if "failed" in r:
            lines.append(f"| {r['size']} | not measured: {' '.join(r['failed'])} | | |")
        elif "size" in r:
            lines.append(f"| {r['size']:,} | {r['rows']:,} | {r['median_s']:.3g} | {r['peak_mb']:.0f} |")
    for r in records:
        if "exponent" in r:
            rows = "" if r["rows_exponent"] is None else f", with rows^{r['rows_exponent']:.2f}"
            memory = f"peak memory with {axis}^{r['memory_exponent']:.2f}"
            lines += ["", f"Time grows with {axis}^{r['exponent']:.2f}{rows}; {memory}."]
    return "\n".join(lines)


def written(page: str, made: str) -> str:
    """The page with ``made`` between its marks. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(words: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.name}")
    options = parser.parse_args(None if words is None else list(words))
    made = tables([json.loads(line) for line in options.results.read_text().splitlines() if line.strip()])
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), made))
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
