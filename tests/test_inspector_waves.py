"""A sweep cut into parts by a row budget: the same numbers, bounded memory, and no more work than there must be."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from replayscope.inspector import usecases
from replayscope.inspector.cli import main
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.plan import Plan
from replayscope.inspector.runner import foreign_tokens, run
from replayscope.inspector.semantics import NOISE, request
from replayscope.inspector.waves import waves
from replayscope.traces.reader import TraceReader
from tests import v41

N, W = v41.TOKENS, 6
ARMS = ("broken:stale", "encoder", "repeat", "hit", "oracle:encoder")
CUTS = (16, 30, 41, 56)


def job(**changes) -> Job:
    return replace(Job(v41.shape(), ARMS, CUTS, (W,), 8), **changes)


def test_every_run_is_compared_once_and_owners_come_along():
    line, _ = line_up(job())
    budget = 4 * N + 60
    todo = waves(line, N, budget)
    assert len(todo) > 2
    compared = [run for wave in todo for own in wave.of for run in own]
    assert sorted(compared) == sorted(run for own in line.runs_of for run in own)
    assert sorted(k for wave in todo for k in wave.fresh) == list(range(len(line.oracle_runs)))
    for wave in todo:
        rows = sum(r.stop - r.start for r in wave.plan.requests) + sum(
            line.oracle_runs[k][2].stop for k in wave.oracles
        )
        # Plan itself refuses a request whose owner is missing.
        assert wave.plan.requests[0].arm == "full" and rows <= budget
    arms = [[line.runs[own[0]].arm in NOISE for own in wave.of if own and own[0]] for wave in todo]
    assert all(max(later) <= min(earlier) for earlier, later in pairwise(a for a in arms if a))


def test_what_fits_is_one_wave_in_the_order_of_the_plan():
    line, _ = line_up(job())
    (wave,) = waves(line, N)
    assert wave.plan.requests == line.plan.requests and wave.of == tuple(line.runs_of)


def test_a_budget_that_one_cut_does_not_fit_in_is_refused():
    line, _ = line_up(job(arms=("encoder",)))
    assert len(waves(line, N, N + W + 8)) == len(CUTS)
    with pytest.raises(UsageError, match=f"--budget {N + W + 7} is too small: full .* take {N + W + 8} rows"):
        waves(line, N, N + W + 7)


def folded(some: Job):
    line, _ = line_up(some)
    executor = Executor(v41.model(torch.float64), reproducible=True)
    told = []
    result = run(
        executor.model, v41.ids(), some, line, executor, lambda *now: told.append(now), foreign_tokens(v41.ids(), 0)
    )
    return *result, executor, told


def test_the_tables_do_not_depend_on_the_budget():
    """Bit by bit, in reproducible mode, flips apart: their floor is that of the noise runs so far."""
    whole, runs, *_ = folded(job())
    parts, same, _, told = folded(job(budget=4 * N + 60))
    assert runs == same and max(r.cached_checked for r in runs) > 0
    for key, table in whole.tables.items():
        assert np.abs(table.arrays["n"]).sum() > 0
        for name, values in table.arrays.items():
            if name != "flips":
                assert np.array_equal(values, parts.tables[key].arrays[name], equal_nan=True), (key, name)
    assert " of part 2 of " in "".join(what for _, _, what in told)


def test_memory_follows_the_budget_and_not_the_cuts():
    few = job(arms=("encoder",), cuts=CUTS[:2], budget=N + 2 * (W + 8))
    bytes_of = [folded(j)[2].pool.bytes for j in (few, replace(few, cuts=tuple(range(16, 60, 6))))]
    assert bytes_of[0] == bytes_of[1]
    # The twin: without a budget the cuts are all there at once.
    assert folded(replace(few, cuts=tuple(range(16, 60, 6)), budget=None))[2].pool.bytes > 1.5 * bytes_of[0]


def flops(requests) -> int:
    executor, before = Executor(v41.model(torch.float32)), torch.get_num_threads()
    torch.set_num_threads(1)  # the counter sees its own thread only
    try:
        with FlopCounterMode(display=False) as counter:
            for _ in executor.run(Plan(tuple(requests)), {"prompt": v41.ids()}, frozenset({"logits"})):
                pass
    finally:
        torch.set_num_threads(before)
    return counter.get_total_flops()


def test_cost_grows_with_the_rows_that_must_run():
    full = request(v41.shape(), "full")
    alone = flops([full])
    arms = [request(v41.shape(), "encoder", cut, W, 4) for cut in (20, 30, 40, 50)]
    more = [flops([full, *arms[:k]]) - alone for k in (1, 2, 4)]
    per_row = alone / N
    # A row costs what it costs in full; indexing reads as many entries as the last row of its block sees.
    for k, spent in zip((1, 2, 4), more, strict=True):
        assert 0.8 < spent / (k * (W + 4) * per_row) < 1.2
    # The twin: a prefill for each cut would cost this.
    assert more[-1] < 0.25 * 4 * alone


def test_no_entry_of_the_prefix_is_copied():
    full, encoder = request(v41.shape(), "full"), request(v41.shape(), "encoder", 40, W, 8)
    slots = {}
    for arms in ([full], [full, encoder]):
        executor = Executor(v41.model(torch.float32))
        executor.start(Plan(tuple(arms)), {"prompt": v41.ids()})
        slots[len(arms)] = [len(executor.layout.entries(l)[0]) for l in v41.config().kv_source_layer_ids]
    own = [48 // r - 40 // r for l in v41.config().kv_source_layer_ids if (r := v41.config().compress_ratios[l])]
    assert [b - a for a, b in zip(slots[1], slots[2], strict=True)] == own


def test_progress_ends_where_it_said_and_tells_the_time_left(monkeypatch, capsys):
    told = folded(job(arms=("encoder",)))[3]
    done, totals = [d for d, _, _ in told], {t for _, t, _ in told}
    assert done == sorted(done) and len(totals) == 1 and done[-1] == totals.pop() == 12 * (N + len(CUTS) * (W + 8))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    now = iter([10.0, 14.0, 18.0])
    tell = usecases._Progress(0, lambda: next(now))
    # Taken up at 20 of 100: the pace is that of what ran since.
    for at in (20, 40, 100):
        tell(at, 100, "layer")
    lines = capsys.readouterr().err.split("\r\033[K")
    assert lines[1:] == ["20/100 layer", "40/100 layer, 12 s left", "100/100 layer\n"]


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    """Layers that were compared are in the .partial, later ones are absent; the finished trace is not there."""
    out, frames = tmp_path / "t.h5", [0]
    ids = "ids:" + ",".join(map(str, range(1, 49)))
    words = f"sweep -q -p {ids} --cuts 40 --suffix 4 --arms encoder --device cpu -o {out}".split()
    layer = Executor._hand_out

    def interrupted(self, frame):
        frames[0] += len(self.plan.requests) > 1
        if frames[0] > 4:
            raise KeyboardInterrupt
        return layer(self, frame)

    monkeypatch.setattr(Executor, "_hand_out", interrupted)
    assert main(words) == 130 and not out.exists()
    partial = TraceReader(tmp_path / "t.h5.partial")
    n = partial.table("full", "hidden").arrays["n"][1, :, 0]
    assert not partial.complete and (n[:3] == 36).all() and (n[3:] == 0).all()
    monkeypatch.setattr(Executor, "_hand_out", layer)
    assert main([*words, "--resume"]) in (0, 1)
    assert (TraceReader(out).table("full", "hidden").arrays["n"][1, :, 0] == 36).all()
