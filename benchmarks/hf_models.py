"""Writes docs/models.md: `python benchmarks/hf_models.py -o docs/models.md`.

What follows from each family's default config in transformers, and what bounded replay does on its tiny random model,
in fp64. The tiny models say that the arms are right and how they differ from the plain prefill, not how large the
difference is in a service: for that the last column has the command.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import transformers

from replayscope.inspector.metrics import metric
from replayscope.inspector.options import RunOptions
from replayscope.inspector.prompts import parse_prompt
from replayscope.inspector.semantics import exact_replay
from replayscope.inspector.usecases import write_trace
from replayscope.model.hf import say_less
from replayscope.model.hf_config import UnmappedError, map_config
from replayscope.model.hf_families import CHECKPOINTS, FAMILIES, TRIED_WITH, WINDOW, Family
from replayscope.model.hf_tiny import save_tiny
from replayscope.traces.reader import TraceReader

TOKENS, PROMPT = 40, 8192
CUTS = (WINDOW, WINDOW + 1, 2 * WINDOW, TOKENS - 1)
HEAD = Path(__file__).with_name("hf_models.md")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/models.md.")
    parser.add_argument("-o", "--out", type=Path, required=True)
    out = parser.parse_args().out
    say_less(0)
    text = HEAD.read_text(encoding="utf-8")
    facts = {"version": TRIED_WITH, "prompt": PROMPT, "tokens": TOKENS, "window": WINDOW, "two": 2 * WINDOW,
             "cuts": ", ".join(map(str, CUTS))}  # fmt: skip
    for name, value in facts.items():
        text = text.replace(f"{{{name}}}", str(value))
    rows = [config_row(name, tried) for name, tried in FAMILIES.items()]
    text = text.replace("{configs}", table(CONFIG_HEAD, rows))
    measured = [measured_row(name) for name in FAMILIES]
    text = text.replace("{measured}", table(MEASURED_HEAD, measured))
    commands = "\n".join(f"    {command(name)}" for name in CHECKPOINTS.values())
    out.write_text(text.replace("{commands}", commands), encoding="utf-8")


CONFIG_HEAD = ("family", "its own code does", "layers", "window layers", "W", "exact replay", f"of {PROMPT}", "R = W")
MEASURED_HEAD = (
    "family",
    "against the oracle",
    "in the exact region",
    "noise floor",
    "window KV",
    "hidden",
    "KL, nats",
)


def config_row(name: str, tried: Family) -> list[str]:
    """What follows from the default config of a family."""
    try:
        config = map_config(getattr(transformers, tried.config)())
    except UnmappedError:
        return [name, tried.has, *["set by the checkpoint"] * 2, *["–"] * 4]
    windows = sum(config.window_source(l) is not None for l in config.layers)
    exact = exact_replay(config)
    share = "all of it" if exact >= PROMPT else f"{exact / PROMPT:.0%}"
    bounded = f"{config.sliding_window / PROMPT:.1%}"
    return [name, tried.has, str(config.num_hidden_layers), f"{windows} ({windows / config.num_hidden_layers:.0%})",
            str(config.sliding_window), f"{exact:,}", share, bounded]  # fmt: skip


def measured_row(name: str) -> list[str]:
    """What a sweep over a tiny random model gives, the worst over its cuts."""
    print(name, file=sys.stderr)
    with TemporaryDirectory() as folder:
        model, trace = Path(folder) / name, Path(folder) / "t.h5"
        save_tiny(name, model)
        draw = np.random.default_rng(0).integers(3, 97, TOKENS)
        options = RunOptions(model=str(model), prompt=parse_prompt("ids:" + ",".join(map(str, draw))), out=trace,
                             arms=("full", "repeat", "rechunk", "hit", "encoder", "exact"), dtype="fp64", audit=True,
                             cuts=",".join(map(str, CUTS)), verbosity=-1)  # fmt: skip
        read = TraceReader(write_trace(options))
        right = [r.index for r in read.runs if r.arm in ("hit", "encoder", "exact")]
        noise = [r.index for r in read.runs if r.arm in ("repeat", "rechunk", "hit")]
        encoder = [r.index for r in read.runs if r.arm == "encoder" and r.cut == 2 * WINDOW]
        return [
            name,
            _worst(read, "oracle", "all", right),
            _worst(read, "full", "exact", right),
            _worst(read, "full", "all", noise),
            _cell(read, "window_kv", "rel_l2", encoder, "window"),
            _cell(read, "hidden", "rel_l2", encoder, "suffix"),
            _cell(read, "logits", "kl_max", encoder, "suffix"),
        ]


def _worst(trace: TraceReader, reference: str, bucket: str, runs: list[int]) -> str:
    tables = [trace.table(reference, point) for point in trace.points(reference)]
    cells = [t.arrays["rel_max"][runs, :, t.bucket(bucket)].max() for t in tables if "rel_max" in t.arrays]
    return f"{max(cells):.0e}"


def _cell(trace: TraceReader, point: str, name: str, runs: list[int], bucket: str) -> str:
    found = trace.table("full", point)
    return f"{np.nanmax(metric(found, name)[runs, :, found.bucket(bucket)]):.2g}"


def command(checkpoint: str) -> str:
    """The command that measures real weights."""
    return f"replayscope sweep -m {checkpoint} -p prose --cuts grid --suffix 64 -o T.h5"


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(head), ["---"] * len(head), *rows])


if __name__ == "__main__":
    main()
