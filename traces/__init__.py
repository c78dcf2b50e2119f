"""The trace file: schema, writer, reader and stored dtypes. Needs numpy and h5py only."""

from replayscope.traces.errors import (
    ReplayScopeError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceLockedError,
    TraceVersionError,
)
from replayscope.traces.queued import QueuedWriter
from replayscope.traces.reader import TraceReader
from replayscope.traces.schema import SCHEMA_VERSION, THRESHOLDS, RowTable, RunInfo, State, Table, Tokens
from replayscope.traces.writer import TraceWriter

__all__ = [
    "SCHEMA_VERSION",
    "THRESHOLDS",
    "QueuedWriter",
    "ReplayScopeError",
    "RowTable",
    "RunInfo",
    "State",
    "Table",
    "Tokens",
    "TraceError",
    "TraceExistsError",
    "TraceFormatError",
    "TraceLockedError",
    "TraceReader",
    "TraceVersionError",
    "TraceWriter",
]
