"""The use cases of `judge` that run something: what a matrix would cost, and the matrix itself, on a model."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from replayscope.inspector import judge_matrix as matrix
from replayscope.inspector import judge_prompts, judge_text, samples
from replayscope.inspector.backend import Decoder, Runnable
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.judge_contract import Contract
from replayscope.inspector.judge_costs import cost_lines
from replayscope.inspector.judge_limits import check_layers
from replayscope.inspector.judge_matrix import Group, Prompt
from replayscope.inspector.judge_pace import Pace
from replayscope.inspector.judge_results import Store, header_of, read
from replayscope.inspector.judge_run import group_lines, planted
from replayscope.inspector.judge_tokens import Text, of_tokenizer
from replayscope.inspector.judge_verdict import judge
from replayscope.inspector.names import counted
from replayscope.inspector.options import Result
from replayscope.inspector.semantics import unsuited, valid_arms
from replayscope.inspector.usecases import DTYPES
from replayscope.model import presets, tokenizer
from replayscope.model.hf_config import is_hf
from replayscope.model.streaming import StreamedModel
from replayscope.model.weights import WeightsError

log = logging.getLogger(__name__)
FILLER = "prose"
_CUTS = (
    "a task's cut is a character; it moves down to the last token that the text before it shares with the prompt, as "
    "the hit of a prefix cache would"
)


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


@dataclass(frozen=True)
class _Asked:
    """A model that can be asked, with the groups of the contract that it can run. weights: their hash or commit.

    without: arms of the contract that it does not have, and why; notes: what results have to say of the prompts.
    """

    executor: Decoder
    text: Text
    weights: str
    groups: list[Group]
    without: Mapping[str, str]
    notes: list[str]

    @property
    def model(self) -> Runnable:
        return self.executor.model

    @property
    def config(self) -> Geometry:
        return self.executor.model.config


def plan(asked: JudgeRun) -> Result:
    """The cells, and what they would cost here: a pass of the first group is run to tell the time."""
    one = _load(asked)
    e, groups = asked.contract.evidence, one.groups
    rows, prompts, table = 0, 0, []
    for group in groups:
        n = len(group.seeds(e))
        prompt = _first(group, asked.contract, one.text)
        each = matrix.rows(one.config, group, prompt)
        rows += each * n
        prompts += n
        needed = asked.contract.needed(group.task)
        cells = len([run for run in group.runs if run.arm != matrix.CONTROL])
        sizes = {"tokens": len(prompt.ids), "n": n, "n needed": needed, "rows": each * n}
        table.append({"prompts": group.label, "cells": cells, **sizes})
    per_row = _seconds_per_row(one, asked.contract)
    cells = [group.cell(run) for group in groups for run in group.runs if run.arm != matrix.CONTROL]
    short = [row["prompts"] for row in table if row["n"] < row["n needed"]]
    lines = [
        *judge_text.table(table),
        "",
        f"{counted(len(cells), 'cell')}, {counted(prompts, 'prompt')}, {rows:,} rows; "
        f"about {rows * per_row:.0f} s on this machine",
        f"a drop below {e.budget:.1%} can be shown with the prompts needed, if nothing differs",
        *(f"note: {name} has too few prompts to show anything" for name in short),
        *(f"note: {note}" for note in one.notes),
        asked.contract.stamp,
    ]
    data = {"groups": table, "cells": cells, "rows": rows, "seconds": rows * per_row, "contract": asked.contract.stamp}
    return Result("\n".join(lines), data | {"notes": one.notes})


def run(asked: JudgeRun) -> Result:
    """Run what is not in the results file yet, then judge."""
    one = _load(asked)
    groups, executor, text = one.groups, one.executor, one.text
    header = header_of(asked.contract, asked.model, asked.cells, asked.source) | {
        "weights_sha256": one.weights,
        "dtype": str(one.model.dtype).removeprefix("torch."),
        "device": str(one.model.device),
        "plants": dict(asked.plants or {}),
    }
    if one.notes:
        header |= {"notes": one.notes, "without": dict(one.without)}
    _check_plants(one, asked)
    e = asked.contract.evidence
    rows = {group.label: matrix.rows(one.config, group, _first(group, asked.contract, text)) for group in groups}
    counts = {group.label: len(group.seeds(e)) for group in groups}
    with Store(asked.out, header, asked.force) as store:
        pace = Pace(rows, counts, store.done)
        if store.done and not store.complete:
            log.info("%d of %d prompts are in %s already", pace.there, pace.prompts, asked.out)
        try:
            for group in groups:
                for lines in group_lines(asked.contract, group, text, store.done, asked.plants or {}, executor):
                    for line in lines:
                        store.add(line)
                    pace.add(group.label, len(lines))
                for line in cost_lines(asked.contract, group, text, store.timed, executor):
                    store.add(line)
        except KeyboardInterrupt:
            log.info("%d of %d prompts are in %s; the same command goes on", pace.there, pace.prompts, asked.out)
            raise
        store.seal()
    return judge_text.result(judge(read(asked.out), asked.contract), asked.out)


def _first(group: Group, contract: Contract, text: Text) -> Prompt:
    return matrix.prompt(group, group.seeds(contract.evidence)[0], text)


def _check_plants(one: _Asked, asked: JudgeRun) -> None:
    """Before anything is written: a prompt of every kind, with what is planted in it."""
    plants, config = asked.plants or {}, one.config
    for glob, arm in plants.items():
        if arm.startswith("broken:floor@") and arm not in valid_arms(config):
            last = config.num_hidden_layers - 1
            raise UsageError(f"--plant {glob}={arm}: {asked.model} has the layers 0 to {last}")
        if not any(matrix.named(group, run, glob) for group in one.groups for run in group.runs):
            raise UsageError(f"--plant: no cell is called {glob!r}")
    for group in one.groups:
        if not any(matrix.named(group, run, glob) for run in group.runs for glob in plants):
            continue
        prompts = [matrix.prompt(group, seed, one.text) for seed in group.kinds(asked.contract.evidence)]
        made = (r for p in prompts for r in matrix.requests(config, group, p, "p", matrix.steps(group, [p])))
        for run, right in made:
            if run is not None:
                try:
                    planted(config, group.cell(run), right, plants)
                except UsageError as error:
                    raise UsageError(f"--plant cannot break {group.cell(run)}: {error}") from None


def _load(asked: JudgeRun) -> _Asked:
    """Raises UsageError for a model that cannot be asked, and for prompts that it cannot take."""
    hf = is_hf(asked.model)
    try:
        executor, text, weights = (_load_hf if hf else _load_preset)(asked)
    except WeightsError as error:
        raise UsageError(str(error)) from error
    config = executor.model.config
    arms = dict.fromkeys(arm for block in asked.contract.matrix for arm in block.arms)
    without = {arm: why for arm in arms if (why := unsuited(config, arm))}
    if len(without) == len(arms):
        whys = ", ".join(dict.fromkeys(without.values()))
        raise UsageError(f"[[matrix]] arms: {asked.model} has none of {', '.join(arms)}: {whys}; ask for encoder")
    check_layers(asked.contract, Path(asked.source).name, asked.model, config)
    notes = [_CUTS] if hf else []
    notes += [f"{arm} is no arm of this model, so its cells do not run: {why}" for arm, why in without.items()]
    groups = matrix.groups(asked.contract, asked.cells, without)
    judge_prompts.check(groups, asked.contract.evidence, text, asked.model, config)
    for note in notes:
        log.info("%s", note)
    return _Asked(executor, text, weights, groups, without, notes)


def _load_preset(asked: JudgeRun) -> tuple[Decoder, Text, str]:
    if asked.model not in presets.presets():
        raise UsageError(f"{asked.model} comes without a tokenizer, so no task can be asked of it; give a preset")
    model, weights = presets.load_any(asked.model, DTYPES[asked.dtype], _device(asked.device))
    if isinstance(model, StreamedModel):
        raise UsageError(f"{asked.model} does not fit into the free memory; judge decodes, and needs all of it")
    text = Text(tokenizer.encode, tokenizer.decode, samples.load(FILLER))
    return Executor(model, keep_state=True), text, weights


def _load_hf(asked: JudgeRun) -> tuple[Decoder, Text, str]:
    """Raises UsageError without the extra."""
    try:
        from replayscope.inspector import hf_load
    except ImportError as error:
        raise UsageError(f"{asked.model} needs {error.name}: pip install 'replayscope[hf]'") from error
    executor, own, weights = hf_load.load_decoder(asked.model, DTYPES[asked.dtype], _device(asked.device))
    return executor, of_tokenizer(own, samples.load(FILLER)), weights


def _device(name: str) -> torch.device:
    here = torch.cuda.is_available()
    if name.startswith("cuda") and not here:
        raise UsageError(f"device {name} is not here; use --device cpu")
    return torch.device(("cuda" if here else "cpu") if name == "auto" else name)


def _seconds_per_row(one: _Asked, contract: Contract) -> float:
    group, began = one.groups[0], time.perf_counter()
    lines = next(group_lines(contract, group, one.text, set(), {}, one.executor))
    spent = time.perf_counter() - began
    prompts = [matrix.prompt(group, line["seed"], one.text) for line in lines]
    return spent / sum(matrix.rows(one.config, group, prompt) for prompt in prompts)
