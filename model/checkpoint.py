"""A checkpoint in the official layout: one file or shards with an index, read by name, checked before anything is used.

Vision, DSpark and the layers behind the model's are skipped by name. Every other tensor that is missing, unknown,
misshapen or of a dtype that cannot be decoded is named in one error.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from replayscope.model.config import ModelConfig
from replayscope.model.manifest import check_entries, expert_name, find_entries, scale_name
from replayscope.model.placement import Where, place
from replayscope.model.shapes import TILE, expected_shapes
from replayscope.model.storage import Entry, Shard
from replayscope.model.weights import (
    TOKEN_MAP,
    Layer,
    Model,
    WeightsError,
    all_finite,
    check_token_map,
    decode,
    make_layer,
)

# Kept in float32 whatever the model's dtype: stored so, and they enter float32 arithmetic (sink, mixes, router bias).
_WIDE = re.compile(r"(attn_sink|gate\.bias|hc_(attn|ffn)_(fn|base|scale)|compressor\.w(kv|gate)\.weight)$")

_ALIGNED = 64  # bytes: where torch begins what it allocates on the CPU


@dataclass(frozen=True)
class Checkpoint:
    """The stored tensors of a model by official name. Opening reads headers only."""

    path: Path
    config: ModelConfig
    entries: dict[str, Entry]

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A tensor decoded, in ``dtype`` (wide ones in at least float32). Raises WeightsError if it is not finite."""
        scale = self.entries.get(scale_name(name))
        value = decode(self.entries[name].view().to(device), None if scale is None else scale.view())
        if not all_finite(value):
            raise WeightsError(f"weights hold NaN or infinity: {name}")
        return value.to(torch.promote_types(dtype, torch.float32) if _WIDE.search(name) else dtype)

    def check_scales(self, names: Iterable[str]) -> None:
        """Raise WeightsError for scales that are not finite; packed numbers themselves always are."""
        for name in names:
            scale = self.entries.get(scale_name(name))
            if scale is not None and not all_finite(scale.view().float()):
                raise WeightsError(f"weights hold NaN or infinity: {scale_name(name)}")

    def table(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A matrix of which only the rows asked for are read; it is indexed and asked for dtype and device only."""
        return cast(Tensor, Table(self, name, dtype, torch.device(device)))

    def layer_names(self, layer: int) -> list[str]:
        """Names of a layer's tensors without its Engram table, which is never read whole."""
        return [k for k in self.shapes if k.startswith(f"layers.{layer}.") and not k.endswith("engram.embed.weight")]

    def release(self, *names: str) -> None:
        """Give the pages of the shards that hold these tensors back to the system, of all shards without names.

        Whole shards: a page that is read brings its neighbours, those of other tensors too.
        """
        beside = [scale_name(name) for name in names if scale_name(name) in self.entries]
        for shard in {self.entries[name].shard for name in (*names, *beside)} if names else self.shards:
            shard.release()

    @cached_property
    def shards(self) -> set[Shard]:
        return {e.shard for e in self.entries.values()}

    def read_ahead(self, names: Iterable[str]) -> None:
        """Ask the system for these tensors' bytes before they are needed."""
        for name in names:
            for entry in (self.entries[name], self.entries.get(scale_name(name))):
                if entry is not None:
                    entry.shard.read_ahead(entry.start, entry.stop)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return expected_shapes(self.config)

    @cached_property
    def token_map(self) -> Tensor | None:
        """token id → compressed id [vocab]; None without Engram. Raises WeightsError where Engram lacks it."""
        if not self.config.engram_layer_ids:
            return None
        found = read_token_map(self.path if self.path.is_dir() else self.path.parent)
        check_token_map(self.config, found)
        return found

    def places(self, where: Where) -> tuple[torch.device, ...]:
        """The device of each layer, by stored bytes. Raises WeightsError for more devices than layers."""

        def stored(layer: int) -> int:
            found = (self.entries.get(k) for name in self.layer_names(layer) for k in (name, scale_name(name)))
            return sum(e.stop - e.start for e in found if e is not None)

        try:
            return place([stored(i) for i in self.config.layers], where)
        except ValueError as error:
            raise WeightsError(str(error)) from error

    def device_bytes(self, dtype: torch.dtype, places: Sequence[torch.device]) -> dict[torch.device, int]:
        """Device → what the model takes there in ``dtype``; Engram tables stay on disk."""
        parts = {layer: self.layer_names(layer) for layer in self.config.layers}
        parts[0] = ["embed.weight", *parts[0]]
        parts[len(places) - 1] = [*parts[len(places) - 1], "norm.weight", "head.weight"]
        out = dict.fromkeys(places, 0)
        for layer, device in enumerate(places):
            out[device] += sum(math.prod(self.shapes[name]) for name in parts[layer]) * dtype.itemsize
        return out

    def layer(self, i: int, dtype: torch.dtype, device: torch.device | str, stack: Callable[[str], Tensor]) -> Layer:
        """Layer i decoded; stack: its routed experts' w1, w2 or w3. Of an Engram table rows are read as needed."""

        def get(name: str) -> Tensor:
            full = f"layers.{i}.{name}"
            return self.table(full, dtype, device) if name == "engram.embed.weight" else self.read(full, dtype, device)

        return make_layer(self.config, i, get, stack, self.token_map)

    def resident(self, dtype: torch.dtype, where: Where = "cpu") -> Model:
        """The whole model decoded in memory, Engram tables excepted."""
        places = self.places(where)

        def stack(i: int, part: str) -> Tensor:
            count = self.config.n_routed_experts
            first = self.read(expert_name(i, 0, part), dtype, places[i])
            out = room(first, count)
            out[0] = first
            for e in range(1, count):
                out[e] = self.read(expert_name(i, e, part), dtype, places[i])
            return out

        embed = self.read("embed.weight", dtype, places[0])
        head, norm = (self.read(f"{k}.weight", dtype, places[-1]) for k in ("head", "norm"))
        layers = []
        for i in self.config.layers:
            layers.append(self.layer(i, dtype, places[i], partial(stack, i)))
            self.release()
        return Model(self.config, embed, head, norm, tuple(layers))


@dataclass(frozen=True)
class Table:
    """Stands in for a stored matrix [rows, columns] of which only rows are asked for: ``table[ids]`` decodes those."""

    checkpoint: Checkpoint
    name: str
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, ids: Tensor) -> Tensor:
        """ids [...] → rows [..., columns]. Raises WeightsError for a row that is not finite."""
        weight = self.checkpoint.entries[self.name]
        scale = self.checkpoint.entries.get(scale_name(self.name))
        wanted, back = torch.unique(ids.cpu(), return_inverse=True)
        scales = None
        if scale is not None:
            scales = scale.rows(wanted if scale.shape[0] == weight.shape[0] else wanted // TILE)
        values = decode(weight.rows(wanted), scales)
        if not all_finite(values):
            raise WeightsError(f"weights hold NaN or infinity: {self.name}")
        return values.to(self.device, self.dtype)[back.to(self.device)]


def room(first: Tensor, count: int) -> Tensor:
    """Room for ``count`` tensors like ``first`` [count, …], not filled, each at a multiple of 64 bytes.

    That is where torch puts a tensor of its own, such as an expert that is streamed: a product of the same numbers is
    the same bits only where they lie alike.
    """
    apart = -(-first.nbytes // _ALIGNED) * _ALIGNED // first.itemsize
    return first.new_empty((count, apart))[:, : first.numel()].unflatten(1, first.shape)


def open_checkpoint(path: str | Path, layers: int | None = None, config: ModelConfig | None = None) -> Checkpoint:
    """A folder (config.json beside the shards) or one file (its config beside it as .json), checked by its headers.

    layers: run only so many. Raises WeightsError with one line that names every tensor that does not fit.
    """
    path = Path(path)
    config = config or _read_config(path)
    if layers is not None:
        config = first_layers(config, layers)
    checkpoint = Checkpoint(path, config, find_entries(path, config))
    check_entries(checkpoint.path, checkpoint.entries, checkpoint.shapes)
    _ = checkpoint.token_map
    return checkpoint


def read_tensors(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Every tensor of the model decoded, by official name."""
    checkpoint = Checkpoint(path, config, find_entries(path, config))
    check_entries(checkpoint.path, checkpoint.entries, checkpoint.shapes)
    return {name: checkpoint.read(name, dtype, device) for name in checkpoint.shapes}


def first_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The config of the first ``count`` layers, schedules cut with it.

    Raises WeightsError, with the nearest counts that can be, for one that leaves no valid config.
    """

    def cut(k: int) -> ModelConfig:
        def below(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(l for l in ids if l < k)

        return replace(
            config,
            num_hidden_layers=k,
            compress_ratios=config.compress_ratios[:k],
            kv_source_layer_ids=below(config.kv_source_layer_ids),
            index_source_layer_ids=below(config.index_source_layer_ids),
            engram_layer_ids=below(config.engram_layer_ids),
            candidate_source_layer_id=config.candidate_source_layer_id if config.candidate_source_layer_id < k else -1,
        )

    def why_not(k: int) -> str:
        try:
            cut(k)
        except ValueError as e:
            return str(e)
        return ""

    if count > config.num_hidden_layers:
        raise WeightsError(f"--layers-only {count}: the model has {config.num_hidden_layers} layers")
    if reason := why_not(count):
        able = [k for k in range(1, config.num_hidden_layers + 1) if not why_not(k)]
        near = [k for k in able if k < count][-1:] + [k for k in able if k > count][:1]
        raise WeightsError(f"--layers-only {count} leaves no valid model ({reason}); try {' or '.join(map(str, near))}")
    return cut(count)


def read_token_map(folder: Path) -> Tensor | None:
    """token id → compressed id [vocab], from the file beside the config; None if there is none."""
    file = folder / TOKEN_MAP
    if not file.is_file():
        return None
    try:
        return torch.tensor(json.loads(file.read_text(encoding="utf-8")), dtype=torch.long)
    except (ValueError, TypeError, UnicodeDecodeError) as e:
        raise WeightsError(f"{file} is not a JSON list of ids: {e}") from e


def _read_config(path: Path) -> ModelConfig:
    file = path / "config.json" if path.is_dir() else path.with_suffix(".json")
    try:
        return ModelConfig.load(file)
    except FileNotFoundError:
        raise WeightsError(f"{path} has no config.json") from None
    except RecursionError:
        raise WeightsError(f"{file} is nested too deeply") from None
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise WeightsError(f"{file}: {e}") from e
