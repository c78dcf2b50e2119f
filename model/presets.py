"""Finding a model by name: a preset inside the package, or a folder with a checkpoint."""

import logging
from pathlib import Path

import torch

from replayscope.model.checkpoint import open_checkpoint
from replayscope.model.manifest import weights_hash
from replayscope.model.preset_files import presets
from replayscope.model.streaming import streamed
from replayscope.model.weights import Model, WeightsError

log = logging.getLogger(__name__)

# Of the free memory, what weights may take: the rest is for states, and for what else runs.
_SHARE = 0.7


def load_any(
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    layers: int | None = None,
    stream: bool = False,
) -> tuple[Model, str]:
    """The model called ``name`` (a preset, or a folder) and the SHA-256 of its weights.

    layers: its first so many only. It is streamed layer by layer if ``stream``, or if it would not fit into what is
    free. Raises WeightsError with one line if there is no such model, or if it cannot be used.
    """
    path = presets().get(name) or Path(name)
    if not path.exists() or (path == Path(name) and not path.is_dir()):
        raise WeightsError(f"unknown model {name!r}; valid: {', '.join(presets())}, or a folder with config.json")
    checkpoint = open_checkpoint(path, layers)
    where = torch.device(device)
    size, free = checkpoint.bytes(dtype), free_memory(where)
    stream = stream or (free is not None and size > _SHARE * free)
    model = streamed(checkpoint, dtype, where) if stream else checkpoint.resident(dtype, where)
    room = "" if free is None else f" of {free / 1e6:,.0f} MB free"
    how = "streamed layer by layer" if stream else "in memory"
    # A small preset in memory is nothing to speak of.
    level = logging.INFO if stream or path.is_dir() else logging.DEBUG
    log.log(level, "weights %s: decoded they take %s MB%s", how, f"{size / 1e6:,.1f}", room)
    return model, weights_hash(path)


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
