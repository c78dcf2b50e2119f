"""What an arm costs on this machine: each prompt prefilled and decoded by one arm at a time, against a cold prefill."""

import time
from collections.abc import Iterator

import torch

from replayscope.inspector import judge_matrix as matrix
from replayscope.inspector.backend import Decoder
from replayscope.inspector.cache_sizes import cache_of
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.judge_contract import Contract
from replayscope.inspector.judge_matrix import Group, Run
from replayscope.inspector.judge_run import Line
from replayscope.inspector.judge_tokens import Text
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import Shape, request
from replayscope.model.config import ModelConfig
from replayscope.model.hf_config import HFConfig

# Of each group so many prompts are timed, and so many tokens decoded: enough for a median over a matrix.
PROMPTS, STEPS = 2, 4


def cost_lines(
    contract: Contract, group: Group, text: Text, done: set[tuple[str, int]], executor: Decoder
) -> Iterator[Line]:
    """One line per timed prompt, each arm at its longest hit, but at ``end``, which leaves a single token to compute,
    only if it has no other; they take turns in being first, which warms up."""
    for i, seed in enumerate(group.seeds(contract.evidence)[:PROMPTS]):
        if (group.label, seed) not in done:
            yield _timed(group, seed, text, executor, i)


def _timed(group: Group, seed: int, text: Text, executor: Decoder, first: int) -> Line:
    c, one = executor.model.config, matrix.prompt(group, seed, text)
    N = len(one.ids)
    ids = torch.zeros(N + STEPS, dtype=torch.long)
    ids[:N] = torch.tensor(one.ids)
    shape = Shape(c, N + STEPS, forced=STEPS)
    longest: dict[str, tuple[bool, int, Run]] = {}
    for run in group.runs:
        cut = -1 if run.cut is None else matrix.cut_of(run, one, c.sliding_window)
        suffix = run.cut is not None and matrix.parse_cut(run.cut)[0] != "end"
        if cut is not None and (run.arm not in longest or (suffix, cut) > longest[run.arm][:2]):
            longest[run.arm] = suffix, cut, run
    requests = [request(shape, "full")]
    for _, cut, run in longest.values():
        # A hit that starts in the middle of a pair needs full's open pair, which only a shared step has.
        requests.append(request(shape, run.arm, None if cut < 0 else cut // 2 * 2, semantics=run.semantics))
    arms: dict[str, Line] = {}
    executor.start(Plan(tuple(requests)), {"prompt": ids})
    # Full runs first, since the others read its prefix; a second time it is timed in its turn.
    _advance(executor, 0, N)
    order = list(range(len(requests)))
    shift = 1 + (first + seed) % max(len(order) - 1, 1)
    for at in order[shift:] + order[:shift]:
        r = requests[at]
        executor.done[at] = r.start
        ttft = _advance(executor, at, N)
        spent = sum(_advance(executor, at, N + step + 1) for step in range(STEPS))
        arms[r.arm] = {
            "ttft": ttft,
            "per_token": spent / STEPS,
            "steps": matrix.steps(group, [one]),
            "replayed": r.replayed,
            "cached": r.cached,
            "fresh": r.fresh - STEPS,
            **_bytes(c, r.cached, kept=r.arm == matrix.CONTROL and r.cached > 0),
        }
    return {"kind": "cost", "group": group.label, "seed": seed, "tokens": N, "arms": arms}


def _advance(executor: Decoder, at: int, stop: int) -> float:
    """Seconds for one request to reach ``stop``, to the logits of its last row; the others stay where they are."""
    stops = list(executor.done)
    stops[at] = stop
    began = time.perf_counter()
    for frame in executor.advance(stops, frozenset({"logits"}), tail=1):
        if "logits" in frame.tensors:
            int(frame.tensors["logits"][-1].argmax())  # waits for a device that runs behind
    return time.perf_counter() - began


def _bytes(config: Geometry, cached: int, kept: bool) -> Line:
    """What a cache must hold between requests for this arm, in the serving formats: global KV, and window KV if it
    is kept."""
    assert isinstance(config, ModelConfig | HFConfig)
    cache = cache_of(config)
    return {"global_bytes": cache.global_bytes(cached), "window_bytes": cache.window_bytes if kept else 0}
