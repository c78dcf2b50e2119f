"""The `import` command: an engine's own states as a trace, to be judged against ours of the same semantics."""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from replayscope.inspector import dumps
from replayscope.inspector.assemble import ENTRY_POINTS, Dump, Rows, check_width
from replayscope.inspector.cache_sizes import presets
from replayscope.inspector.compare import compare
from replayscope.inspector.errors import UsageError
from replayscope.inspector.first import ratios_of
from replayscope.inspector.name_maps import Entry, NameMap, load_map
from replayscope.inspector.names import unknown
from replayscope.inspector.options import ImportOptions, Result
from replayscope.inspector.semantics import Shape, has_cut, plain, request, semantics_of
from replayscope.model.config import ModelConfig
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import RunInfo, Tokens, natural_key
from replayscope.traces.writer import TraceWriter

log = logging.getLogger(__name__)
# vLLM's layer id k names what enters layer k: what layer k-1 leaves, and for 0 the embeddings.
_VLLM = Entry("layers.{layer}.hidden", names=("hidden_states.{layer}",), shift=-1)


@dataclass(frozen=True)
class _Subject:
    """What was run: config as recorded, its text part, and the prompt; ids None where the dump must say it."""

    config: dict[str, Any]
    text: Mapping[str, Any]
    ids: np.ndarray | None
    texts: list[str] | None


def import_trace(options: ImportOptions) -> Result:
    """Write one trace with one run from a dump; with `against`, set it against that trace and say where they part.

    Everything is read and checked once before the first byte is written, so that a dump that cannot be used leaves
    nothing behind.
    """
    names = load_map(options.map)
    if options.format == "vllm-hidden":
        names = replace(names, points=(*names.points, _VLLM), tokens="token_ids")
    items = dumps.read(options.source, options.format, names.layers)
    if options.format == "sglang-dump":
        # Its dumper has names of its own for these two, whatever the modules of the model are called.
        have = {item.name for item in items}
        tokens = names.tokens if names.tokens in have else "input_ids"
        names = replace(names, tokens=tokens, positions=names.positions if names.positions in have else "positions")
    if options.steps is not None:
        items = dumps.choose_steps(items, *options.steps)
    subject = _subject(options)
    layers = subject.text.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise UsageError("the config has no num_hidden_layers")
    dump = Dump(items, names, layers)
    start = _run(options, subject, subject.ids).start if subject.ids is not None else 0
    tokens = _tokens(subject, dump.ids(start))
    run = _run(options, subject, tokens.ids)

    def rows(name: str) -> Rows:
        found = dump.rows(name, run.start, len(tokens.ids))
        check_width(name, found.values, subject.text)
        return found

    # A pass that keeps nothing: what cannot be used is found before there is a file.
    dtypes: dict[str, str] = {}
    held = 0
    for name in dump.points:
        found = rows(name)
        if not _without_entries(name, run, ratios_of(subject.config)):
            dump.check_held(name, found)
        dtypes[name], held = found.logical, held + found.values.size
    if not held:
        dump.check_held(name := next(iter(dump.points)), rows(name))
    if dump.unused:
        log.info("%d tensors of the dump are in no point of map %s", dump.unused, names.name)
    about = _provenance(options, names, tokens.ids, sorted(set(dtypes.values())))
    with TraceWriter(options.out, force=options.force) as out:
        out.header(config=subject.config, provenance=about, tokens=tokens)
        out.runs([run])
        for name in dump.points:
            found = rows(name)
            out.state(0, name, found.positions, found.values, found.logical)
    text = (
        f"{len(dump.points)} hook points of {run.label} from {options.engine} {options.engine_version}\n{options.out}"
    )
    data = {"trace": str(options.out), "points": list(dump.points), "run": run.label, "unused": dump.unused}
    if options.against is None:
        return Result(text, data)
    table = compare(options.against, options.out)
    first = compare(options.against, options.out, stop_at_first=True)
    # Both say whether it passed, and what was left out: neither may hide the other.
    passed = {"passed": table.json["passed"] and first.json["passed"]}
    notes = {"notes": list(dict.fromkeys([*table.json["notes"], *first.json["notes"]]))}
    told = first.text.splitlines()[0]
    parts = [text, table.text, *([] if told in table.text.splitlines() else [told])]
    return Result("\n\n".join(parts), {**data, **table.json, **first.json, **passed, **notes})


