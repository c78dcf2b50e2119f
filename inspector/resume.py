"""Whether a run may take up where a `.partial` stopped: only if it is the same run on the same machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import UsageError
from replayscope.traces.errors import TraceError
from replayscope.traces.reader import TraceReader

# What may differ: the words typed, and how large the file may become.
_FREE = ("argv", "options.max_bytes")
# Records of a run that has begun: what it is, and its runs.
_BEGUN = 2


def identity(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a run shares with one that it takes up: its provenance, flat, by dotted names."""
    return {name: value for name, value in _flat(provenance) if name not in _FREE}


def refuse_to_forget(path: Path) -> None:
    """Raises UsageError if a run that was stopped on its way to the trace ``path`` has left something to go on with, or
    to look at."""
    partial, snapshot = (path.with_name(path.name + ending) for ending in (".partial", ".resume"))
    if not partial.exists():
        return
    if snapshot.exists():
        raise UsageError(
            f"{partial} is of a run that was stopped; add --resume to go on with it, or --force to forget it"
        )
    try:
        holds = TraceReader(partial).records > _BEGUN
    except TraceError:
        return  # nothing can be read of it, or its writer is still there, which is for the next writer to say
    if holds:
        raise UsageError(
            f"{partial} holds what a run that was stopped had done (replayscope show); add --force to replace it, "
            "or give another -o"
        )


def unfinished(partial: Path, provenance: Mapping[str, Any]) -> TraceReader | None:
    """The `.partial`, or None if there is none, or nothing in it.

    Raises UsageError naming the first field in which it is another run.
    """
    if not partial.exists() or not partial.stat().st_size:
        return None
    trace = TraceReader(partial)
    if trace.records < _BEGUN:
        return None
    theirs, ours = identity(trace.provenance), identity(provenance)
    for name in ours | theirs:
        there, here = theirs.get(name), ours.get(name)
        if there != here:
            raise UsageError(
                f"{partial} is of another run: its {name} is {_shown(there)}, here {_shown(here)}; "
                "give the command that was stopped, or --force in place of --resume"
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
