"""The use cases that run a model: record, sweep and demo. From options to a trace on disk and a result to print."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from replayscope.inspector import estimate, provenance, specs, tables
from replayscope.inspector.arms_text import arms_text
from replayscope.inspector.backend import Engine, Runnable
from replayscope.inspector.capture import Capture, points_of
from replayscope.inspector.downcast import Downcast
from replayscope.inspector.engines import granularity
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.fold import Fold
from replayscope.inspector.geometry import window_layers
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.options import Result, RunOptions
from replayscope.inspector.points import expand_points
from replayscope.inspector.resume import refuse_to_forget
from replayscope.inspector.runner import foreign_tokens, run
from replayscope.inspector.semantics import Shape, admits, arm_names, floor_layers, has_cut, unsuited
from replayscope.inspector.snapshot import Snapshots
from replayscope.kernels.impl import choose
from replayscope.model import presets, tokenizer
from replayscope.model.hf_config import is_hf
from replayscope.model.streaming import StreamedModel
from replayscope.model.weights import Model, WeightsError
from replayscope.traces.queued import QueuedWriter
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import Tokens
from replayscope.traces.writer import KEEP_FREE, TraceWriter

log = logging.getLogger(__name__)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def record(options: RunOptions) -> Result:
    """Run arms over one prompt and write raw states (``--hooks``) and divergence to a trace."""
    return _result(write_trace(options))


def sweep(options: RunOptions) -> Result:
    """The same over many cuts and replay lengths; raw states only where hook points are named."""
    return _result(write_trace(options))


@dataclass(frozen=True)
class _Loaded:
    model: Runnable
    engine: Engine | None
    name: str
    ids: Tensor
    tokens: Tokens
    weights_hash: str


def write_trace(options: RunOptions) -> Path:
    """Run and write one trace; returns its path. Nothing is left of it if it cannot be run."""
    try:
        return _write_trace(options)
    except WeightsError as error:
        # At the start, or of a streamed model when the layer that cannot be used is read.
        raise UsageError(str(error)) from error


def _write_trace(options: RunOptions) -> Path:
    path = Path(options.out)
    if not (options.resume or options.force):
        refuse_to_forget(path)
    loaded = _load(options)
    model, ids = loaded.model, loaded.ids
    if isinstance(model, Model) and (options.audit or options.rounding == "off"):
        # In an audit a rounding bin that flips would look like a bug.
        model = replace(model, config=replace(model.config, activation_fake_quant=False))
    _check_engine_options(options, len(ids))
    _check_impl(options, model)
    shape = Shape(model.config, len(ids), options.forced, options.chunks, options.block)
    if options.forced >= len(ids):
        raise UsageError(f"--forced {options.forced} leaves no prompt: there are {len(ids)} tokens")
    arms = _arms(options, model)
    cuts = _cuts(options, shape, arms)
    replays = specs.parse_replay(
        options.replay, window=model.config.sliding_window, layers=len(window_layers(model.config))
    )
    names = expand_points(options.hooks, points_of(model.config)) if options.hooks else ()
    keep = frozenset(("window_kv", "hidden", "logits")) if options.rows else frozenset()
    job = Job(
        frozen_experts=options.experts == "frozen",
        dense=options.topk == "dense",
        shape=shape,
        arms=arms,
        cuts=cuts,
        replays=replays,
        suffix=options.suffix,
        semantics=options.semantics,
        oracles=options.audit,
        audit=options.audit,
        keep_rows=keep,
        impl=options.impl,
        budget=options.budget,
    )
    line, notes = line_up(job)
    for note in notes:
        log.info("%s", note)
    executor = loaded.engine or _our_executor(options, model)
    smaller = DTYPES[options.store_dtype] if options.store_dtype else None
    expected = estimate.estimate(executor, ids, line, names, keep, job.budget, smaller)
    log.info("%s", expected.text)
    expected.refuse_if_too_large(path, options.max_bytes)
    writer = TraceWriter(
        path,
        force=options.force,
        max_bytes=options.max_bytes,
        keep_free=KEEP_FREE,
        compression="gzip" if options.compression == "gzip" else None,
    )
    # Our own model is streamed by itself where it would not fit.
    chosen = options if loaded.engine else replace(options, stream=isinstance(model, StreamedModel))
    about = provenance.collect(chosen, loaded.name, loaded.weights_hash, ids, model, sys.argv)
    snapshots = Snapshots(writer, about, executor, options.resume)
    with QueuedWriter(writer) as out:
        snapshots.flush = out.flush
        if not writer.resume:
            out.header(config=model.config.to_dict(), provenance=about, tokens=loaded.tokens)
            out.runs(line.runs)
        began = time.perf_counter()
        states = tables.StateSink(out, line, frozenset(names), Downcast(smaller))
        with Capture(executor, names, states.captured, snapshots.states):
            fold, runs = run(
                model,
                ids,
                job,
                line,
                executor,
                progress=_Progress(options.verbosity),
                foreign=foreign_tokens(ids, options.seed),
                on_oracle=states.oracle,
                snapshots=snapshots,
                on_wave=states.begin,
                on_stop=lambda fold: _keep(out, fold),
            )
        log.info("ran in %.1f s", time.perf_counter() - began)
        # Only now is it known whether cached bytes changed.
        out.runs(runs)
        tables.write_fold(out, fold)
    if smaller is not None:
        log.log(logging.WARNING if states.downcast.lost else logging.INFO, "%s", states.downcast.text)
    snapshots.clear()
    return path


def _keep(out: QueuedWriter, fold: Fold) -> None:
    """Put what an interrupted run has folded into its `.partial`: whole layers, and of several parts whole runs."""
    tables.write_fold(out, fold)
    out.flush()


def _check_engine_options(options: RunOptions, tokens: int) -> None:
    """Refuse --block and --chunks that would do nothing, so that nobody believes they did."""
    if options.block is not None and all(granularity(s, None) == 1 for s in options.semantics):
        raise UsageError(f"--block {options.block}: {', '.join(options.semantics)} has no blocks; drop it")
    ends = options.chunks if isinstance(options.chunks, tuple) else ()
    if late := [e for e in ends if e > tokens]:
        raise UsageError(f"--chunks: no chunk can end at {late[0]}; the prompt has {tokens} tokens")


def _load(options: RunOptions) -> _Loaded:
    engine: Engine | None = None
    try:
        if is_hf(options.model):
            engine, numbers, texts, weights_hash = _load_hf(options, *_where(options))
            model: Runnable = engine.model
        else:
            model, weights_hash = _load_own(options)
            numbers = _bytes(options)[: options.tokens]
    except ValueError as error:
        raise UsageError(str(error)) from error
    vocab = model.config.vocab_size
    if not numbers:
        raise UsageError("the prompt is empty; give at least one token")
    if max(numbers) >= vocab:
        raise UsageError(f"token id {max(numbers)} is outside the vocabulary of {options.model}: 0 … {vocab - 1}")
    if len(numbers) > model.config.max_position_embeddings:
        raise UsageError(
            f"the prompt has {len(numbers)} tokens, {options.model} takes {model.config.max_position_embeddings}; "
            f"add --tokens {model.config.max_position_embeddings}"
        )
    ids = torch.tensor(numbers, dtype=torch.long)
    if engine is None:
        preset = options.model in presets.presets()
        texts = tokenizer.token_texts(numbers) if preset else [str(n) for n in numbers]
    if options.prompt.note:
        log.info("%s", options.prompt.note)
    return _Loaded(model, engine, options.model, ids, Tokens(ids.numpy(), texts), weights_hash)


def _where(options: RunOptions) -> tuple[torch.dtype, list[torch.device]]:
    return DTYPES[options.dtype], [_device(name) for name in options.devices or (options.device,)]


def _load_own(options: RunOptions) -> tuple[Runnable, str]:
    """The model, a preset or a folder in the official layout, and the hash of its weights."""
    return presets.load_any(options.model, *_where(options), layers=options.layers_only, stream=options.stream)


def _load_hf(
    options: RunOptions, dtype: torch.dtype, where: list[torch.device]
) -> tuple[Engine, list[int], list[str], str]:
    """Engine, token ids, their texts and where the weights are from. Raises UsageError without the extra."""
    try:
        from replayscope.inspector import hf_load
    except ImportError as error:
        raise UsageError(f"{options.model} needs {error.name}: pip install 'replayscope[hf]'") from error
    loaded = hf_load.load(options, dtype, where)
    return loaded.engine, loaded.numbers, loaded.texts, loaded.origin


def _bytes(options: RunOptions) -> list[int]:
    """The prompt's token ids of our own models: as typed, or the bytes of its text where the model is a preset."""
    text = options.prompt.read()
    if not isinstance(text, str):
        return list(text)
    if options.model not in presets.presets():
        raise UsageError(f"{options.model} comes without a tokenizer; give token ids as -p ids:1,2,3")
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise UsageError(f"the prompt cannot be encoded: {error}; give its token ids as ids:…") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device {name} is not here; use --device cpu")
    if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
        raise UsageError(f"device {name} is not here; there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def executor_of(options: RunOptions) -> Executor:
    """What runs the model that the options name, a preset or a folder in the official layout."""
    return _our_executor(options, _load_own(options)[0])


def _our_executor(options: RunOptions, model: Runnable) -> Executor:
    assert isinstance(model, Model)
    return Executor(
        model,
        frozen=options.audit,
        frozen_experts=options.experts == "frozen",
        dense=options.topk == "dense",
        reproducible=options.reproducible,
        impl=options.impl,
    )


def _check_impl(options: RunOptions, model: Runnable) -> None:
    """Refuse a form of the kernels that cannot run on every device where the run needs it."""
    asked = {device.type for device in _where(options)[1]}
    for device in model.kernel_devices:
        try:
            choose(options.impl, device, model.dtype)
        except ValueError as error:
            # A device that nobody asked for needs a word on what it does.
            away = "" if device.type in asked else f" (the states of this model are compared on {device.type})"
            raise UsageError(f"--{error}{away}") from error


def _arms(options: RunOptions, model: Runnable) -> tuple[str, ...]:
    """The arms asked for, globs written out: broken:* stands for every kind, floor@L at three layers."""
    known = [a for a in arm_names(floor_layers(model.config)) if not unsuited(model.config, a)]
    out: dict[str, None] = {}
    for name in options.arms:
        out.update(dict.fromkeys([a for a in known if fnmatchcase(a, name)] if "*" in name else [name]))
    return tuple(out)


def _cuts(options: RunOptions, shape: Shape, arms: tuple[str, ...]) -> tuple[int, ...]:
    if not any(has_cut(a) for a in arms):
        return ()
    if options.cuts is None:
        raise UsageError("these arms need --cuts: numbers, a range, around:W, grid or all")
    names = options.semantics
    # Each by itself first, so that a refusal names the semantics; then what all of them admit.
    for together in dict.fromkeys([*((name,) for name in names), names]):
        cuts = specs.parse_cuts(
            options.cuts,
            length=shape.prompt_end,
            window=shape.config.sliding_window,
            admits=lambda cut, rules=together: all(admits(name, cut, shape.block) for name in rules),
            rule=" and ".join(together),
        )
    for note in cuts.notes:
        log.info("%s", note)
    if cuts.snapped:
        log.info("%d cuts moved to what %s admits", cuts.snapped, " and ".join(names))
    return cuts.values


class _Progress:
    """One line on stderr that is written over: percent, what runs now, and the time left at the pace so far.

    Nothing where it is not a terminal or with --quiet. The first call says where the run begins, which is not 0 for one
    that was taken up.
    """

    def __init__(self, verbosity: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = verbosity >= 0 and sys.stderr.isatty()
        self.clock, self.first = clock, None

    def __call__(self, done: int, total: int, what: str) -> None:
        if not self.on:
            return
        now = self.clock()
        self.first = self.first or (now, done)
        began, before = self.first
        left = f", {(now - began) / (done - before) * (total - done):.0f} s left" if before < done < total else ""
        line = f"\r\033[K{100 * done // max(total, 1)}/100 {what}{left}"
        print(line, end="" if done < total else "\n", file=sys.stderr, flush=True)


def _result(path: Path) -> Result:
    """The table of arms of a trace, and its verdict in one line."""
    text, data, ok = arms_text(TraceReader(path))
    return Result(f"{text}\n{path}", data | {"trace": str(path)}, 0 if ok else 1)
