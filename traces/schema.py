"""The vocabulary of a trace: runs, tables, tokens, and the names they have inside the file.

docs/trace-format.md describes the file for readers that have only h5py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from replayscope.traces.errors import TraceError, TraceFormatError

FORMAT = "replayscope-trace"
SCHEMA_VERSION = 2

# Row errors are filed under these relative L2 values, so that a bound chosen later still finds a first position.
THRESHOLDS = tuple(float(f"1e{e}") for e in range(-15, 2))

STATE_POINTS = (
    "embed",
    "attn_in",
    "window_kv",
    "global_kv",
    "index_k",
    "attn_out",
    "ffn_out",
    "hidden",
    "streams",
    "mix",
    "final",
)
DISCRETE_POINTS = ("topk", "router")
# In the order in which a token meets them.
POINTS = (
    "embed",
    "attn_in",
    "window_kv",
    "global_kv",
    "index_k",
    "topk",
    "attn_out",
    "router",
    "ffn_out",
    "hidden",
    "streams",
    "mix",
    "final",
    "logits",
)
SINGLE_POINTS = ("embed", "final", "logits")
KINDS = ("state", "discrete", "logits")

REGIONS = ("all", "window", "suffix", "last", "exact")
# Attributes of a state that was cast: see Cast.
LOST = ("overflowed", "underflowed", "nan")
PER_THRESHOLD = ("first_at", "last_at")


def kind_of(point: str) -> str:
    """'state', 'discrete' or 'logits'. Raises TraceError on a name that is no hook point."""
    if point in STATE_POINTS:
        return "state"
    if point in DISCRETE_POINTS:
        return "discrete"
    if point == "logits":
        return "logits"
    raise TraceError(f"no hook point {point!r}; the hook points are {', '.join(POINTS)}")


def distance_bins(longest: int) -> list[tuple[int, int]]:
    """Log-spaced bins [first, last] of the distance from the replay start that cover 0 … longest (tokens)."""
    bins = [(0, 0)]
    while bins[-1][1] < longest:
        first = bins[-1][1] + 1
        bins.append((first, 2 * first - 1))
    return bins


def bucket_names(longest: int) -> tuple[str, ...]:
    """The buckets of a table whose rows lie up to `longest` tokens behind their replay start."""
    return REGIONS + tuple(f"d:{first}-{last}" for first, last in distance_bins(longest))


@dataclass(frozen=True)
class RunInfo:
    """One arm at one cut and replay length.

    Positions and row counts are in tokens. `exact_in` and `exact_out` hold, per layer, the intervals [first, last + 1)
    of positions that must equal `full` for what enters and for what leaves the layer.
    """

    index: int
    arm: str
    semantics: str
    cut: int | None
    replay: int | None
    start: int
    stop: int
    prompt_end: int
    window: int
    replayed: int = 0
    cached: int = 0
    fresh: int = 0
    decoder_rows: int = 0
    cached_checked: int = 0
    cached_changed: int = 0
    oracle: int | None = None
    floor: Sequence[int] = field(default_factory=tuple)
    first_row: Sequence[int] = field(default_factory=tuple)
    exact_in: Sequence[Sequence[Sequence[int]]] = field(default_factory=tuple)
    exact_out: Sequence[Sequence[Sequence[int]]] = field(default_factory=tuple)

    @property
    def label(self) -> str:
        """Arm, cut and replay length and whose rules, in a few words; unique in a trace."""
        at = "" if self.cut is None else f" cut {self.cut}"
        replay = "" if self.replay is None else f" replay {self.replay}"
        rules = "" if self.semantics == "paper" else f" {self.semantics}"
        return f"{self.arm}{at}{replay}{rules}"

    def to_json(self) -> dict[str, Any]:
        """The run as plain numbers, strings and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "RunInfo":
        """The run again. Fields this version does not know are skipped. Raises TraceFormatError if one is missing."""
        if not isinstance(data, Mapping):
            raise TraceFormatError("a run in the trace is not a JSON object")
        known = {f.name for f in fields(cls)}
        for name in ("arm", "semantics"):
            if not str(data.get(name, "")).isprintable():
                raise TraceFormatError(f"the {name} of a run in the trace holds characters that cannot be shown")
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise TraceFormatError(f"a run in the trace is incomplete: {error}") from error


