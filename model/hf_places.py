"""Where the weights of a Hugging Face model lie: on devices, in fewer bits, or on the disk until their layer runs."""

import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from torch import nn


def placement(devices: list[torch.device], quantise: str | None) -> dict[str, Any]:
    """Arguments of from_pretrained that say where the weights go and how they are held."""
    options: dict[str, Any] = {}
    if quantise is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_8bit=quantise == "8bit", load_in_4bit=quantise == "4bit"
        )
    if len(devices) > 1:
        free = {d.index or 0: torch.cuda.mem_get_info(d)[0] for d in devices if d.type == "cuda"}
        return options | {"device_map": "balanced", "max_memory": free}
    if devices[0].type != "cpu" or quantise is not None:
        options["device_map"] = {"": devices[0]}
    return options


def on_disk(empty: nn.Module, decoder: nn.Module, device: torch.device, first: int) -> dict[str, Any]:
    """The same for a model whose layers from ``first`` on stay on the disk; accelerate reads the weights of each of
    their modules when it runs, and drops them behind it.

    empty: the model without weights, of which ``decoder`` is a part. What the checkpoint holds in another form is
    written into a folder of its own, which `with_folder` takes away again.
    """
    layers: Any = decoder.layers
    # By name: where accelerate reads from the disk it knows no device objects.
    here = str(device)
    at = _map(empty, layers, here, lambda l: here if l < first else "disk")
    return {"device_map": at, "offload_folder": mkdtemp(prefix="replayscope-layers-")}


@contextmanager
def with_folder(options: dict[str, Any]) -> Iterator[Callable[[nn.Module], None]]:
    """The folder that `on_disk` made, if it did, goes with the model that is handed to what this yields, or when the
    program ends; where none is handed over, at once."""
    owners: list[weakref.finalize] = []
    folder = options.get("offload_folder")

    def owned(module: nn.Module) -> None:
        if folder:
            owners.append(weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True))

    try:
        yield owned
    finally:
        if folder and not owners:
            shutil.rmtree(folder, ignore_errors=True)


def _map(
    module: nn.Module, layers: nn.Module, device: str, of_layer: Callable[[int], str], path: str = ""
) -> dict[str, str]:
    """A device for every part beside the path to the layers, and one for every layer: a device for a part that holds
    layers would be theirs as well."""
    out = {f"{path}{name}": device for name, _ in module.named_parameters(recurse=False)}
    for name, child in module.named_children():
        if child is layers:
            out |= {f"{path}{name}.{l}": of_layer(l) for l in range(len(list(layers.children())))}
        elif any(part is layers for part in child.modules()):
            out |= _map(child, layers, device, of_layer, f"{path}{name}.")
        else:
            out[f"{path}{name}"] = device
    return out
