"""The use cases of `judge` that run something: what a matrix would cost, and the matrix itself, on a model."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from replayscope.inspector import judge_matrix as matrix
from replayscope.inspector import judge_text, samples
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.judge_contract import Contract
from replayscope.inspector.judge_costs import cost_lines
from replayscope.inspector.judge_matrix import Group
from replayscope.inspector.judge_results import Store, header_of, read
from replayscope.inspector.judge_run import Text, group_lines, planted
from replayscope.inspector.judge_verdict import judge
from replayscope.inspector.names import counted
from replayscope.inspector.options import Result
from replayscope.inspector.semantics import valid_arms
from replayscope.inspector.usecases import DTYPES
from replayscope.model import presets, tokenizer
from replayscope.model.streaming import StreamedModel
from replayscope.model.weights import Model, WeightsError

log = logging.getLogger(__name__)
FILLER = "prose"


@dataclass(frozen=True)
class JudgeRun:
    """A matrix to be run on a model. source: how the contract was named; cells: a glob of cells, '*' for all. plants:
    cell globs → broken arm that runs there under the name of the right one."""

    contract: Contract
    source: str
    model: str = "mini"
    out: Path = Path("results.jsonl")
    cells: str = "*"
    plants: Mapping[str, str] | None = None
    device: str = "auto"
    dtype: str = "fp32"
    force: bool = False


def plan(asked: JudgeRun) -> Result:
    """The cells, and what they would cost here: a pass of the first group is run to tell the time."""
    model, _ = _load(asked)
    groups, words = matrix.groups(asked.contract, asked.cells), text_of()
    matrix.check_lengths(groups, asked.model, model.config.max_position_embeddings)
    rows, table = 0, []
    n = asked.contract.evidence.samples
    for group in groups:
        each = matrix.rows(model.config, group, matrix.prompt(group, asked.contract.evidence.seed, *words[:2]))
        rows += each * n
        needed = asked.contract.needed(group.task)
        cells = len([run for run in group.runs if run.arm != matrix.CONTROL])
        table.append({"prompts": group.label, "cells": cells, "n": n, "n needed": needed, "rows": each * n})
    per_row = _seconds_per_row(model, asked.contract, groups[0])
    cells = [group.cell(run) for group in groups for run in group.runs if run.arm != matrix.CONTROL]
    short = [row["prompts"] for row in table if row["n"] < row["n needed"]]
    lines = [
        *judge_text.table(table),
        "",
        f"{counted(len(cells), 'cell')}, {counted(len(groups) * n, 'prompt')}, {rows:,} rows; "
        f"about {rows * per_row:.0f} s on this machine",
        f"a drop below {asked.contract.evidence.budget:.1%} can be shown with the prompts needed, if nothing differs",
        *(f"note: {name} has too few prompts to show anything" for name in short),
        asked.contract.stamp,
    ]
    data = {"groups": table, "cells": cells, "rows": rows, "seconds": rows * per_row, "contract": asked.contract.stamp}
    return Result("\n".join(lines), data)


def run(asked: JudgeRun) -> Result:
    """Run what is not in the results file yet, then judge."""
    model, weights = _load(asked)
    groups, (encode, filler, decode) = matrix.groups(asked.contract, asked.cells), text_of()
    matrix.check_lengths(groups, asked.model, model.config.max_position_embeddings)
    words = Text(encode, decode, filler)
    header = header_of(asked.contract, asked.model, asked.cells, asked.source) | {
        "weights_sha256": weights,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "plants": dict(asked.plants or {}),
    }
    _check_plants(model, groups, asked)
    executor = Executor(model, keep_state=True)
    began, total = time.perf_counter(), len(groups) * asked.contract.evidence.samples
    with Store(asked.out, header, asked.force) as store:
        left = total - len(store.done)
        if store.done and not store.complete:
            log.info("%d of %d prompts are in %s already", len(store.done), total, asked.out)
        ran = 0
        for group in groups:
            for lines in group_lines(model, asked.contract, group, words, store.done, asked.plants or {}, executor):
                for line in lines:
                    store.add(line)
                ran += len(lines)
                log.debug("%d of %d prompts", ran, left)
            for line in cost_lines(model, asked.contract, group, words, store.timed, executor):
                store.add(line)
            if ran:
                spent = time.perf_counter() - began
                log.info("%d/%d prompts, %s, %.0f s left", ran, left, group.label, spent / ran * (left - ran))
        store.seal()
    return judge_text.result(judge(read(asked.out), asked.contract), asked.out)


def text_of() -> tuple[matrix.Encode, str, matrix.Decode]:
    """Encoding, filler and decoding of the embedded tokenizer."""
    return tokenizer.encode, samples.load(FILLER), tokenizer.decode


def _check_plants(model: Model, groups: list[Group], asked: JudgeRun) -> None:
    """Before anything is written: the first prompt of every group, with what is planted in it."""
    encode, filler, _ = text_of()
    plants, config = asked.plants or {}, model.config
    for glob, arm in plants.items():
        if arm.startswith("broken:floor@") and arm not in valid_arms(config):
            last = config.num_hidden_layers - 1
            raise UsageError(f"--plant {glob}={arm}: {asked.model} has the layers 0 to {last}")
        if not any(matrix.named(group, one, glob) for group in groups for one in group.runs):
            raise UsageError(f"--plant: no cell is called {glob!r}")
    for group in groups:
        one = matrix.prompt(group, asked.contract.evidence.seed, encode, filler)
        if not any(matrix.named(group, run, glob) for run in group.runs for glob in plants):
            continue
        for run, right in matrix.requests(config, group, one, "p", matrix.steps(group, [one])):
            if run is not None:
                try:
                    planted(config, group.cell(run), right, plants)
                except UsageError as error:
                    raise UsageError(f"--plant cannot break {group.cell(run)}: {error}") from None


def _load(asked: JudgeRun) -> tuple[Model, str]:
    if asked.model not in presets.presets():
        raise UsageError(f"{asked.model} comes without a tokenizer, so no task can be asked of it; give a preset")
    try:
        model, weights = presets.load_any(asked.model, DTYPES[asked.dtype], _device(asked.device))
    except WeightsError as error:
        raise UsageError(str(error)) from error
    if isinstance(model, StreamedModel):
        raise UsageError(f"{asked.model} does not fit into the free memory; judge decodes, and needs all of it")
    return model, weights


def _device(name: str) -> torch.device:
    here = torch.cuda.is_available()
    if name.startswith("cuda") and not here:
        raise UsageError(f"device {name} is not here; use --device cpu")
    return torch.device(("cuda" if here else "cpu") if name == "auto" else name)


def _seconds_per_row(model: Model, contract: Contract, group: Group) -> float:
    encode, filler, decode = text_of()
    words, executor = Text(encode, decode, filler), Executor(model, keep_state=True)
    began = time.perf_counter()
    lines = next(group_lines(model, contract, group, words, set(), {}, executor))
    prompts = [matrix.prompt(group, line["seed"], encode, filler) for line in lines]
    return (time.perf_counter() - began) / sum(matrix.rows(model.config, group, one) for one in prompts)