@dataclass
class Table:
    """Divergence of every run from one reference at one hook point.

    kind: 'state', 'discrete' or 'logits'.
    buckets: names of the row sets, see `bucket_names`.
    arrays: name -> [run, layer, bucket]; `first_at` and `last_at` are [run, layer, threshold].
    attrs: small scalars that the numbers depend on: tol_abs, tol_rel, top_k.
    """

    kind: str
    buckets: Sequence[str]
    arrays: dict[str, np.ndarray]
    attrs: dict[str, Any] = field(default_factory=dict)

    def bucket(self, name: str) -> int:
        """Index of a bucket. Raises TraceError with the valid names."""
        try:
            return list(self.buckets).index(name)
        except ValueError:
            raise TraceError(f"no region {name!r}; this trace has {', '.join(self.buckets)}") from None


@dataclass
class RowTable:
    """Divergence of one run, row by row. position: [row] absolute, tokens. arrays: name -> [layer, row]."""

    position: np.ndarray
    arrays: dict[str, np.ndarray]


@dataclass
class Tokens:
    """ids: [token] int64, the source of truth. texts: what each id shows as; any str, lone surrogates and NUL too."""

    ids: np.ndarray
    texts: list[str]


@dataclass(frozen=True)
class Cast:
    """What was lost when stored numbers were cast to a smaller dtype on request.

    source: the dtype that the model held. overflowed: finite numbers that became infinite. underflowed: numbers other
    than 0 that became 0. nan: how many are NaN, before and after.
    """

    source: str
    overflowed: int
    underflowed: int
    nan: int


@dataclass
class State:
    """Stored values of one hook point in one run.

    positions: [row] absolute, tokens (for global KV and index keys the entry's number).
    values: [row, …] numbers; bf16 and fp8 as float32, which holds each of them exactly.
    logical_dtype: the dtype the model held, such as 'bfloat16', or that which was asked for to store it in.
    bits: [row, …] as stored, an unsigned view where numpy lacks the dtype.
    cast: what that lost, of the whole state; None where it is stored as the model held it.
    """

    positions: np.ndarray
    values: np.ndarray
    logical_dtype: str
    bits: np.ndarray
    cast: Cast | None = None


def relative_l2(
    diff2: np.ndarray, ref2: np.ndarray, n: np.ndarray | int, nonfinite: np.ndarray | int = 0
) -> np.ndarray:
    """sqrt(diff2 / ref2), of any shape; 0 where nothing differs, inf where the reference is zero and the arm is not or
    where a non-finite number stands on one side only, NaN where n = 0 and where ref2 overflowed."""
    diff2, ref2 = np.asarray(diff2, np.float64), np.asarray(ref2, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(diff2) / np.sqrt(ref2)
    # Over a sum that overflowed every number is 0, as if nothing differed.
    ratio = np.where(np.isinf(ref2), np.nan, ratio)
    ratio = np.where(diff2 == 0, 0.0, ratio)
    ratio = np.where(np.asarray(nonfinite) > 0, np.inf, ratio)
    return np.where(np.asarray(n) == 0, np.nan, ratio)


_LAYER = re.compile(r"^layers\.(\d+)\.")
_SAFE = re.compile(r"^[A-Za-z0-9_:@+-][A-Za-z0-9_.:@+-]{0,199}$")

POSITIONS = "positions"


def check_name(name: str) -> str:
    """The name, if it can be one link in the file. Raises TraceError otherwise: HDF5 reads '/' and '.' as paths."""
    if not isinstance(name, str) or not _SAFE.match(name):
        shown = repr(name)[:60]
        raise TraceError(f"{shown} cannot name a part of a trace: use 1 to 200 letters, digits and . _ : @ + -")
    return name


def stored_name(name: str) -> str:
    """'layers.5.window_kv' -> 'layers.005.window_kv', so that names sort by layer inside the file."""
    return _LAYER.sub(lambda m: f"layers.{int(m[1]):03d}.", check_name(name))


def is_positions(name: str) -> bool:
    """Whether a dataset beside the states of a run says the positions of their rows."""
    return name == POSITIONS or name.endswith("." + POSITIONS)


def natural_name(name: str) -> str:
    """'layers.005.window_kv' -> 'layers.5.window_kv'."""
    return _LAYER.sub(lambda m: f"layers.{int(m[1])}.", name)


def natural_key(name: str) -> tuple[int, int, str]:
    """Sorts hook points in the order in which a token meets them."""
    match = _LAYER.match(name)
    point = name.rsplit(".", 1)[-1]
    place = POINTS.index(point) if point in POINTS else len(POINTS)
    if match:
        return int(match[1]), place, name
    return (-1 if point == "embed" else 1 << 30), place, name
