"""The table of what is timed, and against what. Each case checks that its variants agree before any is timed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Literal

import numpy as np
import torch
from harness import Case, Contest
from sweep import mini_sweep, short_prompt

from replayscope.inspector.capture import Capture, Captured, points_of
from replayscope.inspector.executor import Executor
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.metrics import state_sums
from replayscope.inspector.semantics import Shape
from replayscope.inspector.tables import StateSink, stored
from replayscope.inspector.waves import waves
from replayscope.kernels.divergence import row_sums
from replayscope.model import presets
from replayscope.traces import QueuedWriter, RunInfo, Tokens, TraceReader, TraceWriter


def divergence(device: torch.device) -> Contest:
    """4096 rows of 1024 fp32 numbers (what one layer hands over), reference and arm."""
    torch.manual_seed(0)
    reference = torch.randn(4096, 1024, device=device)
    arm = reference + 1e-3 * torch.randn_like(reference)
    spare = torch.empty_like(arm)

    def plain() -> torch.Tensor:
        r, a = reference.double(), arm.double()
        return torch.stack(((a - r).square().sum(1), r.square().sum(1), a.square().sum(1), (a * r).sum(1)))

    def check() -> None:
        sums = row_sums(arm, reference)
        found = torch.stack([sums[name] for name in ("diff2", "ref2", "arm2", "dot")]).to(torch.float64)
        torch.testing.assert_close(found, plain(), rtol=1e-12, atol=0.0)

    read = 2 * arm.numel() * arm.element_size()
    variants = {"copy": lambda: spare.copy_(arm), "plain": plain, "row_sums": lambda: row_sums(arm, reference)}
    if device.type == "cpu":
        a, r = arm.numpy(), reference.numpy()
        variants["numpy, a pass for each number"] = lambda: state_sums(a, r)
    if device.type == "cuda" or shutil.which("g++"):
        variants["plain, torch.compile"] = torch.compile(plain)
    return Contest(variants, check, work=read, unit="bytes read")


def emptied(folder: TemporaryDirectory[str]) -> Callable[[], None]:
    """Nobody writes over an old file, which one variant would delete while it is timed and another one before. Then
    memory is touched: a virtual machine may have to fetch what it did not use for a while from its host, which takes
    longer than writing there and hits the one or the other."""

    def before() -> None:
        for path in Path(folder.name).iterdir():
            path.unlink()
        np.ones(256 << 20, np.uint8)

    return before


def record_states(device: torch.device) -> Contest:
    """32 layers of 2048 rows of 512 bf16 numbers (67 MB), each variant to the disk and synced."""
    folder = TemporaryDirectory(prefix="replayscope-bench-")
    torch.manual_seed(0)
    layers = [torch.randn(2048, 512).bfloat16() for _ in range(32)]
    bits = [layer.view(torch.uint16).numpy() for layer in layers]
    tokens, positions = Tokens(np.arange(1), ["a"]), np.arange(2048)
    run = RunInfo(0, "full", "paper", None, None, 0, 2048, 2048, 128)

    def at(name: str) -> Path:
        return Path(folder.name) / name

    def synced(name: str, write: Callable[[BinaryIO], object]) -> None:
        with open(at(name), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    def written(name: str, compression: Literal["gzip"] | None = None) -> None:
        with TraceWriter(at(name), force=True, compression=compression) as out:
            out.header(config={}, provenance={}, tokens=tokens)
            out.runs([run])
            for layer, array in enumerate(bits):
                out.state(0, f"layers.{layer}.window_kv", positions, array, "bfloat16")

    variants: dict[str, Callable[[], object]] = {
        "raw write and fsync": lambda: synced("raw", lambda file: [file.write(array.data) for array in bits]),
        "torch.save and fsync": lambda: synced("states.pt", lambda file: torch.save(layers, file)),
        "trace": lambda: written("t.h5"),
        "trace, gzip": lambda: written("packed.h5", "gzip"),
    }

    def check() -> None:
        for call in variants.values():
            call()
        assert at("raw").read_bytes() == b"".join(array.tobytes() for array in bits)
        for name in ("t.h5", "packed.h5"):
            for layer, array in enumerate(bits):
                assert (TraceReader(at(name)).state(0, f"layers.{layer}.window_kv").bits == array).all()

    work = sum(array.nbytes for array in bits)
    return Contest(variants, check, work, unit="bytes", before=emptied(folder))


def record_all(device: torch.device) -> Contest:
    """The embedded model over 2048 tokens with every hook point kept, against the forward pass and a raw file."""
    folder = TemporaryDirectory(prefix="replayscope-bench-")
    model, _ = presets.load_any("mini", torch.float32, device)
    ids = torch.randint(0, model.config.vocab_size, (2048,), generator=torch.Generator().manual_seed(0))
    line, _ = line_up(Job(Shape(model.config, len(ids)), ("full",)))
    names = frozenset(points_of(model.config))

    def forward(taken: Callable[[int, str, Captured], None]) -> None:
        executor = Executor(model)
        with Capture(executor, names, taken) as capture:
            for _ in executor.run(line.plan, {"prompt": ids}, capture.want):
                pass

    def raw() -> None:
        with open(Path(folder.name) / "raw", "wb") as file:

            def keep(request: int, name: str, kept: Captured) -> None:
                file.write(stored(kept.values)[0].data)

            forward(keep)
            file.flush()
            os.fsync(file.fileno())

    def trace() -> None:
        with QueuedWriter(TraceWriter(Path(folder.name) / "t.h5", force=True)) as out:
            out.header(config={}, provenance={}, tokens=Tokens(ids.numpy(), [""] * len(ids)))
            out.runs(line.runs)
            sink = StateSink(out, line, names)
            sink.begin(waves(line, len(ids))[0])
            forward(sink.captured)

    def check() -> None:
        raw()
        trace()
        reader = TraceReader(Path(folder.name) / "t.h5")
        assert {name for _, name in reader.states()} == names
        kept = sum(reader.state(0, name).bits.nbytes for name in names)
        assert kept == (Path(folder.name) / "raw").stat().st_size

    variants: dict[str, Callable[[], object]] = {"forward and raw write": raw, "record": trace}
    return Contest(variants, check, work=len(ids), unit="tokens", before=emptied(folder))


CASES = (
    Case("sweep", "64 cuts of 2048 tokens, suffix 64, all layers", "ideal", mini_sweep(), devices=("cpu",), rounds=5),
    Case("short", "64 tokens: few rows, one thread", "on one torch thread", short_prompt, devices=("cpu",), rounds=15),
    Case("record", "raw states to a synced file", "raw write and fsync", record_states, devices=("cpu",)),
    Case("record-all", "a pass with every state recorded", "forward and raw write", record_all, devices=("cpu",)),
    Case("divergence", "all ten numbers of a state table; plain gives its four sums in float64", "plain", divergence),
)  # fmt: skip
