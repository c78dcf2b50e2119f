"""Finding a model by name: a preset inside the package, or a folder with a checkpoint."""

import logging
from pathlib import Path

import torch

from replayscope.model.checkpoint import open_checkpoint
from replayscope.model.manifest import weights_hash
from replayscope.model.placement import Where
from replayscope.model.preset_files import expected_hash, presets
from replayscope.model.streaming import streamed
from replayscope.model.weights import Model, WeightsError

log = logging.getLogger(__name__)

# Of the free memory, what weights may take: the rest is for states, and for what else runs.
_SHARE = 0.7


def load_any(
    name: str,
    dtype: torch.dtype,
    where: Where = "cpu",
    *,
    layers: int | None = None,
    stream: bool = False,
) -> tuple[Model, str]:
    """The model called ``name`` (a preset, or a folder) and the SHA-256 of its weights.

    where: a device, or several, each for a block of its layers. layers: its first so many only. It is streamed layer by
    layer if ``stream``, or if it would not fit into what is free. Raises WeightsError with one line if there is no such
    model, or if it cannot be used.
    """
    path = presets().get(name) or Path(name)
    if not path.exists() or (path == Path(name) and not path.is_dir()):
        raise WeightsError(f"unknown model {name!r}; valid: {', '.join(presets())}, or a folder with config.json")
    digest = weights_hash(path)
    if path.is_file() and digest != expected_hash(path):
        raise WeightsError(f"{path.name} of the package is not the file that was released; install replayscope again")
    checkpoint = open_checkpoint(path, layers)
    places = checkpoint.places(where)
    sizes = checkpoint.device_bytes(dtype, places)
    free = {device: free_memory(device) for device in sizes}
    stream = stream or any(size > _SHARE * room for d, size in sizes.items() if (room := free[d]) is not None)
    model = streamed(checkpoint, dtype, where) if stream else checkpoint.resident(dtype, where)
    how = "streamed layer by layer" if stream else "in memory"
    # A small preset in memory is nothing to speak of.
    level = logging.INFO if stream or path.is_dir() else logging.DEBUG
    for device, size in sizes.items():
        there = f" on {device}, {places.count(device)} layers" if len(sizes) > 1 else ""
        room = free[device]
        left = "" if room is None else f" of {room / 1e6:,.0f} MB free"
        log.log(level, "weights %s%s: decoded they take %s MB%s", how, there, f"{size / 1e6:,.1f}", left)
    return model, digest


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device, or of the host; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        found.append(int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError, KeyError):
        # No Linux, no control group, or one without a limit ("max").
        pass
    return min(found, default=None)
