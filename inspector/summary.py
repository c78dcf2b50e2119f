"""What a trace holds: its arms, hook points, sizes and provenance, without a model."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayscope.inspector.layer_kinds import by_kind, layer_kinds
from replayscope.inspector.options import Result
from replayscope.traces.errors import TraceFormatError, TraceVersionError
from replayscope.traces.reader import TraceReader
from replayscope.traces.safe import SEE_VERIFY
from replayscope.traces.schema import RunInfo, natural_key

# What a reader asks first of a trace that somebody sent.
_TELLING = (
    "argv",
    "engine.name",
    "engine.version",
    "engine.commit",
    "model",
    "weights_sha256",
    "dtype",
    "device",
    "audit",
    "design",
    "suffix",
    "seed",
    "versions.torch",
)
SOUND = "verified: every number read, every checksum right"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show(path: Path, *, verify: bool = False, verbose: bool = False) -> Result:
    """The `show` command. The whole provenance and config are in the text with `verbose`, and always in the JSON data.

    With `verify` every number is read, and of a faulty file only its faults are told, a line each, with exit code 1.
    """
    if not verify:
        data = summarise(TraceReader(path))
        return Result("\n".join(lines(data, verbose)), data)
    try:
        trace = TraceReader(path)
        faults = trace.verify()
        data = {} if faults else summarise(trace)
    except (TraceFormatError, TraceVersionError) as error:
        faults, data = [str(error).replace(SEE_VERIFY, "")], {}  # it is what runs
    if faults:
        return Result("\n".join(f"fault: {fault}" for fault in faults), {"file": path.name, "faults": faults}, 1)
    return Result("\n".join([*lines(data, verbose), "", SOUND]), data | {"faults": []})


def summarise(trace: TraceReader) -> dict[str, Any]:
    """The content of a trace as plain JSON data. Bytes are bytes; positions are tokens."""
    states: dict[str, list[int]] = {}
    for run, name in trace.states():
        states.setdefault(name, []).append(run)
    return {
        "file": trace.path.name,
        "bytes": os.stat(trace.path).st_size,
        "schema_version": trace.schema_version,
        "complete": trace.complete,
        "records": trace.records,
        "tokens": len(trace.tokens.ids),
        "layer_kinds": list(layer_kinds(trace.config)),
        "arms": _arms(trace.runs),
        "divergence": {reference: trace.points(reference) for reference in trace.references()},
        "rows": {reference: points for reference in trace.references() if (points := trace.row_points(reference))},
        "states": {name: states[name] for name in sorted(states, key=natural_key)},
        "texts": trace.texts(),
        "sizes": trace.sizes(),
        "config": trace.config,
        "provenance": trace.provenance,
    }


def lines(data: Mapping[str, Any], verbose: bool = False) -> list[str]:
    """The same for a terminal; without `verbose` the settings that tell runs apart, and no config."""
    state = "complete" if data["complete"] else "partial: its writer did not finish"
    out = [
        f"{data['file']}  {size(data['bytes'])}, schema {data['schema_version']}, {data['records']} records, {state}",
        f"{data['tokens']} tokens",
        "",
        "arms",
    ]
    for arm in data["arms"]:
        cuts = f"cut{'s' * (len(arm['cuts']) > 1)} {_span(arm['cuts'])}" if arm["cuts"] else "no cut"
        replay = f", replay {_span(arm['replay'])}" if arm["replay"] else ""
        runs = "1 run" if arm["runs"] == 1 else f"{arm['runs']} runs"
        out.append(f"  {arm['arm']:<20} {arm['semantics']:<14} {runs}, {cuts}{replay}")
    out += _section("layers", by_kind(data["layer_kinds"]))
    out += _section("divergence from", {name: ", ".join(points) for name, points in data["divergence"].items()})
    out += _section("row by row from", {name: ", ".join(points) for name, points in data["rows"].items()})
    out += _section("raw states", {name: f"runs {_span(runs)}" for name, runs in data["states"].items()})
    out += _section("sizes", {name: size(stored) for name, stored in data["sizes"].items()})
    settings = _flat(data["provenance"])
    if verbose:
        out += _section("provenance", settings)
        out += _section("config", _flat(data["config"]))
    else:
        out += _section(
            "provenance (all of it, and the config, with -v)", {k: settings[k] for k in _TELLING if k in settings}
        )
    return out


def size(count: int) -> str:
    """Bytes in the unit that reads best."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def _arms(runs: Sequence[RunInfo]) -> list[dict[str, Any]]:
    """Runs gathered by arm and semantics, in their order."""
    arms: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        empty = {"arm": run.arm, "semantics": run.semantics, "runs": 0, "cuts": [], "replay": []}
        arm = arms.setdefault((run.arm, run.semantics), empty)
        arm["runs"] += 1
        for name, value in (("cuts", run.cut), ("replay", run.replay)):
            if value is not None and value not in arm[name]:
                arm[name].append(value)
    return list(arms.values())


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in rows), default=0)
    return ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())] if rows else []


def _span(values: Sequence[int]) -> str:
    """'4, 8, 9, … 159 (64)': a few of many."""
    if len(values) <= 8:
        return ", ".join(map(str, values))
    return f"{', '.join(map(str, values[:4]))}, … {values[-1]} ({len(values)})"


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as 'versions.torch': text, long values cut."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            text = ascii(value) if isinstance(value, str) and not value.isprintable() else str(value)
            flat[prefix + key] = text if len(text) <= 80 else text[:77] + "…"
    return flat
