"""How figures speak: arms, hook points and regions as they stand in a sentence, and the context every figure names."""

from __future__ import annotations

import math

from replayscope.traces import TraceReader
from replayscope.traces.schema import RunInfo
from replayscope.ui.series import Series
from replayscope.ui.theme import count, number

POINT_WORDS = {
    "embed": "embeddings",
    "attn_in": "attention input",
    "window_kv": "window KV",
    "global_kv": "global KV",
    "index_k": "index keys",
    "topk": "selected global entries",
    "attn_out": "attention output",
    "router": "chosen experts",
    "ffn_out": "expert output",
    "hidden": "hidden state",
    "streams": "residual streams",
    "mix": "stream mix",
    "final": "final state",
    "logits": "logits",
}
REGION_WORDS = {
    "all": "all rows run",
    "window": "[H−W, H)",
    "suffix": "the suffix from H on",
    "last": "the last row",
    "exact": "the exact region",
}
_ARMS = {
    "encoder": "Encoder replay",
    "decoder": "Decoder replay",
    "both": "Encoder and decoder replay",
    "exact": "Replay of the exact length",
    "hit": "A hit with its window kept",
    "repeat": "Running the same again",
    "rechunk": "Running in other chunks",
}
# Short enough for a colour bar; METRICS has the definitions.
_METRICS = {
    "rel_l2": "relative L2",
    "rel_max": "relative L2, worst row",
    "cosine": "cosine distance",
    "norm_ratio": "norm ratio",
    "max_abs": "max abs difference",
    "share_over": "share over tolerance",
    "nonfinite": "non-finite elements",
    "changed": "rows changed, share",
    "jaccard": "Jaccard distance",
    "flips": "rows flipped",
    "min_margin": "smallest margin",
    "margin_noise": "margin noise",
    "kl": "KL(reference‖arm)",
    "kl_max": "KL(reference‖arm), worst row",
    "kl_rev": "KL(arm‖reference)",
    "kl_rev_max": "KL(arm‖reference), worst row",
    "js": "Jensen–Shannon",
    "js_max": "Jensen–Shannon, worst row",
    "dlogp": "change of log p",
    "dlogp_max": "change of log p, worst row",
    "top1": "top-1 flips, share",
    "overlap": "top-k overlap",
    "min_flip_margin": "smallest flip margin",
}


def arm_words(arm: str) -> str:
    """An arm as the subject of a sentence."""
    if arm.startswith("oracle:"):
        return f"The oracle of {arm.removeprefix('oracle:')}"
    if arm.startswith("broken:"):
        return f"The planted fault {arm.removeprefix('broken:')}"
    return _ARMS.get(arm, arm)


def metric_words(name: str) -> str:
    """A metric in two or three words."""
    return _METRICS.get(name, name)


def against(reference: str) -> str:
    """What an arm is compared with."""
    return "its oracle" if reference == "oracle" else "the full prefill"


def suffix_and_design(trace: TraceReader, one: Series) -> tuple[int | None, str]:
    """Rows run from a cut on (None for all of them) and the design, as the trace was recorded.

    Runs tell it only where several cuts are there, so that they are asked where the provenance says nothing, where they
    follow no single design, and of an arm without a cut, which runs to the end.
    """
    suffix, design = trace.provenance.get("suffix"), trace.provenance.get("design")
    known = suffix == "all" or (isinstance(suffix, int) and not isinstance(suffix, bool) and suffix > 0)
    if known and design in ("fixed", "after") and one.has_cut and one.design != "mixed":
        return (None if suffix == "all" else suffix), design
    return one.suffix, one.design


def suffix_words(trace: TraceReader, one: Series) -> str:
    """Suffix and design of a series, which no figure may leave out."""
    rows, design = suffix_and_design(trace, one)
    return f"suffix {'all' if rows is None else f'{count(rows)} rows'} · design {design}"


def context(trace: TraceReader, one: Series, run: RunInfo | None = None) -> str:
    """Arm, replay, suffix, design, N and W, for the sentence under a title."""
    info = run or one.runs[0]
    parts = [f"arm {one.arm}"]
    if one.replay is not None and one.arm not in ("hit",):
        parts.append(f"replay {count(one.replay)}")
    parts += [suffix_words(trace, one), f"N {count(len(trace.tokens.ids))}", f"W {count(info.window)}", info.semantics]
    return " · ".join(parts)


def size_words(value: float, floor: float) -> str:
    """The noise floor beside a value, and what follows for it; both in the unit of the value."""
    if math.isnan(floor):
        return "floor unknown" + (", identical" if value == 0 else "")
    said = "identical" if value == 0 else "within the noise" if value <= floor else "above the noise"
    return f"floor {number(floor)}, {said}"
