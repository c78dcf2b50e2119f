"""A Hugging Face model with its tokenizer, loaded for replay: eager attention, hooks placed, its windows checked."""

import logging
import socket
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import huggingface_hub
import torch
import transformers
from torch import Tensor

from replayscope.model.hf_config import HFConfig, UnmappedError, map_config
from replayscope.model.hf_faults import check_weights, told
from replayscope.model.hf_hooks import Parts, find_parts
from replayscope.model.hf_places import on_disk, placement, with_folder
from replayscope.model.manifest import weights_hash

log = logging.getLogger(__name__)
QUANTISED = ("8bit", "4bit")


@dataclass(frozen=True)
class HFModel:
    """module: the causal language model. parts: its modules that are captured. device: where its input goes.

    home: where captured states are gathered and compared: that device, or the CPU for a model that lies on several.
    """

    module: Any
    config: HFConfig
    parts: Parts
    dtype: torch.dtype
    device: torch.device
    home: torch.device

    @property
    def kernel_devices(self) -> tuple[torch.device, ...]:
        """The one device where kernels of ours run: they compare states, and the model runs its own code."""
        return (self.home,)

    @property
    def text_config(self) -> Any:
        """The part of the transformers config that its decoder reads."""
        return self.module.config.get_text_config(decoder=True)

    def logits(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, last: int | None = None
    ) -> Tensor:
        """Logits [B, rows, V] of ids [B, rows] at positions [B, rows], or of the ``last`` so many rows alone.

        mask [B, 1, rows, keys] is taken as it is.
        """
        # As places, not as their number: given a number, Gemma 4 runs no other row through its last layers.
        rows = ids.shape[1]
        some = {} if last is None else {"logits_to_keep": torch.arange(rows - last, rows)}
        out = self.module(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
            **some,
        )
        return out.logits


def read_config(name: str) -> tuple[Any, HFConfig]:
    """The config in a folder, or of an id on the hub, and its mapping. Raises WeightsError with one line."""
    with told(name):
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=_local(name))
        return config, map_config(config)


def load(
    name: str,
    dtype: torch.dtype,
    devices: list[torch.device],
    quantise: str | None = None,
    layers: int | None = None,
    stream: bool = False,
) -> tuple[HFModel, str]:
    """The model in a folder, or of an id on the hub, and the SHA-256 of its weights or the commit they are of.

    devices: one, or several among which the layers are spread. quantise: ``8bit`` or ``4bit`` where transformers can.
    layers: its first so many only; the weights of the others are not read. stream: weights of its layers stay on the
    disk until they run; one device, not quantised. Raises WeightsError with one line where it cannot be fetched, mapped
    or loaded, or its weights are not all there.
    """
    config, mapped = read_config(name)
    with told(name):
        config._experts_implementation = "eager"
        depth = mapped.num_hidden_layers
        mapped = mapped if layers is None else mapped.first(layers)
        options = placement(devices, quantise)
        if len(devices) == 1 and quantise is None and (stream or mapped.num_hidden_layers < depth):
            with torch.device("meta"):
                empty: Any = auto_class(config).from_config(config)
            options |= on_disk(empty, empty.get_decoder(), devices[0], 0 if stream else mapped.num_hidden_layers)
        with with_folder(options) as owned:
            module, loading = auto_class(config).from_pretrained(
                name,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=_local(name),
                # So that they are told by name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
            owned(module)
        # Layers that predict further tokens are stored behind the others, and not run.
        further = getattr(config.get_text_config(decoder=True), "num_nextn_predict_layers", None) or 0
        check_weights(name, module, depth + further, loading)
        decoder = module.get_decoder()
        decoder.layers = decoder.layers[: mapped.num_hidden_layers]
        return placed(module, mapped, dtype), _origin(name, config)


def placed(module: Any, mapped: HFConfig, dtype: torch.dtype) -> HFModel:
    """A loaded model, ready to run. Raises UnmappedError where its modules are not what its config says."""
    if dtype == torch.float64:
        # Some parts are kept in fp32 whatever is asked for.
        module = module.double()
    module.eval()
    parts = find_parts(module, module.get_decoder())
    _check_windows(parts, mapped)
    routes = tuple(l for l, p in enumerate(parts.layers) if p.experts is not None)
    feeds = tuple(l for l, p in enumerate(parts.layers) if p.feed_forward is not None)
    where = {t.device for t in (*module.parameters(), *module.buffers())} - {torch.device("meta")}
    first = next(module.get_input_embeddings().parameters()).device
    home = first if len(where) == 1 else torch.device("cpu")
    return HFModel(module, replace(mapped, router_layers=routes, ffn_layers=feeds), parts, dtype, first, home)


def auto_class(config: Any) -> Any:
    """The transformers class that loads a config's language model, also where it comes with an image tower."""
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnmappedError(f"{config.model_type} has no causal language model in transformers {transformers.__version__}")


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer, or None where it comes without one."""
    try:
        found = transformers.AutoTokenizer.from_pretrained(name, local_files_only=_local(name))
    except Exception as error:
        log.debug("no tokenizer for %s: %s", name, error)
        return None
    # Of some families transformers makes one without its files, which knows no text: all of it would be <unk>.
    return None if set(found.get_vocab()) <= set(found.all_special_tokens) else found


def say_less(verbosity: int) -> None:
    """Keep transformers' notes and progress bars from between ours; with 1 and more they are shown."""
    if verbosity < 1:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        huggingface_hub.logging.set_verbosity_error()
        logging.getLogger("accelerate").setLevel(logging.ERROR)


def _check_windows(parts: Parts, config: HFConfig) -> None:
    """Hold the mapping against the window that each attention module says it has."""
    if len(parts.layers) != config.num_hidden_layers:
        raise UnmappedError(f"its config has {config.num_hidden_layers} layers, the model {len(parts.layers)}")
    for l, part in enumerate(parts.layers):
        said = getattr(part.attention, "sliding_window", "unsaid")
        expected = config.sliding_window if config.role(l) == "window" else None
        if said not in ("unsaid", expected) and not _says_for_all(parts, said):
            raise UnmappedError(f"layer {l} is mapped as {config.role(l)}, but its attention has sliding_window {said}")


def _says_for_all(parts: Parts, said: Any) -> bool:
    """Whether every layer carries the same value: then it is the config's, not the layer's."""
    return all(getattr(p.attention, "sliding_window", "unsaid") == said for p in parts.layers)


def _local(name: str) -> bool:
    """Whether only files that are here are looked for: of a folder, or, without a network, of the hub's cache."""
    return Path(name).is_dir() or not _reachable()


@cache
def _reachable() -> bool:
    """Whether the hub's name resolves. Its client would try for minutes before it says that it does not."""
    if getproxies().get("https"):
        return True
    try:
        socket.getaddrinfo(urlparse(huggingface_hub.constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _origin(name: str, config: Any) -> str:
    """What the weights are known by: their hash in a folder, the commit on the hub."""
    return weights_hash(Path(name)) if Path(name).is_dir() else f"commit:{getattr(config, '_commit_hash', None)}"