def _subject(options: ImportOptions) -> _Subject:
    """Config and prompt, of the trace to be judged against or as typed."""
    if options.against is not None:
        ours = TraceReader(options.against)
        return _Subject(ours.config, _text_part(ours.config), ours.tokens.ids, ours.tokens.texts)
    file = presets().get(options.model) or Path(options.model) / "config.json"
    if not file.is_file():
        raise unknown("model", options.model, list(presets()), shown="a preset, or a folder with a config.json")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        text = _text_part(raw)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{file} is no config that can be used: {error}") from None
    config = _v41(raw)
    ids, texts = _prompt(options)
    return _Subject(raw if config is None else config.to_dict(), text, ids, texts)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UsageError("the config's text_config is no object")
    return text


def _v41(config: Mapping[str, Any]) -> ModelConfig | None:
    """The config as ours; None of another architecture, of which only states are kept."""
    try:
        return ModelConfig.from_dict(dict(config))
    except (ValueError, TypeError, AttributeError):
        return None


def _prompt(options: ImportOptions) -> tuple[np.ndarray | None, list[str] | None]:
    if options.prompt is None:
        return None, None
    typed = options.prompt.read()
    if not isinstance(typed, str):
        return np.array(typed, np.int64), None
    from replayscope.model import presets as models
    from replayscope.model import tokenizer

    if options.model not in models.presets():
        raise UsageError(f"{options.model} comes without a tokenizer; give token ids as -p ids:1,2,3")
    numbers = tokenizer.encode(typed)
    return np.array(numbers, np.int64), tokenizer.token_texts(numbers)


def _tokens(subject: _Subject, dumped: Mapping[int, int]) -> Tokens:
    """The prompt; that of the dump must be the same, position by position, and serves where none was given."""
    ids = subject.ids
    if ids is None:
        if not dumped or sorted(dumped) != list(range(len(dumped))):
            raise UsageError("the dump does not hold the token of every position; give the prompt with -p ids:1,2,3")
        ids = np.array([dumped[at] for at in range(len(dumped))], np.int64)
    for at, number in sorted(dumped.items()):
        if not 0 <= at < len(ids):
            raise UsageError(f"the dump has a token at position {at}; the prompt has {len(ids)} tokens")
        if number != ids[at]:
            raise UsageError(f"the prompts differ: position {at} is {number} in the dump, {ids[at]} in the prompt")
    if not len(ids):
        raise UsageError("the prompt is empty")
    return Tokens(ids, subject.texts or [str(number) for number in ids.tolist()])


def _run(options: ImportOptions, subject: _Subject, ids: np.ndarray | None) -> RunInfo:
    """The run that was captured, with the rows that its semantics makes it run."""
    arm, cut, n = options.arm, options.cut, len(ids if ids is not None else ())
    if has_cut(arm) != (cut is not None):
        raise UsageError(f"arm {arm} {'needs --cut' if cut is None else 'has no --cut'}")
    if options.replay is not None and (cut is None or plain(arm) in ("hit", "exact")):
        raise UsageError(f"arm {arm} has no --replay")
    (semantics,) = semantics_of(arm, (options.semantics,))
    config = _v41(subject.config)
    if config is None:
        if arm not in ("full", "repeat", "rechunk", "hit"):
            raise UsageError(f"arm {arm} is one of a V4.1 config; of another, import full or hit")
        first, window = cut or 0, subject.text.get("sliding_window") or n
        return RunInfo(0, arm, semantics, cut, None, first, n, n, window, cached=first, fresh=n - first)
    r = request(Shape(config, n), arm, cut, options.replay, None, semantics)
    return RunInfo(
        0, r.arm, r.semantics, r.cut, r.replay, r.start, r.stop, r.prompt_end, config.sliding_window,
        replayed=r.replayed, cached=r.cached, fresh=r.fresh, decoder_rows=r.stop - max(r.first_row), floor=r.floor,
        first_row=r.first_row,
    )  # fmt: skip


def _without_entries(name: str, run: RunInfo, ratios: Sequence[int]) -> bool:
    """Whether a hook point is one of global entries of which the run completes none, so that there is none to dump."""
    if name.rsplit(".", 1)[-1] not in ENTRY_POINTS:
        return False
    layer = natural_key(name)[0]
    ratio = max(1, ratios[layer]) if layer < len(ratios) else 1
    return run.stop // ratio == run.start // ratio


def _provenance(options: ImportOptions, names: NameMap, ids: np.ndarray, dtypes: list[str]) -> dict[str, Any]:
    model = {"model": options.model} if options.model else {}
    return {
        "argv": ["replayscope", *sys.argv[1:]],
        **model,
        "imported": {"format": options.format, "source": str(options.source), "map": names.name,
                     "map_sha256": names.sha256},
        "engine": {"name": options.engine, "version": options.engine_version, "commit": options.engine_commit},
        "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "semantics": [options.semantics],
        "dtype": dtypes[0] if len(dtypes) == 1 else ", ".join(dtypes),
        "audit": False,
        "versions": {"replayscope": version("replayscope")},
    }  # fmt: skip
