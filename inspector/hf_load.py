"""From options to a Hugging Face model that is ready to run, and its prompt in its own tokens."""

from dataclasses import dataclass
from typing import Any

import torch

from replayscope.inspector.errors import UsageError
from replayscope.inspector.hf_executor import HFExecutor
from replayscope.inspector.options import RunOptions
from replayscope.model import hf

# Options that have no meaning for these models: name, the value that asks for nothing, why.
_REFUSED = (
    ("topk", "sparse", "its global layers read every entry as they are"),
    ("reproducible", False, "its rows are not tiled"),
    ("resume", False, "its runs cannot be taken up"),
)


@dataclass(frozen=True)
class HFLoaded:
    """engine: what runs it. numbers: the prompt's token ids, texts what each shows as. origin: hash or commit."""

    engine: HFExecutor
    numbers: list[int]
    texts: list[str]
    origin: str


def load(options: RunOptions, dtype: torch.dtype, devices: list[torch.device]) -> HFLoaded:
    """Raises UsageError for an option that these models do not take, and WeightsError where there is no model."""
    for name, nothing, why in _REFUSED:
        if getattr(options, name, nothing) != nothing:
            raise UsageError(f"--{name.replace('_', '-')} is not for a Hugging Face model: {why}")
    if options.stream and (len(devices) > 1 or options.quantize):
        other = "--quantize" if options.quantize else "--devices"
        raise UsageError(f"--stream and {other} do not go together for a Hugging Face model; give one of them")
    if len(devices) > 1 and any(d.type != "cuda" for d in devices):
        typed = ",".join(map(str, devices))
        raise UsageError(f"--devices {typed}: a Hugging Face model is spread over CUDA devices only; use --device cpu")
    hf.say_less(options.verbosity)
    # First, since a model that is not there has no tokenizer either.
    hf.read_config(options.model)
    tokenizer = hf.load_tokenizer(options.model)
    numbers = _numbers(options, tokenizer)
    model, origin = hf.load(
        options.model, dtype, devices, options.quantize, layers=options.layers_only, stream=options.stream
    )
    if options.experts == "frozen" and not model.config.freezes:
        raise UsageError("--experts is not for a Hugging Face model without experts; leave it out")
    numbers = numbers[: options.tokens]
    frozen = options.audit or options.experts == "frozen"
    return HFLoaded(HFExecutor(model, frozen=frozen), numbers, _texts(tokenizer, numbers), origin)


def load_decoder(model: str, dtype: torch.dtype, device: torch.device) -> tuple[HFExecutor, Any, str]:
    """An executor that keeps its state, the model's tokenizer, and hash or commit of the weights.

    Raises UsageError without a tokenizer, and WeightsError where there is no model.
    """
    hf.say_less(0)
    # First, since a model that is not there has no tokenizer either.
    hf.read_config(model)
    tokenizer = hf.load_tokenizer(model)
    if tokenizer is None:
        raise UsageError(f"{model} comes without a tokenizer, so no task can be asked of it; save one into its folder")
    loaded, origin = hf.load(model, dtype, [device])
    return HFExecutor(loaded, keep_state=True), tokenizer, origin


def _numbers(options: RunOptions, tokenizer: Any) -> list[int]:
    """The prompt's token ids: as typed, or of its text with the special tokens that the model's tokenizer adds."""
    text = options.prompt.read()
    if not isinstance(text, str):
        if options.chat:
            raise UsageError("--chat needs the prompt as text; with ids:… give those of the whole conversation")
        return list(text)
    if tokenizer is None:
        raise UsageError(f"{options.model} comes without a tokenizer; give token ids as -p ids:1,2,3")
    if not options.chat:
        return list(tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        raise UsageError(f"the tokenizer of {options.model} has no chat template; leave --chat out")
    said = [{"role": "user", "content": text}]
    said = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def _texts(tokenizer: Any, numbers: list[int]) -> list[str]:
    """What each token shows as; where it is part of a character, the name that the vocabulary has for it."""
    if tokenizer is None:
        return [str(n) for n in numbers]
    shown = [tokenizer.decode([n]) for n in numbers]
    names = tokenizer.convert_ids_to_tokens(numbers)
    return [str(name) if "\ufffd" in text else text for text, name in zip(shown, names, strict=True)]
