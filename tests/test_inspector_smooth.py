"""Smooth or discrete: frozen arms, dense selection, frozen experts, rounding off; each agrees with its own oracle."""

import numpy as np
import pytest
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.runner import run
from replayscope.inspector.semantics import FREEZABLE
from tests import v41

W = 6
EQUAL = 1e-12  # fp64 runs that are equal on paper: measured 1e-14 on these weights
POINTS = ("window_kv", "attn_out", "hidden", "topk", "router", "logits")


def judge(arms, variant="plain", cuts=(16, 41), **switches):
    job = Job(v41.shape(), arms, cuts, (W,), oracles=True, points=POINTS, **switches)
    line, _ = line_up(job)
    model = v41.model(torch.float64, variant)
    ex = Executor(model, frozen_experts=job.frozen_experts, dense=job.dense)
    return run(model, v41.ids(), job, line, ex)


def error(fold, reference, run_, point="hidden", bucket="all"):
    table = fold.tables[reference, point]
    return float(table.arrays["rel_max"][run_.index, :, table.bucket(bucket)].max())


def changed(fold, run_, point):
    table = fold.tables["full", point]
    return int(table.arrays["changed"][run_.index, :, 0].sum())


def test_frozen_arms_take_fulls_choices_and_agree_with_their_oracles():
    fold, runs = judge((*(f"frozen:{a}" for a in FREEZABLE), "encoder"))
    for r in runs:
        if r.arm.startswith("frozen:"):
            assert changed(fold, r, "topk") == changed(fold, r, "router") == 0
            assert error(fold, "oracle", r) <= EQUAL, r.label
    free = {r.cut: error(fold, "full", r) for r in runs if r.arm == "encoder"}
    frozen = {r.cut: error(fold, "full", r) for r in runs if r.arm == "frozen:encoder"}
    # What is left without changed choices is smaller, and not nothing.
    assert all(1e-3 < frozen[cut] < free[cut] for cut in free)
    encoder = [r for r in runs if r.arm == "encoder"]
    assert all(changed(fold, r, "topk") + changed(fold, r, "router") > 0 for r in encoder)


@pytest.mark.parametrize(
    "switches", [{"dense": True}, {"frozen_experts": True}, {"dense": True, "frozen_experts": True}]
)
def test_switches_agree_with_the_oracle_and_change_the_run(switches):
    fold, runs = judge(("encoder", "hit", "both"), **switches)
    plain, plain_runs = judge(("encoder", "hit", "both"))
    for r in runs:
        if r.oracle is not None:
            assert error(fold, "oracle", r) <= EQUAL, r.label
            for choice in ("topk", "router"):
                # What is chosen is the same too, read or not: the candidates bound it under every switch.
                assert not fold.tables["oracle", choice].arrays["changed"][r.index].any(), (r.label, choice)
        if r.arm == "hit":
            assert error(fold, "full", r) <= EQUAL
    enc, was = (next(r for r in rs if r.arm == "encoder") for rs in (runs, plain_runs))
    assert abs(error(fold, "full", enc) - error(plain, "full", was)) > 1e-4
    if "frozen_experts" in switches:
        assert changed(fold, enc, "router") == 0


def test_dense_attention_reads_every_visible_entry():
    """The twin of the switch: with a top-k as large as the prompt, sparse is dense."""
    from dataclasses import replace

    from replayscope.inspector.semantics import request

    model = v41.model()
    wide = replace(model, config=replace(model.config, index_topk=v41.TOKENS, candidate_topk_blocks=v41.TOKENS))
    requests = [request(v41.shape(), "full"), request(v41.shape(), "encoder", 40)]
    a = v41.rows(Executor(model, dense=True), requests)
    b = v41.rows(Executor(wide), requests)
    c = v41.rows(Executor(model), requests)
    for i in (0, 1):
        assert v41.relative(a[i]["logits"], b[i]["logits"]) <= EQUAL
        assert v41.relative(a[i]["logits"], c[i]["logits"]) > 1e-3


def test_released_rounding_and_engram_under_replay_agree_with_the_oracle():
    fold, runs = judge(("encoder", "hit", "decoder", "both"), "released", cuts=(16, 24, 41))
    for r in runs:
        if r.oracle is not None:
            # A bin that flips between the two would show as a step of the format, far above this.
            assert error(fold, "oracle", r) <= EQUAL, r.label
    assert np.isfinite(fold.tables["full", "logits"].arrays["kl_max"]).all()


def test_the_smooth_share_is_said_and_follows_from_the_tables(tmp_path, capsys):
    import json
    import shutil

    from replayscope.inspector.cli import main
    from replayscope.inspector.metrics import metric
    from replayscope.traces.reader import TraceReader

    shutil.copy(v41.ROOT / "plain" / "config.json", tmp_path)
    shutil.copy(v41.ROOT / "weights" / "model.safetensors", tmp_path)
    ids = "ids:" + ",".join(map(str, v41.ids().tolist()))
    arms = "full,repeat,rechunk,hit,encoder,frozen:encoder"
    words = ["sweep", "-m", str(tmp_path), "-p", ids, "--arms", arms, "--cuts", "16,41", "-o", str(tmp_path / "t.h5")]
    assert main([*words, "--json", "-q"]) == 0
    said = {(s["point"], s["region"]): s for s in json.loads(capsys.readouterr().out)["smooth"]}
    trace = TraceReader(tmp_path / "t.h5")
    at = {(r.arm, r.cut): r.index for r in trace.runs}
    table = trace.table("full", "hidden")
    value = metric(table, "rel_l2")[:, :, table.bucket("suffix")]
    # Layer 0 leaves row H-1 and all behind it exact; every other layer is above the floor here.
    ratios = [value[at["frozen:encoder", cut], 1:] / value[at["encoder", cut], 1:] for cut in (16, 41)]
    share = said["hidden", "suffix"]
    assert share["cells"] == 2 * (v41.config().num_hidden_layers - 1)
    assert share["share"] == pytest.approx(float(np.median(np.concatenate(ratios))))
