"""What a trace says of how it was made: enough to run it again."""

import hashlib
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from replayscope.inspector.backend import Runnable
from replayscope.inspector.options import RunOptions
from replayscope.kernels.impl import choose

_PACKAGES = ("replayscope", "torch", "triton", "numpy", "h5py", "safetensors", "transformers")


def collect(
    options: RunOptions, name: str, weights: str, ids: Tensor, model: Runnable, argv: list[str]
) -> dict[str, Any]:
    """argv, options, model and its weights' hash, token hash, dtype, device, seed, versions. JSON values only."""
    devices = [torch.device(name) for name in options.devices] or [model.device]
    about = {k: v for k, v in asdict(options).items() if k not in ("out", "force", "verbosity", "resume")}
    return {
        "argv": ["replayscope", *argv[1:]],
        "options": about | {"prompt": {"kind": options.prompt.kind, "value": options.prompt.value[:500]}},
        "model": name,
        "weights_sha256": weights,
        "tokens_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "semantics": list(options.semantics),
        "design": "fixed" if options.suffix is None else "after",
        "suffix": "all" if options.suffix is None else options.suffix,
        "dtype": str(model.dtype).removeprefix("torch."),
        "audit": options.audit,
        "reproducible": options.reproducible,
        "seed": options.seed,
        "forced": options.forced,
        **_impl(options.impl, model, devices),
        "device": ", ".join(map(_device_name, devices)),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {p: v for p in _PACKAGES if (v := _version(p))},
    }


def _impl(asked: str, model: Runnable, devices: list[torch.device]) -> dict[str, str]:
    """The form of the kernels that runs, and why: by kind of device unless there is only one, or all run the same."""
    by_kind = {d.type: choose(asked, d, model.dtype) for d in model.kernel_devices}
    choices = set(by_kind.values())
    if len(choices) == 1 and set(by_kind) == {d.type for d in devices}:
        (choice,) = choices
        return {"impl": choice.impl, "impl_reason": choice.reason}
    return {
        "impl": ", ".join(f"{choice.impl} on {kind}" for kind, choice in by_kind.items()),
        "impl_reason": "; ".join(f"on {kind}: {choice.reason}" for kind, choice in by_kind.items()),
    }


def _device_name(device: torch.device) -> str:
    return str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
