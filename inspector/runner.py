"""Running a set of arms over the same tokens, comparing every layer while it is hot."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from replayscope.inspector.backend import Engine, OraclePasses, Runnable
from replayscope.inspector.comparing import Comparison
from replayscope.inspector.fold import Fold
from replayscope.inspector.frame import Frame
from replayscope.inspector.lineup import Job, Lineup
from replayscope.inspector.semantics import plain
from replayscope.inspector.snapshot import Snapshots
from replayscope.inspector.waves import Wave, waves
from replayscope.model import reference
from replayscope.traces.schema import RunInfo

Progress = Callable[[int, int, str], None]


def run(
    model: Runnable,
    ids: Tensor,
    job: Job,
    line: Lineup,
    executor: Engine,
    progress: Progress = lambda done, total, what: None,
    foreign: Tensor | None = None,
    on_oracle: Callable[[int, reference.Frame], None] = lambda run, frame: None,
    snapshots: Snapshots | None = None,
    on_wave: Callable[[Wave], None] = lambda wave: None,
    on_stop: Callable[[Fold], None] = lambda fold: None,
) -> tuple[Fold, list[RunInfo]]:
    """Run the line-up and fold its divergence. ids [N]. Returns the fold and the runs with their byte checks.

    progress is called with rows times layers, of the executor's rows. foreign [N]: the other prompt that a stale window
    comes from. on_oracle is called with every oracle frame, on_wave with every wave before it runs, on_stop with what
    has been folded when the run is interrupted. snapshots: of the executor, taken as it runs; it begins behind the last
    one.
    """
    following = np.full(len(ids), -1)
    following[:-1] = ids[1:].cpu().numpy()
    c = model.config
    fold = Fold(line.runs, c.num_hidden_layers, following, model.dtype, job.keep_rows, job.impl)
    want = frozenset(job.points) | {"hidden", "logits"}
    tokens = {"prompt": ids} | ({"foreign": foreign} if foreign is not None else {})
    todo = waves(line, len(ids), job.budget)
    total, done, runs = sum(w.total(line, c) for w in todo), 0, list(line.runs)
    try:
        for number, wave in enumerate(todo):
            if snapshots and number < snapshots.wave:
                done += wave.total(line, c)
                continue
            on_wave(wave)
            oracles, passes = _oracles(model, ids, job, line, wave, executor)
            fresh = frozenset(line.oracle_runs[k][0] for k in wave.fresh)
            compare = Comparison(c, fold, line.runs, line.exact, wave.of, passes, job.points, fresh)
            begun = snapshots.first if snapshots else 0
            done += sum(wave.work(line, l) for l in range(begun))
            frames = (
                snapshots.frames(oracles, fold, wave.plan, tokens, want, number)
                if snapshots
                else executor.run(wave.plan, tokens, want)
            )
            part = f" of part {number + 1} of {len(todo)}" if len(todo) > 1 else ""
            progress(done, total, f"layer {begun}{part}")
            for frame in frames:
                if passes and frame.layer is not None:
                    _share_choices(frame, oracles)
                compare.with_full(frame)
                if passes:
                    theirs = oracles.step()
                    for at, one in zip(passes, theirs, strict=True):
                        if at in fresh:
                            on_oracle(at, one)
                    compare.with_oracles(frame, theirs)
                if frame.layer is not None:
                    done += wave.work(line, frame.layer)
                    last = frame.layer + 1 == c.num_hidden_layers
                    progress(done, total, f"logits{part}" if last else f"layer {frame.layer + 1}{part}")
            check = executor.prefix_check
            for own, compared, changed in zip(wave.of, check.compared, check.changed, strict=True):
                for at in own:
                    fold.checks[at] = compared, changed
    except KeyboardInterrupt:
        on_stop(fold)
        raise
    progress(total, total, "done")
    for at, (compared, changed) in fold.checks.items():
        runs[at] = replace(runs[at], cached_checked=compared, cached_changed=changed)
    return fold, runs


def _oracles(
    model: Runnable, ids: Tensor, job: Job, line: Lineup, wave: Wave, executor: Engine
) -> tuple[OraclePasses, list[int]]:
    """The oracle passes of a wave, and the runs that they are."""
    oracles = executor.oracles(ids.to(model.device), job.dense)
    some = [line.oracle_runs[k] for k in wave.oracles]
    for _, arm, r in some:
        frozen = ("topk", "experts") if job.audit or r.frozen else ("experts",) if job.frozen_experts else ()
        oracles.add(plain(arm), r.cut, r.replay, r.prompt_end, r.stop, r.semantics, job.shape.chunks, frozen)
    return oracles, [at for at, _, _ in some]


def _share_choices(frame: Frame, oracles: OraclePasses) -> None:
    """Where choices are frozen the oracles take those of the executor's full, as its other requests do."""
    assert frame.layer is not None
    for point, target in (("topk", oracles.topk), ("router", oracles.experts)):
        if point in frame.tensors:
            target[frame.layer] = frame.tensors[point][frame.spans[point][0].rows].clone()[None]


def foreign_tokens(ids: Tensor, seed: int) -> Tensor:
    """Another prompt of the same length: the same tokens in another order, so its window is plausible and wrong."""
    generator = torch.Generator().manual_seed(seed + 1)
    return ids[torch.randperm(len(ids), generator=generator).to(ids.device)]
