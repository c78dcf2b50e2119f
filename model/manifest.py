"""Which tensors a checkpoint holds and where: index, shards, names skipped and names owed; what identifies it."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replayscope.model.config import ModelConfig
from replayscope.model.shapes import TILE
from replayscope.model.storage import Entry, Shard
from replayscope.model.weights import WeightsError, some

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALES = ("F8_E8M0", "F32", "F16", "BF16")
# Above it a checkpoint is known by its headers and the beginning of every tensor: hashing all would take minutes.
_HASHED_WHOLE, _SAMPLE = 16 << 30, 64 << 10


def expert_name(layer: int, number: int, part: str) -> str:
    """Name of w1, w2 or w3 of a routed expert."""
    return f"layers.{layer}.ffn.experts.{number}.{part}.weight"


def scale_name(name: str) -> str:
    """Name of the scales of a tensor."""
    return name.removesuffix(".weight") + ".scale"


def skipped(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to what is not run.

    Vision, DSpark, the router's bias for image tokens, layers behind the config's, Engram where the config has none.
    """
    if name.startswith(("vision.", "aligner.", "image_", "mtp.")) or name.endswith(".ffn.gate.bias_vl"):
        return True
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= config.num_hidden_layers:
        return True
    return ".engram." in name and not config.engram_layer_ids


def find_entries(path: Path, config: ModelConfig) -> dict[str, Entry]:
    """Name → entry of what is not skipped, by the index where there is one; other shards are not opened."""
    index = path / INDEX
    if path.is_dir() and index.is_file():
        places = {name: file for name, file in _read_index(index).items() if not skipped(name, config)}
        shards = {}
        for file in sorted(set(places.values())):
            if not (path / file).is_file():
                raise WeightsError(f"{index} names {file}, which is not there")
            shards[file] = Shard(path / file).entries
        return {name: shards[file][name] for name, file in places.items() if name in shards[file]}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise WeightsError(f"no .safetensors file in {path}")
    out: dict[str, Entry] = {}
    for file in files:
        mine = {name: e for name, e in Shard(file).entries.items() if not skipped(name, config)}
        if twice := sorted(out.keys() & mine.keys()):
            raise WeightsError(f"{file} holds what another file of the folder holds too: {some(twice)}")
        out |= mine
    return out


def _read_index(file: Path) -> dict[str, str]:
    try:
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(name, str) and Path(name).name == name for name in places.values()):
            return places
        raise ValueError("weight_map must name files of its own folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise WeightsError(f"{file} is no index of shards: {e!r}") from e


def check_entries(path: Path, entries: Mapping[str, Entry], want: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightsError that names all that is missing, unknown, misshapen or cannot be decoded.

    want: name → logical shape. A packed or FP8 tensor owes a scale as well, per tile or per row.
    """
    missing, wrong, dtypes, scales = [], [], [], set()
    for name, shape in want.items():
        entry = entries.get(name)
        if entry is None:
            missing.append(name)
            continue
        packed, quantised = entry.dtype == "I8", entry.dtype in ("I8", "F8_E4M3")
        if not (entry.dtype in _FLOATS or (quantised and len(shape) == 2)):
            dtypes.append(f"{name} {entry.dtype}")
            continue
        stored = (*shape[:-1], -(-shape[-1] // 2)) if packed else shape
        if entry.shape != stored:
            wrong.append(f"{name} {entry.shape} wants {stored}")
        if not quantised:
            continue
        beside = scale_name(name)
        scales.add(beside)
        scale = entries.get(beside)
        columns = -(-shape[1] // TILE)
        able = [(shape[0], columns)] + [(-(-shape[0] // TILE), columns)] * (not packed)
        if scale is None:
            missing.append(beside)
        elif scale.dtype not in _SCALES:
            dtypes.append(f"{beside} {scale.dtype}")
        elif scale.shape not in able:
            wrong.append(f"{beside} {scale.shape} wants {able[-1]}")
    extra = [name for name in entries if name not in want and name not in scales]
    kinds = {"missing": missing, "unknown": extra, "misshapen": wrong, "of a dtype that cannot be read": dtypes}
    if any(kinds.values()):
        said = "; ".join(f"{kind} {some(names)}" for kind, names in kinds.items() if names)
        raise WeightsError(f"weights of {path} do not fit the config: {said}")


def weights_hash(path: Path) -> str:
    """SHA-256 over the bytes of a file, or of a folder's safetensors files in order.

    More than 16 GiB are known by ``sampled:`` and the SHA-256 of the headers and of the beginning of every tensor.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    if sum(f.stat().st_size for f in files) > _HASHED_WHOLE:
        for file in files:
            _hash_sample(digest, Shard(file))
        return f"sampled:{digest.hexdigest()}"
    for file in files:
        with file.open("rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _hash_sample(digest: Any, shard: Shard) -> None:
    with shard.path.open("rb") as f:
        digest.update(f.read(8 + shard.header_size))
        for entry in sorted(shard.entries.values(), key=lambda e: e.start):
            f.seek(entry.start)
            digest.update(f.read(min(entry.stop - entry.start, _SAMPLE)))
