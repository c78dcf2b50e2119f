"""What engines write, as named tensors: folders of SGLang's dumper, vLLM's hidden states, safetensors and .npy files.

Nothing here runs code from a file: .pt files are read as plain tensors only (weights_only), .npy without pickles.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replayscope.inspector.errors import UsageError
from replayscope.traces.dtypes import BITVIEWS, LOGICAL_DTYPES

_BITS = {1: torch.uint8, 2: torch.uint16}
_SMALL = 1 << 26  # what a tensor that repeats its numbers may grow to when they are written out
_HOOKED = "non_intrusive__"  # what the dumper puts before the names of modules it was not asked for


@dataclass(frozen=True)
class Loaded:
    """values: as stored in a trace. logical: their dtype. dims: names of the dimensions, if the file has them. ranks:
    name of a group -> (rank in it, its size); the whole world is the group ''."""

    values: np.ndarray
    logical: str
    dims: str | None = None
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One tensor of a dump. layer, rank: by its tags, None if it has none. where: its file, for messages."""

    name: str
    where: str
    load: Callable[[], Loaded]
    layer: int | None = None
    rank: int | None = None
    step: int = 0


def read(path: Path, format: str, layers: tuple[int, ...]) -> list[Item]:
    """The tensors of a dump; their values are read when they are asked for. Raises UsageError in one line."""
    if not path.exists():
        raise UsageError(f"no {path} to import; check the path")
    if format == "vllm-hidden":
        items = _vllm(path, layers)
    else:
        if not path.is_dir():
            raise UsageError(f"{path} is not a folder")
        items = list(_sglang(path) if format == "sglang-dump" else _folder(path))
    if not items:
        raise UsageError(f"{path} holds nothing that --format {format} reads")
    return items


def choose_steps(items: Sequence[Item], first: int, stop: int | None) -> list[Item]:
    """The items of steps [first, stop); None is the end. Raises UsageError with the steps that there are."""
    kept = [item for item in items if first <= item.step and (stop is None or item.step < stop)]
    if not kept:
        have = sorted({item.step for item in items})
        raise UsageError(f"the dump has no step {first}; its steps are {', '.join(map(str, have[:20]))}")
    return kept


def stored(value: Tensor, where: str) -> tuple[np.ndarray, str]:
    """Storage array and logical dtype of a tensor: dtypes that numpy lacks as unsigned views, bool as uint8."""
    if value.layout != torch.strided or value.is_quantized or value.is_complex():
        raise UsageError(f"{where} holds a {value.dtype} tensor that is no plain array")
    size = value.numel() * value.element_size()
    if size > max(value.untyped_storage().nbytes(), _SMALL):
        raise UsageError(f"{where} claims {size} bytes and holds {value.untyped_storage().nbytes()}")
    value = value.detach().contiguous()
    if value.dtype == torch.bool:
        value = value.to(torch.uint8)
    logical = str(value.dtype).removeprefix("torch.")
    if logical not in LOGICAL_DTYPES:
        raise UsageError(f"{where} holds {logical}, which a trace cannot hold")
    return (value.view(_BITS[value.element_size()]) if logical in BITVIEWS else value).numpy(), logical


def _sglang(folder: Path) -> Iterator[Item]:
    """Files k=v___k=v.pt, each {'value': …, 'meta': {…}}: layout of sglang.srt.debug_utils.dumper, 0.5.10."""
    for path in sorted(folder.glob("*.pt")):
        tags = dict(part.split("=", 1) for part in path.name.removesuffix(".pt").split("___") if "=" in part)
        name = tags.get("name")
        if name is None:
            raise UsageError(f"{path.name} is no file of SGLang's dumper: its name has no name=")
        step, rank = (_number(tags.get(key, "0"), f"{path.name}: {key}") for key in ("step", "rank"))
        layer = _number(tags["layer_id"], f"{path.name}: layer_id") if "layer_id" in tags else None

        def load(path: Path = path, tags: Mapping[str, str] = tags) -> Loaded:
            return _load_pt(path, tags)

        yield Item(name.removeprefix(_HOOKED), path.name, load, layer, rank, step)


def _load_pt(path: Path, tags: Mapping[str, str]) -> Loaded:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file that is damaged anyway
            data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Which exception depends on what the file is: cut short, no archive, or a pickle that names other code.
        reason = " ".join(str(error).split("\n")[0].split())[:100] or type(error).__name__
        raise UsageError(f"{path} is not a file of plain tensors, and nothing in it is run: {reason}") from None
    meta: Any = {}
    if isinstance(data, dict) and "value" in data:
        meta, data = data.get("meta", {}), data["value"]
    if not isinstance(meta, dict) or not isinstance(data, Tensor):
        raise UsageError(f"{path} holds no tensor but {type(data).__name__}")
    for key in ("name", "step", "rank"):
        if key in meta and str(meta[key]) != tags.get(key, str(meta[key])):
            raise UsageError(f"{path.name} was renamed: its {key} is {str(meta[key])[:60]!r}")
    values, logical = stored(data, path.name)
    dims = meta.get("dims")
    if dims is not None and not isinstance(dims, str):
        raise UsageError(f"{path.name}: dims is not a text")
    return Loaded(values, logical, dims, _ranks(meta, path.name))


