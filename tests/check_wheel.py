"""Compare a wheel with the tree: every tracked file of the packages must be in it. Usage: check_wheel.py WHEEL."""

import subprocess
import sys
import zipfile
from pathlib import Path

FOLDERS = ("inspector", "model", "kernels", "ui", "traces")


def missing(wheel: Path, root: Path) -> list[str]:
    """Names under `root` that git tracks in a package folder and that `wheel` lacks."""
    tracked = subprocess.run(["git", "ls-files", *FOLDERS], cwd=root, check=True, capture_output=True, text=True).stdout
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    return [name for name in tracked.splitlines() if f"replayscope/{name}" not in names]


if __name__ == "__main__":
    lost = missing(Path(sys.argv[1]), Path(__file__).resolve().parents[1])
    if lost:
        sys.exit(f"the wheel lacks {len(lost)} files of the tree: {', '.join(lost)}")
