"""Whether a run may take up where a `.partial` stopped: only if it is the same run on the same machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.traces.reader import TraceReader

# What may differ: the words typed, and how large the file may become.
_FREE = ("argv", "options.max_bytes")


def identity(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a run shares with one that it takes up: its provenance, flat, by dotted names."""
    return {name: value for name, value in _flat(provenance) if name not in _FREE}


def unfinished(partial: Path, provenance: Mapping[str, Any]) -> TraceReader | None:
    """The `.partial`, or None if there is none, or nothing in it.

    Raises UsageError naming the first field in which it is another run.
    """
    if not partial.exists() or not partial.stat().st_size:
        return None
    trace = TraceReader(partial)
    if trace.records < 2:
        return None
    theirs, ours = identity(trace.provenance), identity(provenance)
    for name in ours | theirs:
        there, here = theirs.get(name), ours.get(name)
        if there != here:
            raise UsageError(
                f"{partial} is of another run: its {name} is {_shown(there)}, here {_shown(here)}; "
                "give the command that was stopped, or leave --resume out"
            )
    return trace


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            # As JSON gives them back.
            yield f"{before}{name}", list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