def _ranks(meta: Mapping[str, Any], where: str) -> dict[str, tuple[int, int]]:
    """tp_rank and tp_size of the plugins' *_parallel_info, and the world's."""
    groups: dict[str, tuple[Any, Any]] = {"": (meta.get("world_rank", 0), meta.get("world_size", 1))}
    for key, info in meta.items():
        if str(key).endswith("_parallel_info") and isinstance(info, dict):
            for part in info:
                group = str(part).removesuffix("_rank")
                if group != part and f"{group}_size" in info:
                    groups[group] = info[part], info[f"{group}_size"]
    for group, (rank, size) in groups.items():
        if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
            raise UsageError(f"{where}: {group or 'world'} rank {rank!r} of {size!r} cannot be")
    return groups


def _vllm(path: Path, layers: tuple[int, ...]) -> list[Item]:
    """hidden_states [token, layer id, d] and token_ids [token] of ExampleHiddenStatesConnector: of layer id k, what
    enters layer k."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise UsageError(f"{path} holds {len(files)} safetensors files; give the one of your request")
    (file,) = files
    if not layers:
        raise UsageError(
            "vLLM's file does not say which layers it holds: give a map with layers, as the engine had them"
        )
    items = {item.name: item for item in _safetensors(file)}
    if "hidden_states" not in items or "token_ids" not in items:
        raise UsageError(f"{file} has no hidden_states and token_ids; it holds {', '.join(items) or 'nothing'}")
    shape = _shape(file, "hidden_states")
    if len(shape) != 3 or shape[1] != len(layers):
        raise UsageError(f"{file}: hidden_states is {shape}, want [token, {len(layers)} layer ids of the map, d]")

    def of(at: int) -> Callable[[], Loaded]:
        return lambda: _load_safetensors(file, "hidden_states", lambda part: part[:, at])

    states = [Item(f"hidden_states.{layer}", f"{file.name}:hidden_states", of(i)) for i, layer in enumerate(layers)]
    return [*states, items["token_ids"]]


def _folder(folder: Path) -> Iterator[Item]:
    """Tensors of safetensors files under their names, and .npy files under theirs."""
    seen: dict[str, str] = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.npy")]):
        items = _safetensors(path) if path.suffix == ".safetensors" else [_npy(path)]
        for item in items:
            if item.name in seen:
                raise UsageError(f"{item.name} is in {seen[item.name]} and in {path.name}; which one is it?")
            seen[item.name] = path.name
            yield item


def _safetensors(path: Path) -> list[Item]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, UnicodeError) as error:
        raise UsageError(f"{path} is no safetensors file: {error}") from None

    def of(name: str) -> Callable[[], Loaded]:
        return lambda: _load_safetensors(path, name, lambda part: part[:])

    return [Item(name, f"{path.name}:{name}", of(name)) for name in names]


def _shape(path: Path, name: str) -> list[int]:
    with safe_open(path, framework="pt") as file:
        return list(file.get_slice(name).get_shape())


def _load_safetensors(path: Path, name: str, take: Callable[[Any], Tensor]) -> Loaded:
    try:
        with safe_open(path, framework="pt") as file:
            part = file.get_slice(name)
            value = take(part) if part.get_shape() else file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: {name} cannot be read: {error}") from None
    return Loaded(*stored(value, f"{path.name}:{name}"))


def _npy(path: Path) -> Item:
    def load() -> Loaded:
        try:
            # Mapped, so that a header cannot ask for more memory than the file has bytes.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        except Exception as error:
            # The header is Python text, and numpy lets through whatever its parser raises.
            raise UsageError(f"{path} is no plain .npy array: {error}") from None
        if values.dtype.kind == "V":  # how numpy writes bf16 and fp8
            values = values.view(f"u{values.dtype.itemsize}")
        if values.dtype.kind == "b":
            values = values.view(np.uint8)
        values = values.astype(values.dtype.newbyteorder("="))
        if values.dtype.name not in LOGICAL_DTYPES:
            raise UsageError(f"{path.name} holds {values.dtype}, which a trace cannot hold")
        return Loaded(values, values.dtype.name)

    return Item(path.stem, path.name, load)


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{what} is {text[:20]!r}, not a number")
    return int(text)
