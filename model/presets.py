"""Finding a model by name: a preset inside the package, or a folder with a checkpoint."""

import hashlib
from importlib.resources import files
from pathlib import Path

import torch

from replayscope.model.config import ModelConfig
from replayscope.model.weights import Model, WeightsError, build, load, read_tensors


def presets() -> dict[str, Path]:
    """name → weights file of the models that come with the package; the config lies beside it as .json."""
    folder = Path(str(files("replayscope.model") / "config.py")).parent
    return {f.stem: f for f in sorted(folder.glob("*.safetensors"))}


def load_any(name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Model, str]:
    """The model called ``name`` (a preset, or a folder) and the SHA-256 of its weights.

    Raises WeightsError with one line if it is neither, or cannot be used.
    """
    known = presets()
    if name in known:
        file = known[name]
        config = ModelConfig.load(file.with_suffix(".json"))
        return build(config, read_tensors(file, config, dtype, device)), weights_hash([file])
    path = Path(name)
    if not path.is_dir():
        raise WeightsError(f"unknown model {name!r}; valid: {', '.join(known)}, or a folder with config.json")
    return load(path, dtype, device), weights_hash(sorted(path.glob("*.safetensors")))


def weights_hash(paths: list[Path]) -> str:
    """SHA-256 over the files' bytes, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
