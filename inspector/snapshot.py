"""Where a run stands between two layers, kept beside its `.partial` so that a run that was stopped can be taken up.

The unit is the layer: all arms and cuts pass it together, so no run is finished before the last one. A snapshot holds
what the next layer reads (streams, entries, choices, of every request and oracle) and what has been folded so far.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from replayscope.inspector.backend import Engine
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.fold import Fold
from replayscope.inspector.frame import Frame
from replayscope.inspector.oracle import Oracles
from replayscope.inspector.plan import Plan
from replayscope.inspector.resume import identity, unfinished
from replayscope.inspector.step import Step
from replayscope.traces.schema import Table
from replayscope.traces.writer import KEEP_FREE, TraceWriter

log = logging.getLogger(__name__)

# A run that is over sooner is as quickly begun again.
EVERY = 60.0
# Of the time, what snapshots may take.
_SHARE = 0.05
_PAIR = ("global_kv", "index_k")
_STEP = ("streams", "mix", "topk", "topk_margin", "candidates")


class Snapshots:
    """The snapshot of one trace, at ``path``: `NAME.h5.resume`.

    about: the provenance, by which a run is known. resume: take up what the writer's `.partial` and the snapshot hold,
    where there is one, instead of forgetting it. states: hook points whose states that holds. flush: waits until what
    was recorded is in the file. Raises UsageError for the `.partial` of another run and for a snapshot that is damaged.
    """

    flush: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, writer: TraceWriter, about: Mapping[str, Any], executor: Engine, resume: bool = False) -> None:
        self.path, self._executor = writer.path.with_name(writer.path.name + ".resume"), executor
        self._about = hashlib.sha256(json.dumps(identity(about), sort_keys=True).encode()).hexdigest()
        self._next = time.monotonic() + EVERY
        self._kept: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        if resume and not isinstance(executor, Executor):
            raise UsageError("--resume is for ReplayScope's own models; run this one from the start")
        begun = unfinished(writer.partial, about) if resume else None
        writer.resume = begun is not None
        self.states = set() if begun is None else {name for _, name in begun.states()}
        if begun is None:
            self.clear()
        else:
            self._load()
            log.info("going on at layer %d of %d", self.first, executor.model.config.num_hidden_layers)

    @property
    def first(self) -> int:
        """The layer that runs first: behind those of the snapshot."""
        return 0 if self._kept is None else self._kept[1]["layer"] + 1

    @property
    def wave(self) -> int:
        """The wave that runs first."""
        return 0 if self._kept is None else self._kept[1]["wave"]

    def clear(self) -> None:
        """Forget what is kept, on the disk too."""
        self._kept = None
        self.path.unlink(missing_ok=True)

    def _load(self) -> None:
        if not self.path.exists():
            return
        try:
            with safe_open(self.path, framework="pt") as file:
                values, keys = json.loads(file.metadata()["state"]), file.keys()
                if values["about"] == self._about:
                    # Copies: what the library hands out lies wherever the file's header ends, and a product of the same
                    # numbers is the same bits only where they lie alike.
                    self._kept = {name: file.get_tensor(name).clone() for name in keys}, values
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UsageError(f"{self.path} cannot be read ({error}); begin again with --force") from error

    def frames(
        self,
        oracles: object,
        fold: Fold,
        plan: Plan,
        tokens: dict[str, Tensor],
        want: frozenset[str],
        wave: int = 0,
    ) -> Iterator[Frame]:
        """The frames of a wave, from the snapshot on if there is one. Whoever asks for the next has folded the last.

        Only our own executor's runs can be taken up; others are handed through.
        """
        executor = self._executor
        if not isinstance(executor, Executor):
            yield from executor.run(plan, tokens, want)
            return
        assert isinstance(oracles, Oracles)
        if self._kept is None:
            frames = executor.run(plan, tokens, want)
        else:
            tensors, values = self._kept
            _unfold(fold, tensors, values)
            _restore_oracles(oracles, tensors, self.first)
            frames = executor.run(plan, tokens, want, lambda step: self._take_up(step, tensors, values))
            self._kept = None
        for frame in frames:
            yield frame
            if frame.layer is not None and time.monotonic() >= self._next:
                self._save(wave, frame.layer, executor.step, oracles, fold)

    def _take_up(self, step: Step, tensors: dict[str, Tensor], values: dict[str, Any]) -> int:
        for name in _STEP:
            setattr(step, name, tensors[f"step {name}"].to(step.device))
        check = step.layout.check
        check.compared, check.changed = values["compared"], values["changed"]
        for source in values["sources"]:
            step.layout.written(source)
            for pool, name in zip(step.layout.entries(source), _PAIR, strict=True):
                pool.copy_(tensors[f"{name} {source}"])
        return values["layer"] + 1

    def _save(self, wave: int, layer: int, step: Step, oracles: Oracles, fold: Fold) -> None:
        began = time.monotonic()
        tensors = {f"step {name}": getattr(step, name) for name in _STEP}
        c = step.config
        sources = sorted({s for l in c.layers[layer + 1 :] if (s := c.kv_source(l)) is not None and s <= layer})
        for source in sources:
            for pool, name in zip(step.layout.entries(source), _PAIR, strict=True):
                tensors[f"{name} {source}"] = pool
        check = step.layout.check
        values = {"about": self._about, "wave": wave, "layer": layer, "sources": sources}
        values |= {"compared": check.compared, "changed": check.changed}
        tensors |= _oracle_tensors(oracles, sources)
        folded, more = _fold_tensors(fold)
        tensors |= folded
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        free = shutil.disk_usage(self.path.parent).free
        if need + KEEP_FREE <= free:
            self.flush()
            self._write(_apart(tensors), values | more)
        else:
            log.info("no snapshot after layer %d: it takes %s bytes, the disk has %s free", layer, need, free)
        spent = time.monotonic() - began
        self._next = time.monotonic() + max(EVERY, spent / _SHARE if EVERY else 0.0)

    def _write(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Under another name first: what stands under the right one is whole."""
        new = self.path.with_name(self.path.name + ".new")
        save_file(tensors, new, {"state": json.dumps(values)})
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, self.path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host, whole, and no two in the same memory: only so can they be stored."""
    out, seen = {}, set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        memory = here.untyped_storage().data_ptr()
        out[name] = here.clone() if memory in seen else here
        seen.add(memory)
    return out


def _oracle_tensors(oracles: Oracles, sources: list[int]) -> dict[str, Tensor]:
    out = {}
    for i, now in enumerate(oracles.states):
        out |= {f"oracle {i} streams": now.streams, f"oracle {i} mix": now.mix}
        out |= {f"oracle {i} chosen {l}": topk for l, topk in now.chosen.items()}
        for l in sources:
            out |= {f"oracle {i} {name} {l}": x for name, x in zip(_PAIR, now.globals[l], strict=True)}
        out |= {} if now.pool is None else {f"oracle {i} pool": now.pool}
    return out


def _restore_oracles(oracles: Oracles, tensors: Mapping[str, Tensor], first: int) -> None:
    for i, now in enumerate(oracles.states):
        own = {k.removeprefix(f"oracle {i} "): t.to(now.streams.device) for k, t in tensors.items()
               if k.startswith(f"oracle {i} ")}  # fmt: skip
        now.first, now.streams, now.mix, now.pool = first, own["streams"], own["mix"], own.get("pool")
        now.chosen = {int(k.split()[1]): t for k, t in own.items() if k.startswith("chosen ")}
        sources = [int(k.split()[1]) for k in own if k.startswith("global_kv ")]
        now.globals = {l: (own[f"global_kv {l}"], own[f"index_k {l}"]) for l in sources}


def _fold_tensors(fold: Fold) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of what has been folded, by the names of where they belong, and the rest as JSON holds it."""
    out = {f"table {r} {p} {name}": x for (r, p), table in fold.tables.items() for name, x in table.arrays.items()}
    for (r, p), by_run in fold.rows.items():
        for run, by_layer in by_run.items():
            for layer, (position, arrays) in by_layer.items():
                out[f"rows {r} {p} {run} {layer} position"] = position
                out |= {f"rows {r} {p} {run} {layer} of {name}": x for name, x in arrays.items()}
    tables = [(r, p, table.kind, table.attrs) for (r, p), table in fold.tables.items()]
    scales = [[[*key, value] for key, value in kept.items()] for kept in (fold.margin_scale, fold.margin_floor)]
    return {k: torch.from_numpy(x) for k, x in out.items()}, {
        "tables": tables,
        "scales": scales,
        "checks": list(fold.checks.items()),
    }


def _unfold(fold: Fold, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    fold.tables = {(r, p): Table(kind, fold.buckets, {}, attrs) for r, p, kind, attrs in values["tables"]}
    for key, tensor in tensors.items():
        match key.split():
            case ["table", r, p, name]:
                fold.tables[r, p].arrays[name] = tensor.numpy()
            case ["rows", r, p, run, layer, "position"]:
                fold.rows.setdefault((r, p), {}).setdefault(int(run), {})[int(layer)] = tensor.numpy(), {}
    for key, tensor in tensors.items():
        match key.split():
            case ["rows", r, p, run, layer, "of", name]:
                fold.rows[r, p][int(run)][int(layer)][1][name] = tensor.numpy()
    for kept, items in zip((fold.margin_scale, fold.margin_floor), values["scales"], strict=True):
        kept |= {tuple(key): value for *key, value in items}
    fold.checks = {run: (compared, changed) for run, (compared, changed) in values["checks"]}
