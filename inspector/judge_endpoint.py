"""The matrix on a running engine, from outside: cold, then the prefix alone, then the prompt over that prefix's cache.

A pair counts only if the server's own count of cached tokens proves both sides; otherwise it is void, with the reason.
"""

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replayscope.inspector import judge_matrix as matrix
from replayscope.inspector import judge_prompts, samples
from replayscope.inspector.judge_contract import Contract
from replayscope.inspector.judge_engine import Answer, Bounds, Engine, RequestFailed
from replayscope.inspector.judge_matrix import Group, Run
from replayscope.inspector.judge_results import Store, header_of
from replayscope.model.tasks import Sample, score

log = logging.getLogger(__name__)
FILLER = "prose"
# Bytes that one token of a byte-level tokenizer would need; others need fewer tokens for an answer.
_LONG = 64


@dataclass(frozen=True)
class EngineRun:
    """A matrix on a server. block: tokens by which a hit may be shorter than the prefix that was cached. salt: whether
    requests carry a cache_salt, which keeps the caches of pairs apart."""

    contract: Contract
    source: str
    url: str
    model: str
    semantics: str
    out: Path
    cells: str = "*"
    requests: int = 1000
    seconds: float = 1800.0
    salt: bool = False
    block: int = 1
    force: bool = False


def run(asked: EngineRun) -> None:
    """Fill the results file with what is not in it yet. Raises Spent where the bounds are reached; the file stays."""
    groups = matrix.engine_groups(asked.contract, asked.cells, asked.semantics)
    engine = Engine(asked.url, asked.model, Bounds(asked.requests, asked.seconds))
    e, filler = asked.contract.evidence, samples.load(FILLER)
    # What cannot be asked is found before anything is sent or written.
    judge_prompts.check_engine(groups, e, filler)
    engine.probe()
    for field, why in engine.refused.items():
        log.info("the server refuses %s (%s): runs without", field, why[:120])
    header = header_of(asked.contract, asked.model, asked.cells, asked.source) | {
        "endpoint": {"semantics": asked.semantics, "salt": asked.salt, "block": asked.block, "url": asked.url},
        "refused": sorted(engine.refused),
    }
    # New for every run: a server may still hold what an earlier one cached.
    salt = secrets.token_hex(8) if asked.salt else None
    with Store(asked.out, header, asked.force) as store:
        for group in groups:
            for seed in group.seeds(e):
                if (group.label, seed) not in store.done:
                    for line in _prompt(asked, engine, group, seed, filler, salt and f"{salt}/{group.label}/{seed}"):
                        store.add(line)
            log.info("%s, %d requests left", group.label, engine.bounds.requests)
        store.seal()


def _prompt(asked: EngineRun, engine: Engine, group: Group, seed: int, filler: str, salt: str | None) -> list[dict]:
    """The lines of one prompt: what every pair gave, and its times."""
    sample = matrix.sample_of(group, seed, filler)
    tokens = _LONG if group.output == "long" else len(sample.answer) + 1
    cold, why = _asked(engine, sample.prompt, tokens, salt and f"{salt}/cold")
    if cold is not None and cold.cached != 0:
        why = "the server does not say how many tokens were cached" if cold.cached is None else (
            f"the cold request found {cold.cached} tokens in the cache"
        )  # fmt: skip
    runs, times = [_line("full", sample, cold, None, why)], {}
    if cold is not None:
        times["full"] = _times(cold)
    for run in group.runs:
        hit, fault = None, why
        if not fault:
            hit, fault = _hit(asked, engine, sample, run, tokens, salt and f"{salt}/{run.label}")
        runs.append(_line(run.label, sample, hit, cold, fault))
        if hit is not None and not fault:
            times.setdefault(run.arm, _times(hit))
    base = {"group": group.label, "seed": seed, "tokens": cold.prompt if cold else None}
    lines = [{"kind": "prompt", **base, "runs": runs}]
    return lines + ([{"kind": "cost", **base, "arms": times}] if len(times) > 1 else [])


def _hit(
    asked: EngineRun, engine: Engine, sample: Sample, run: Run, tokens: int, salt: str | None
) -> tuple[Answer | None, str | None]:
    """Warm the cache with the prefix, ask, and hold the server's count against the prefix's length."""
    cut = matrix.character_cut(run, sample)
    if cut < 1:
        return None, "nothing can be cached before the first character"
    warm, why = _asked(engine, sample.prompt[:cut], 1, salt)
    if warm is None:
        return None, why
    hit, why = _asked(engine, sample.prompt, tokens, salt)
    if hit is None:
        return None, why
    if hit.cached is None or warm.prompt is None:
        return hit, "the server does not say how many tokens were cached"
    if not max(warm.prompt - asked.block, 1) <= hit.cached <= warm.prompt:
        return hit, f"{hit.cached} tokens were cached where the hit should end at {warm.prompt}"
    return hit, None


def _asked(engine: Engine, prompt: str, tokens: int, salt: str | None) -> tuple[Answer | None, str | None]:
    try:
        return engine.ask(prompt, tokens, salt), None
    except RequestFailed as error:
        return None, f"a request failed: {error}"


def _line(run: str, sample: Sample, answer: Answer | None, cold: Answer | None, void: str | None) -> dict:
    """One run of a prompt's line."""
    text = answer.text if answer else ""
    got = score(sample, text)
    line = {"run": run, "exact": got.exact, "share": got.share, "text": text, "cached": answer and answer.cached}
    if void:
        line["void"] = void
    if answer is not None and cold is not None:
        mine, theirs = answer.tokens or list(text), cold.tokens or list(cold.text)
        line["differs"] = [int(a != b) for a, b in zip(mine, theirs, strict=False)]
        line["differs"] += [1] * abs(len(mine) - len(theirs))
        if answer.top and cold.top:
            same = line["differs"].index(1) + 1 if 1 in line["differs"] else len(cold.top)
            pairs = zip(cold.top[:same], answer.top[:same], strict=False)
            line["kl"] = [float(f"{coarse_kl(full, arm):.4g}") for full, arm in pairs]
    return line


def coarse_kl(full: Mapping[str, float], arm: Mapping[str, float]) -> float:
    """KL(full‖arm) in nats over the tokens that both name, with all others as one: never more than that of the whole
    distributions (data processing inequality)."""
    both = [token for token in full if token in arm]
    p, q = ([math.exp(side[token]) for token in both] for side in (full, arm))
    p.append(max(1.0 - sum(p), 0.0))
    # Log-probabilities are rounded: a rest of zero is what is left of the smallest float that a server prints.
    q.append(max(1.0 - sum(q), 1e-9))
    return max(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0), 0.0)


def _times(answer: Answer) -> dict:
    tokens = len(answer.tokens or answer.text) or 1
    rest = max(tokens - 1, 1)
    return {
        "ttft": answer.ttft,
        "per_token": max(answer.total - answer.ttft, 0.0) / rest,
        "steps": rest,
        "cached": answer.cached or 0,
        "fresh": (answer.prompt or 0) - (answer.cached or 0),
    }
