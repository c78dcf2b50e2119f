"""Running the acceptance matrix on a model: every prompt of a group through all its runs in shared passes."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from replayscope.inspector import judge_matrix as matrix
from replayscope.inspector.backend import Decoder
from replayscope.inspector.generate import Generated, Session
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.judge_contract import Contract
from replayscope.inspector.judge_matrix import Group, Prompt, Run
from replayscope.inspector.judge_states import WANT, States
from replayscope.inspector.judge_tokens import Text
from replayscope.inspector.plan import Plan, Request
from replayscope.inspector.runner import foreign_tokens
from replayscope.inspector.semantics import Shape, request
from replayscope.model.tasks import score

Line = dict[str, Any]


@dataclass(frozen=True)
class _Job:
    """A request of a pass: which prompt, which run (None is full), and where full's request of that prompt is.

    told: whether it has a line; another prompt that runs for its window alone has none.
    """

    prompt: int
    run: Run | None
    full: int
    told: bool = True


def group_lines(
    contract: Contract,
    group: Group,
    text: Text,
    done: set[tuple[str, int]],
    plants: Mapping[str, str],
    executor: Decoder,
) -> Iterator[list[Line]]:
    """One list of lines per pass of ``concurrency`` prompts, of those not yet done.

    plants: cells (globs) → arm that runs there in secret of what its name says, to see whether it is found.
    """
    e = contract.evidence
    every = group.seeds(e)
    for at in range(0, len(every), group.concurrency):
        seeds = every[at : at + group.concurrency]
        left = [seed for seed in seeds if (group.label, seed) not in done]
        if left:
            # A pass runs whole even if some of it is there: what shares it moves the last digits of the others.
            prompts = [matrix.prompt(group, seed, text) for seed in seeds]
            lines = _pass(contract, group, text, prompts, plants, executor)
            yield [line for line in lines if line["seed"] in left]


def _pass(
    contract: Contract,
    group: Group,
    text: Text,
    prompts: Sequence[Prompt],
    plants: Mapping[str, str],
    executor: Decoder,
) -> list[Line]:
    began = time.perf_counter()
    config = executor.model.config
    jobs: list[_Job] = []
    requests: list[Request] = []
    tokens: dict[str, Tensor] = {}
    rights: list[Request] = []
    room = matrix.steps(group, prompts)
    for i, one in enumerate(prompts):
        name = f"p{i}"
        # Zeros stand where tokens are produced, and where later turns will be written.
        tokens[name] = torch.zeros(matrix.total(group, one, room), dtype=torch.long)
        tokens[name][: len(one.ids)] = torch.tensor(one.ids)
        full = len(jobs)
        for run, r in matrix.requests(config, group, one, name, room):
            made = r if run is None else planted(config, group.cell(run), r, plants)
            foreign = f"{name}:foreign"
            if made.window_owner == foreign and foreign not in tokens:
                # A stale window is another prompt's, which has to run before.
                tokens[foreign] = torch.cat((foreign_tokens(torch.tensor(one.ids), i), tokens[name][len(one.ids) :]))
                jobs.append(_Job(i, None, len(jobs), told=False))
                rights.append(replace(requests[full], arm=foreign, tokens=foreign))
                requests.append(rights[-1])
            jobs.append(_Job(i, run, full))
            rights.append(r)
            requests.append(made)
    owners = [j.full for j in jobs]
    states = States(requests, owners, config.sliding_window)
    session = Session(executor.model, Plan(tuple(requests)), tokens, executor, states.watch, WANT)
    told = _told(session, contract, group, text, prompts, jobs)
    for _ in range(1, matrix.turns(group)):
        _next_turn(session, config, prompts, jobs, requests)
        more = _told(session, contract, group, text, prompts, jobs)
        told = [_joined(a, b) for a, b in zip(told, more, strict=True)]
    check = executor.prefix_check
    lines: list[Line] = []
    for i, one in enumerate(prompts):
        runs = []
        for at, job in enumerate(jobs):
            if job.prompt != i or not job.told:
                continue
            r, right = requests[at], rights[at]
            runs.append(
                {
                    "run": "full" if job.run is None else job.run.label,
                    "cut": r.cut,
                    "replayed": r.replayed,
                    "cached": r.cached,
                    "fresh": r.fresh - (r.stop - r.prompt_end),
                    "planned": [right.replayed, right.cached],
                    "changed": check.changed[at],
                    **told[at],
                    **({} if job.run is None else {"states": states.values[at]}),
                }
            )
        lines.append(
            {
                "kind": "prompt",
                "group": group.label,
                "seed": one.sample.seed,
                "tokens": len(one.ids),
                "seconds": round((time.perf_counter() - began) / len(prompts), 4),
                "runs": runs,
            }
        )
    return lines


def planted(config: Geometry, cell: str, right: Request, plants: Mapping[str, str]) -> Request:
    """The request itself, or a broken one under its name where the cell has been planted."""
    arm = next((arm for glob, arm in plants.items() if fnmatchcase(cell, glob)), None)
    if arm is None:
        return right
    shape = Shape(config, right.stop, forced=right.stop - right.prompt_end)
    wrong = request(shape, arm, right.cut, semantics=right.semantics)
    owner = right.tokens
    return replace(
        wrong,
        arm=right.arm,
        tokens=owner,
        prefix=wrong.prefix and f"{owner}:{wrong.prefix}",
        window_owner=wrong.window_owner and f"{owner}:{wrong.window_owner}",
        chunk=None,
    )


def _told(
    session: Session,
    contract: Contract,
    group: Group,
    text: Text,
    prompts: Sequence[Prompt],
    jobs: Sequence[_Job],
) -> list[Line]:
    """What every request produced: greedily, with full's tokens forced on it, and by sampling."""
    steps = matrix.steps(group, prompts)
    owners, e = torch.tensor([j.full for j in jobs]), contract.evidence
    greedy, forced = session.follow(owners.tolist(), steps)
    kl, free = (_kl(logits, owners) for logits in (forced, greedy.logits))
    sampled = session.decode(steps, e.temperature, e.seed)
    out: list[Line] = []
    for at, job in enumerate(jobs):
        one = prompts[job.prompt]
        own = matrix.steps(group, [one])
        produced = text.said(one.ids, greedy.ids[at, :own].tolist())
        got = score(one.sample, produced)
        line: Line = {"exact": got.exact, "share": _short(got.share), "text": produced}
        if job.run is not None:
            line |= {
                "kl": [_short(v) for v in kl[at, :own].tolist()],
                "kl_free": [_short(v) for v in free[at, :own].tolist()],
                "differs": _apart(greedy, at, job.full, own),
                "sampled": _apart(sampled, at, job.full, own),
            }
        out.append(line)
    return out


