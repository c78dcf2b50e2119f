"""Where the models that come with the package lie. No torch, so that they can be listed quickly."""

from importlib.resources import files
from pathlib import Path


def presets() -> dict[str, Path]:
    """name → weights file of the models that come with the package; the config lies beside it as .json."""
    folder = Path(str(files("replayscope.model") / "config.py")).parent
    return {f.stem: f for f in sorted(folder.glob("*.safetensors"))}
