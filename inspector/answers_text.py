"""What a replay costs in answers: the same questions after full prefill and after replays of several lengths."""

from typing import Any

from replayscope.inspector import samples
from replayscope.inspector.executor import Executor
from replayscope.inspector.scoring import Way, scored
from replayscope.model import tasks, tokenizer

PROMPTS, TOKENS = 12, 512
GAP = 72  # tokens from the last fact to the cut, which the question follows at once: two windows of `mini` and more
KINDS = {"passkey": "four digits, looked up", "relay": f"a number, carried over {GAP} tokens by the windows"}


def answers_text(executor: Executor) -> tuple[str, dict[str, Any]]:
    """A table of right answers by task and way, and the same as JSON data."""
    model = executor.model
    W = model.config.sliding_window
    ways = (Way("full"), Way("hit"), *(Way("encoder", n * W) for n in (1, 2, 5)), Way("decoder"), Way("both", W))
    names = [way.arm if way.replay is None else f"{way.arm} R={way.replay}" for way in ways]
    filler = samples.load("prose")
    found: dict[str, dict[str, int]] = {}
    for task in KINDS:
        asked = [tasks.make(task, seed, TOKENS, "before", "none", filler, GAP) for seed in range(PROMPTS)]
        rows = [by_way for *_, by_way in scored(model, asked, tokenizer.encode, ways, executor)]
        found[task] = {n: sum(row[w].exact for row in rows) for n, w in zip(names, ways, strict=True)}
    said = [f"{task}: {says}" for task, says in KINDS.items()]
    width = max(map(len, said))
    lines = ["  ".join(["task".ljust(width), *names]), "  ".join("─" * n for n in (width, *map(len, names)))]
    for text, right in zip(said, found.values(), strict=True):
        lines.append("  ".join([text.ljust(width), *(str(right[n]).rjust(len(n)) for n in names)]))
    return "\n".join(lines), {"prompts": PROMPTS, "tokens": TOKENS, "gap": GAP, "right": found}
