"""Every family that was tried, through the command line: right arms agree with their oracles, planted faults do not.

All runs are in fp64, where the models' inner casts to fp32 are widened; so what separates two right ways of computing
the same thing is rounding in fp64, and the verdict's own bound (1e-12, or ten floors) is far below the 1e-9 asked for.
"""

import importlib.util

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from replayscope.inspector.capture import Capture
from replayscope.inspector.hf_executor import HFExecutor
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import Shape, request
from replayscope.model.hf_families import CHECKPOINTS, FAMILIES, TRIED_WITH
from replayscope.model.hf_wide import widened
from replayscope.traces.reader import TraceReader
from tests import hf

N, W = hf.N, hf.W
CUTS = (W, W + 1, 2 * W, N - 1)
ARMS = "full,repeat,rechunk,hit,encoder,exact,broken:*"
# Two right ways differ by rounding that passes six layers: measured at 2e-14 and below.
ROUNDING = 1e-12

families = pytest.mark.parametrize("family", FAMILIES)


def worst(trace: TraceReader, reference: str, bucket: str = "all") -> np.ndarray:
    """Largest row error of each run over all points of a reference: [run]."""
    tables = [trace.table(reference, p) for p in trace.points(reference)]
    return np.max([t.arrays["rel_max"][:, :, t.bucket(bucket)].max(1) for t in tables if "rel_max" in t.arrays], 0)


@families
def test_sweep_agrees_with_the_oracle_and_finds_every_planted_fault(family, tmp_path, capsys):
    out = tmp_path / "t.h5"
    cuts = ",".join(map(str, CUTS))
    words = ("sweep", "-m", hf.folder(family), "-p", hf.PROMPT, "--cuts", cuts, "--arms", ARMS, "--audit")
    code, _, err = hf.run(capsys, *words, "--dtype", "fp64", "-o", out)
    assert code == 0, err
    trace = TraceReader(out)
    layers = trace.config["replayscope"]["layers"]
    oracle, exact, full = worst(trace, "oracle"), worst(trace, "full", "exact"), worst(trace, "full")
    noise = max(full[r.index] for r in trace.runs if r.arm in ("repeat", "rechunk", "hit"))
    assert noise < ROUNDING
    kinds = {"start+1", "start-1", "window+1", "stale"} | ({"overwrite"} if "global" in layers else set())
    found = set()
    for r in trace.runs:
        if r.arm.startswith("broken:"):
            # A planted fault is no rounding.
            assert oracle[r.index] > 1e6 * noise, r.label
            assert (r.cached_changed > 0) == (r.arm == "broken:overwrite")
            found.add(r.arm.removeprefix("broken:"))
        elif not r.arm.startswith("oracle:"):
            assert oracle[r.index] <= max(10 * noise, 1e-13), r.label
            assert exact[r.index] <= max(10 * noise, 1e-13), r.label
            assert r.cached_changed == 0
    assert {kind for kind in found if not kind.startswith("floor@")} == kinds
    assert {layers[int(kind[6:])] for kind in found - kinds} == {"window"} and len(found - kinds) == 3
    # Beyond one window the replay loses something, and nothing within it.
    lost = {r.cut: full[r.index] for r in trace.runs if r.arm == "encoder"}
    assert all((lost[cut] > 1e-3) == (cut > W) for cut in CUTS)
    checked = [r.cached_checked for r in trace.runs if r.arm == "encoder" and r.cut == 2 * W]
    own_global = {s for l, s in enumerate(trace.config["replayscope"]["kv_sources"]) if layers[l] == "global"}
    assert checked == [2 * W * len(own_global)]


def logits(model, arm: str, cut: int | None = None, **options: int) -> torch.Tensor:
    """Logits [rows, V] of one arm, and of full before it."""
    shape = Shape(model.config, N)
    plan = Plan(tuple(request(shape, a, c) for a, c in {"full": None, arm: cut}.items()))
    executor = HFExecutor(model, **options)
    with Capture(executor, ["logits"]) as captured:
        for _ in executor.run(plan, {"prompt": hf.IDS}):
            pass
    return captured.states[len(plan.requests) - 1, "logits"].values


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@families
def test_full_and_hit_are_what_the_model_does_by_itself(family):
    """Without masks, without our cache: a plain forward, and the library's own cache that keeps W-1 rows."""
    model, cut = hf.model(family), 2 * W + 1
    with torch.no_grad(), widened(model.dtype):
        own = model.module(input_ids=hf.IDS[None]).logits[0]
        cache = DynamicCache(config=model.text_config)
        model.module(input_ids=hf.IDS[None, :cut], cache=cache, use_cache=True)
        after = model.module(input_ids=hf.IDS[None, cut:], cache=cache, use_cache=True).logits[0]
    assert off(logits(model, "full"), own) < ROUNDING
    assert off(logits(model, "hit", cut), after) < ROUNDING
    # The twin: a replay that has lost its window is not what the model does.
    assert off(logits(model, "encoder", cut)[W:], after) > 1e-3


@pytest.mark.parametrize("family", ["gpt-oss", "gemma-4", "mistral"])
def test_blocks_and_batches_change_nothing_but_rounding(family):
    model = hf.model(family)
    whole = logits(model, "encoder", 2 * W + 1)
    assert off(logits(model, "encoder", 2 * W + 1, block=5), whole) < ROUNDING


def test_the_table_says_which_version_was_tried(root):
    pinned = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pinned["transformers"] == TRIED_WITH


def test_the_page_of_models_is_what_its_command_writes(root):
    """The facts of the configs and the commands; what was measured is not measured again."""
    spec = importlib.util.spec_from_file_location("hf_models", root / "benchmarks" / "hf_models.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    page = (root / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [writer.config_row(name, tried) for name, tried in FAMILIES.items()]
    assert writer.table(writer.CONFIG_HEAD, rows) in page
    assert all(writer.command(name) in page for name in CHECKPOINTS.values()) and TRIED_WITH in page
    measured = [line.split(" | ") for line in page.split("## Tiny random models")[1].splitlines() if "e-1" in line]
    assert [row[0].removeprefix("| ") for row in measured] == list(FAMILIES)
    assert all(float(cell) < ROUNDING for row in measured for cell in row[1:4])
