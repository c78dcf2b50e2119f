"""Where the models that come with the package lie. No torch, so that they can be listed quickly."""

from importlib.resources import files
from pathlib import Path


def presets() -> dict[str, Path]:
    """name → weights file of the models that come with the package; the config lies beside it as .json."""
    folder = Path(str(files("replayscope.model") / "config.py")).parent
    return {f.stem: f for f in sorted(folder.glob("*.safetensors"), key=lambda f: f.stem)}


def expected_hash(path: Path) -> str:
    """SHA-256 that a preset's weights file must have, by the list beside it; empty for a file that is not listed."""
    listed = (line.split() for line in (path.parent / "SHA256SUMS").read_text(encoding="ascii").splitlines())
    return next((digest for digest, name in listed if name == path.name), "")
