"""Results of a matrix made up from a contract: what every prompt gave is said by a function, no model runs."""

import json
from collections.abc import Callable
from pathlib import Path

from replayscope.inspector import judge_contract, judge_matrix
from replayscope.inspector.judge_results import Results, Store, read

CONTRACT = """
name = "made up"
[evidence]
samples = 60
resamples = 200
[[limit]]
metric = "kl"
at_most = 0.1
[[limit]]
metric = "jump"
at_most = 0.05
[[limit]]
metric = "window_kv"
region = "window"
layer = 0
statistic = "max"
at_most = 1e-5
[[limit]]
metric = "ttft"
statistic = "q50"
at_most = 1.0
[[matrix]]
tasks = ["passkey.before", "passkey.straddle"]
lengths = [320]
"""
# The smallest matrix that a model really runs; ``TINY.format(samples=…, evidence=…, matrix=…)`` adds lines of TOML.
TINY = """
name = "tiny"
[evidence]
samples = {samples}
resamples = 50
{evidence}
[[limit]]
metric = "kl"
at_most = 100
[[matrix]]
tasks = ["chain.straddle"]
lengths = [70]
suffixes = ["none"]
{matrix}
"""
Outcome = Callable[[str, str, int], dict]


def contract(text: str = CONTRACT, **changed: str) -> judge_contract.Contract:
    """The contract above with some of its text replaced: old='new'."""
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    return judge_contract.parse(text, "made.toml")


def good(group: str, run: str, i: int) -> dict:
    """Nothing drops: every prompt succeeds, and replay changes a little."""
    replays = not run.startswith(("full", "hit"))
    return {"exact": True, "kl": [0.01 + 0.001 * (i % 7)] * 4 if replays else [0.0] * 4}


def results(asked: judge_contract.Contract, outcome: Outcome = good, header: dict | None = None) -> Results:
    """A finished matrix. outcome(group, run, number of the prompt) gives the fields of a run that differ."""
    made = Results(_header(asked) | (header or {}), complete=True)
    for group in judge_matrix.groups(asked):
        for i in range(asked.evidence.samples):
            runs = [_run("full", outcome(group.label, "full", i))]
            runs += [_run(run.label, outcome(group.label, run.label, i)) for run in group.runs]
            line = {"kind": "prompt", "group": group.label, "seed": 1000 + i, "tokens": 320, "runs": runs}
            made.prompts.append(line)
        times = dict.fromkeys(("full", "hit", "encoder", "decoder", "both"), 0.5) | {"full": 1.0}
        arms = {
            name: {"ttft": t + 0.01 * len(made.costs), "per_token": 0.1, "steps": 5, "replayed": 32, "cached": 256,
                   "fresh": 64, "global_bytes": 1000, "window_bytes": 0}
            for name, t in times.items()
        }  # fmt: skip
        made.costs.append({"kind": "cost", "group": group.label, "seed": 1000, "tokens": 320, "arms": arms})
    return made


def _header(asked: judge_contract.Contract) -> dict:
    began = {"name": asked.name, "sha256": asked.sha256, "frozen": {"date": "2026-11-01"}, "text": asked.text}
    return {"contract": began, "model": "mini", "cells": "*", "plants": {}, "made": {"source": "made.toml"}}


def _run(run: str, told: dict) -> dict:
    return {
        "run": run, "cut": 256, "replayed": 32, "cached": 256, "fresh": 64, "planned": [32, 256], "changed": 0,
        "share": float(told["exact"]), "text": "", "kl": [0.0] * 4, "kl_free": [0.0] * 4, "differs": [0] * 4,
        "states": {"window_kv.window": [1e-7, 0.2], "hidden.suffix": [1e-3, 0.1], "hidden.last": [1e-3, None]},
    } | told  # fmt: skip


def write(path: Path, made: Results) -> Path:
    """The results as a file."""
    with Store(path, made.header) as store:
        for line in (*made.prompts, *made.costs):
            store.add(line)
        store.seal()
    assert json.dumps(read(path).prompts) == json.dumps(made.prompts)
    return path
