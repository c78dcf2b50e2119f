"""The main job in one command: what bounded replay changes on the embedded model and texts, and why to believe it."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from replayscope.inspector.answers_text import KINDS, PROMPTS, answers_text
from replayscope.inspector.answers_text import TOKENS as QUESTION_TOKENS
from replayscope.inspector.arms_text import arms_text
from replayscope.inspector.options import DemoOptions, Result, RunOptions
from replayscope.inspector.prompts import Prompt
from replayscope.inspector.samples import SAMPLES
from replayscope.inspector.usecases import executor_of, write_trace
from replayscope.traces.reader import TraceReader

log = logging.getLogger(__name__)

ARMS = ("full", "repeat", "rechunk", "hit", "encoder", "frozen:encoder", "decoder", "both")
# As many cuts as make a picture, the window boundary and both ends with their neighbours among them.
CUTS = "grid,64:1024:64"
TOKENS, SUFFIX = 1024, 128
# The audit judges every arm and every planted fault by dense oracles, which cost a whole pass per cut.
AUDIT_ARMS = (*(a for a in ARMS if not a.startswith("frozen:")), "exact", "broken:*")
AUDIT_CUTS, AUDIT_TOKENS = "W-1,W,W+1,201,256,511", 512


def demo(options: DemoOptions) -> Result:
    """One sweep per embedded text in serving precision, what a replay costs in answers, and one audit in fp64. Writes
    the traces into ``options.out``.

    The result's ``traces`` are their paths, sweeps first.
    """
    began = time.perf_counter()
    out = Path(options.out)
    out.mkdir(exist_ok=True)
    parts: list[str] = []
    data: dict[str, Any] = {}
    good = True
    common = RunOptions(device=options.device, devices=options.devices, dtype=options.dtype, impl=options.impl,
                        seed=options.seed, max_bytes=options.max_bytes, verbosity=options.verbosity, force=True,
                        rows=True)  # fmt: skip
    for name, sample in SAMPLES.items():
        asked = replace(common, prompt=Prompt("sample", name), arms=ARMS, cuts=CUTS, suffix=SUFFIX, tokens=TOKENS,
                        out=out / f"{name}.h5")  # fmt: skip
        title = f"{name}: {sample.description}, first {TOKENS} tokens, {asked.dtype}, {SUFFIX} tokens after each cut"
        good &= _one(asked, title, parts, data)
    log.info("answers: %s", ", ".join(KINDS))
    text, data["answers"] = answers_text(executor_of(common))
    parts.append(
        f"answers: {PROMPTS} prompts of {QUESTION_TOKENS} tokens a task; how many are right after each way\n\n{text}"
    )
    audit = replace(common, prompt=Prompt("sample", "prose"), arms=AUDIT_ARMS, cuts=AUDIT_CUTS, tokens=AUDIT_TOKENS,
                    dtype="fp64", audit=True, out=out / "audit.h5")  # fmt: skip
    title = f"audit: prose, first {AUDIT_TOKENS} tokens, fp64, top-k and experts frozen from full; faults are planted"
    good &= _one(audit, title, parts, data)
    parts.append(f"{time.perf_counter() - began:.0f} s")
    traces = [str(out / f"{name}.h5") for name in (*SAMPLES, "audit")]
    return Result("\n\n".join(parts), {"parts": data, "traces": traces}, 0 if good else 1)


def _one(asked: RunOptions, title: str, parts: list[str], data: dict[str, Any]) -> bool:
    """Run one trace; add its table to the text and to the JSON; return whether its verdict is good."""
    log.info("%s", title)
    path = write_trace(asked)
    text, values, ok = arms_text(TraceReader(path))
    parts.append(f"{title}\n\n{text}")
    data[path.stem] = values
    return ok
