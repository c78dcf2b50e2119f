"""Which requests a job stands for, and the runs of the trace that they become."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from replayscope.inspector.errors import UsageError
from replayscope.inspector.exact import exact_rows, intervals
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.plan import Plan, Request
from replayscope.inspector.semantics import Shape, has_cut, oracle_of, plain, request, semantics_of
from replayscope.traces.schema import POINTS, RunInfo


@dataclass(frozen=True)
class Job:
    """What to run. arms: names without ``full``, which always runs; cuts and replays for those that have them.

    semantics: whose rules; arms that know none run once, the others under each.
    oracles: arms whose oracle runs too, so that they can be judged. points: hook points (last part) to compare.
    impl: ``auto``, ``torch`` or ``triton``, how their divergence is summed. budget: rows in memory at once, None for
    the default.
    """

    shape: Shape
    arms: tuple[str, ...]
    cuts: tuple[int, ...] = ()
    replays: tuple[int, ...] = ()
    suffix: int | None = None
    semantics: tuple[str, ...] = ("paper",)
    oracles: bool = False
    audit: bool = False
    frozen_experts: bool = False
    dense: bool = False
    points: tuple[str, ...] = POINTS
    keep_rows: frozenset[str] = frozenset()
    impl: str = "torch"
    budget: int | None = None


@dataclass
class Lineup:
    """Requests for the executor, and the runs of the trace: first those of the requests, then the oracles."""

    plan: Plan
    runs: list[RunInfo]
    runs_of: list[tuple[int, ...]]  # request → runs: one, none for the foreign one, a view per cut for noise runs
    oracle_runs: list[tuple[int, str, Request]]  # run, arm, request that it mirrors
    exact: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def line_up(job: Job) -> tuple[Lineup, list[str]]:
    """Every arm at every cut and replay length, once each, in an order in which owners come first.

    Also returns what has to be said: arms that change nothing at some of the cuts are left out there. Raises UsageError
    with the reason for an arm that can run at none.
    """
    shape = job.shape
    asked = [a for a in job.arms if not a.startswith("oracle:") and a != "full"]
    wanted_oracles = {a.removeprefix("oracle:") for a in job.arms if a.startswith("oracle:")}
    requests = [request(shape, "full")]
    if "broken:stale" in asked:
        requests.append(replace(requests[0], arm="foreign", tokens="foreign"))
    refused: dict[str, list[tuple[int, UsageError]]] = {}
    ran = set()
    for a, semantics, cut, replay in _variants(job, asked):
        label = a if len(job.semantics) == 1 else f"{a} ({semantics})"
        try:
            requests.append(request(shape, a, cut, replay, job.suffix, semantics))
            ran.add(label)
        except UsageError as error:
            refused.setdefault(label, []).append((cut or 0, error))
    for label, reasons in refused.items():
        if label not in ran:
            raise reasons[0][1]
    notes = _left_out(refused)
    c = shape.config
    runs: list[RunInfo] = []
    runs_of: list[tuple[int, ...]] = []
    for r in requests:
        seen = [] if r.tokens == "foreign" else [_run_info(c, r, len(runs))]
        if r.arm in ("repeat", "rechunk"):
            seen += [
                _at_cut(seen[0], len(runs) + 1 + i, shape, cut, job.suffix)
                for i, cut in enumerate(dict.fromkeys(job.cuts))
            ]
        runs += seen
        runs_of.append(tuple(one.index for one in seen))
    line = Lineup(Plan(tuple(requests)), runs, runs_of, [])
    index: dict[tuple[str, str, int | None, int | None], int] = {}

    def oracle(arm: str, semantics: str = "paper", cut: int | None = None, replay: int | None = None) -> int:
        key = (arm, semantics, cut, replay)
        if key not in index:
            mirror = request(shape, arm, cut, replay, job.suffix, semantics)
            index[key] = len(runs)
            runs.append(replace(_run_info(c, mirror, len(runs)), arm=f"oracle:{arm}"))
            line.oracle_runs.append((index[key], arm, mirror))
        return index[key]

    if job.oracles or wanted_oracles:
        # The others read its entries, so it runs anyway; what it can judge is judged.
        oracle("full")
        wanted_oracles.add("full")
    for i, r in enumerate(requests):
        arm = oracle_of(r.arm)
        if runs_of[i] and (job.oracles or arm in wanted_oracles):
            at = oracle(arm, r.semantics, r.cut, r.replay) if arm != "full" else oracle("full")
            for one in runs_of[i]:
                runs[one] = replace(runs[one], oracle=at)
    for arm, semantics, cut, replay in _variants(job, sorted(wanted_oracles - {"full", *asked})):
        oracle(arm, semantics, cut, replay)
    for run in runs:
        line.exact[run.index] = _exact(shape, run, job.suffix)
        enters, leaves = line.exact[run.index]
        runs[run.index] = replace(
            runs[run.index],
            exact_in=[intervals(m, run.start) for m in enters],
            exact_out=[intervals(m, run.start) for m in leaves],
        )
    return line, notes


def _variants(job: Job, arms: list[str]) -> Iterator[tuple[str, str, int | None, int | None]]:
    """(arm, semantics, cut, replay) of everything that the arms stand for, those without a cut first."""
    for a in (a for a in arms if not has_cut(a)):
        for semantics in semantics_of(a, job.semantics):
            yield a, semantics, None, None
    for cut in dict.fromkeys(job.cuts):
        for a in (a for a in arms if has_cut(a)):
            for semantics in semantics_of(a, job.semantics):
                for replay in (None,) if plain(a) in ("hit", "exact") else job.replays:
                    yield a, semantics, cut, replay


def _left_out(refused: dict[str, list[tuple[int, UsageError]]]) -> list[str]:
    """One line per set of cuts at which arms were left out, with the first reason."""
    by_cuts: dict[tuple[int, ...], list[str]] = {}
    for arm, reasons in refused.items():
        by_cuts.setdefault(tuple(dict.fromkeys(cut for cut, _ in reasons)), []).append(arm)
    return [
        f"at cut {', '.join(map(str, cuts))} without {', '.join(arms)} ({refused[arms[0]][0][1]})"
        for cuts, arms in by_cuts.items()
    ]


def _at_cut(run: RunInfo, index: int, shape: Shape, cut: int, suffix: int | None) -> RunInfo:
    """A noise run seen from a cut: the same rows, in the regions of an arm that replays one window there."""
    like = request(shape, "encoder", cut, None, suffix)
    return replace(run, index=index, cut=cut, start=like.start, stop=like.stop)


def _run_info(c: Geometry, r: Request, index: int) -> RunInfo:
    return RunInfo(
        index=index,
        arm=r.arm,
        semantics=r.semantics,
        cut=r.cut,
        replay=r.replay,
        start=r.start,
        stop=r.stop,
        prompt_end=r.prompt_end,
        window=c.sliding_window,
        replayed=r.replayed,
        cached=r.cached,
        fresh=r.fresh,
        decoder_rows=r.stop - max(r.first_row),
        floor=r.floor,
        first_row=r.first_row,
    )


def _exact(shape: Shape, run: RunInfo, suffix: int | None) -> tuple[np.ndarray, np.ndarray]:
    """exact_rows of the right arm behind a run, for the run's own rows [layers, rows].

    A broken arm is held to what ``encoder`` owes: a row that it runs besides owes nothing, one that it lacks is absent.
    """
    arm = plain(run.arm)
    arm = "encoder" if arm.startswith("broken:") else arm
    right = request(shape, arm, run.cut, run.replay, suffix, run.semantics)
    skip = run.start - right.start
    pad = ((0, 0), (max(-skip, 0), 0))
    enters, leaves = (
        np.pad(m[:, max(skip, 0) :][:, : run.stop - run.start], pad) for m in exact_rows(shape.config, right)
    )
    return enters, leaves