def _joined(before: Line, now: Line) -> Line:
    """Two turns as one: right if both are; what is told by step goes on."""
    out = {"exact": before["exact"] and now["exact"], "share": _short((before["share"] + now["share"]) / 2)}
    out["text"] = before["text"] + "⏎" + now["text"]
    for key in ("kl", "kl_free", "differs", "sampled"):
        if key in now:
            out[key] = before[key] + now[key]
    out["turns"] = [*before.get("turns", [before["exact"]]), now["exact"]]
    return out


def _next_turn(
    session: Session, config: Geometry, prompts: Sequence[Prompt], jobs: Sequence[_Job], requests: Sequence[Request]
) -> None:
    """Close the turn with the right answer, and ask again over the cache as each run left it."""
    made, at = [], []
    for job, first, end in zip(jobs, requests, session.ends, strict=True):
        one = prompts[job.prompt]
        closed = end + len(one.answer)
        r, start = matrix.next_turn(config, first, job.run, closed, closed + len(one.turn))
        made.append(r)
        at.append(start)
    answers = [prompts[j.prompt].answer for j in jobs]
    says = [prompts[j.prompt].turn for j in jobs]
    session.turn(answers, says, Plan(tuple(made)), at)


def _kl(logits: Tensor, owners: Tensor) -> Tensor:
    """KL(full‖arm) in nats [requests, steps] of logits [requests, steps, V]."""
    found = torch.empty(logits.shape[:2], dtype=torch.float64)
    # A prompt at a time: of a large vocabulary these are many numbers.
    for owner in owners.unique():
        own = owners == owner
        full, arm = (logits[which].double().log_softmax(-1) for which in (owner, own.to(logits.device)))
        term = torch.where(full == -math.inf, 0.0, full.exp() * (full - arm))
        found[own] = term.sum(-1).clamp(min=0).cpu()
    return found


def _apart(made: Generated, at: int, full: int, steps: int) -> list[int]:
    """1 for every step whose token is not full's."""
    return (made.ids[at, :steps] != made.ids[full, :steps]).int().tolist()


def _short(value: float) -> float | None:
    """Four digits are enough for a file; what is not finite is null."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
