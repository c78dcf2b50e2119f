"""Dumps as SGLang's dumper writes them: by its own module where one is installed, else in its layout.

The layout is that of sglang/srt/debug_utils/dumper.py (0.5.10): files k=v___k=v.pt in the order step, rank, dump_index,
name, recompute_status and tags, each {'value': tensor, 'meta': {…}}. Set SGLANG_DUMPER to a dumper.py to use that one.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# (name, tensor, tags) of each step; what a rank dumps.
Steps = list[list[tuple[str, torch.Tensor, dict[str, Any]]]]
Writer = Callable[..., Path]


def by_layout(
    folder: Path, steps: Steps, rank: int = 0, size: int = 1, dims: str | None = None, pipeline: bool = False
) -> Path:
    """Write one rank's dump in the dumper's layout; returns its folder. pipeline: the ranks are stages of one."""
    out, index = folder / "exp", 0
    out.mkdir(parents=True, exist_ok=True)
    for step, dumped in enumerate(steps):
        for name, value, tags in dumped:
            index += 1
            named = {
                "step": step,
                "rank": rank,
                "dump_index": index,
                "name": name,
                "recompute_status": "disabled",
            } | tags
            parallel = {"tp_rank": rank, "tp_size": size, "pp_rank": 0, "pp_size": 1}
            if pipeline:
                parallel = {"tp_rank": 0, "tp_size": 1, "pp_rank": rank, "pp_size": size}
            meta = {**named, "world_rank": rank, "world_size": size, "sglang_parallel_info": parallel}
            meta |= {"dims": dims} if dims and "positions" not in name and "ids" not in name else {}
            file = "___".join(f"{key}={item}" for key, item in named.items())
            torch.save({"value": value, "meta": meta}, out / f"{file}.pt")
    return out


def by_sglang(folder: Path, steps: Steps) -> Path:
    """The same by SGLang's own module, of one rank."""
    module = _module()
    dumper = module._Dumper(
        config=module.DumperConfig(enable=True, dir=str(folder), exp_name="exp", enable_output_console=False)
    )
    for dumped in steps:
        for name, value, tags in dumped:
            dumper.dump(name, value, **tags)
        dumper.step()
    return folder / "exp"


def writers() -> dict[str, Writer]:
    """name -> writer, of those that are here."""
    return {"layout": by_layout} | ({"sglang": by_sglang} if _file() else {})


def _file() -> Path | None:
    if named := os.environ.get("SGLANG_DUMPER"):
        return Path(named)
    found = importlib.util.find_spec("sglang")
    places = found.submodule_search_locations if found else None
    file = Path(next(iter(places)), "srt/debug_utils/dumper.py") if places else None
    return file if file and file.is_file() else None


def _module():
    # Loaded by its path: it needs nothing but torch, while the package around it needs everything.
    spec = importlib.util.spec_from_file_location("sglang_dumper", _file())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
