"""Which kinds of request an engine's replay serves, refuses or runs untrimmed, and where that is said."""

from dataclasses import dataclass

from replayscope.inspector.names import choose

VERDICTS = {
    "ok": "served with replay on",
    "untrimmed": "served, but the decoder half runs on every row of such a request",
    "refused": "not served with replay on",
    "unknown": "no public source says it",
}
FEATURES = {
    "speculative decoding": "a drafter proposes tokens that the model checks",
    "input logprobs": "log-probabilities of the prompt's own tokens",
    "hidden states": "hidden states of every prompt row",
    "multimodal": "images, video or audio in the prompt",
    "routed experts": "the experts of every prompt row are handed out",
    "LoRA": "adapters on the weights",
}


@dataclass(frozen=True)
class Support:
    """verdict: a key of VERDICTS. limits: in words, empty if there are none. source: where it was read."""

    verdict: str
    limits: str = ""
    source: str = ""


_UNKNOWN = Support("unknown")
_VLLM = "vLLM 0.33.0 models/deepseek_v41"
_DAY0 = "SGLang day-0 support of V4.1, sgl-project/sglang#38957"
_SGLANG = "SGLang 0.5.23 models/deepseek_v4, model_executor/encoder_swa_replay.py"
_TOKENSPEED = "tokenspeed backends/specific/deepseek_v41.py, lightseekorg/tokenspeed#1594"

_SUPPORT = {
    "vllm-0.33": {
        "speculative decoding": Support(
            "ok", "DSpark, if every drafter layer has a window of at most W; otherwise decoder replay is off", _VLLM
        ),
        "input logprobs": Support("untrimmed", "", _VLLM),
        "hidden states": Support("untrimmed", "", _VLLM),
        "multimodal": Support("ok", "encoder inputs that overlap [H-W, H) run again", "vllm-project/vllm#56227"),
        "routed experts": Support("untrimmed", "", _VLLM),
    },
    "sglang-0.5.23": {
        "speculative decoding": Support("ok", "DSpark only; the drafter sees the original rows only", _SGLANG),
        "input logprobs": Support("untrimmed", "the whole extend", _SGLANG),
        "hidden states": Support("untrimmed", "a server that returns them for all has decoder replay off", _SGLANG),
        "multimodal": Support("ok", "images on CUDA; video, audio and input embeddings are refused", _SGLANG),
        "LoRA": Support("refused", "", _SGLANG),
    },
    "sglang-day0": {
        "speculative decoding": Support("refused", "", _DAY0),
        "input logprobs": Support("refused", "", _DAY0),
        "hidden states": Support("refused", "", _DAY0),
        "multimodal": Support("refused", "", _DAY0),
        "LoRA": Support("refused", "", _DAY0),
    },
    "tokenspeed": {
        "speculative decoding": Support("ok", "DSpark rows follow the decoder's", _TOKENSPEED),
        "input logprobs": Support(
            "unknown", "a review reports rows read that no longer exist", "lightseekorg/tokenspeed#1594"
        ),
    },
}


def feature(semantics: str, name: str) -> Support:
    """What ``semantics`` does with requests that ask for ``name``; UsageError for an unknown feature."""
    return _SUPPORT.get(semantics, {}).get(choose("feature", name, list(FEATURES)), _UNKNOWN)
