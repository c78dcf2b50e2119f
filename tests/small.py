"""A small trace with one part of every kind, from plain formulas: what the golden files hold, and what is damaged.

The golden files were written from these values, so they never change; a part added later gets a function of its own.
"""

import os
from collections.abc import Mapping

import numpy as np

from replayscope.traces import RunInfo, State, Table, Tokens, TraceReader, TraceWriter
from replayscope.traces.schema import THRESHOLDS, bucket_names

LAYERS = 2
BUCKETS = bucket_names(3)
CONFIG = {"model_type": "small", "num_hidden_layers": LAYERS, "note": "窗口"}
PROVENANCE = {"model": "small", "dtype": "bfloat16", "seed": 7, "versions": {"replayscope": "0.1.0"}}
TOKENS = Tokens(np.array([5, 0, 9, 2, 2, 7]), ["The", "\x00", " 窗口", "\udce9", "\udce9", ""])
FULL = RunInfo(index=0, arm="full", semantics="paper", cut=None, replay=None, start=0, stop=6, prompt_end=6, window=2,
               fresh=6, decoder_rows=6, floor=(0, 0), first_row=(0, 0))  # fmt: skip
ENCODER = RunInfo(index=1, arm="encoder", semantics="paper", cut=4, replay=2, start=2, stop=6, prompt_end=6, window=2,
                  replayed=2, cached=4, fresh=2, decoder_rows=4, cached_checked=2, floor=(2, 2), first_row=(2, 2),
                  exact_in=(((2, 6),), ((3, 6),)), exact_out=(((3, 6),), ((4, 6),)))  # fmt: skip
RUNS = (FULL, ENCODER)
TEXT = " and so on \udcff"
POSITIONS = np.arange(2, 6)
OFFSETS = np.array([0, 0, 4])
STATES = {
    "layers.0.window_kv": (np.array([[0x3F95, 0x8000, 0x7FC1, 0xFF80]] * 4, np.uint16), "bfloat16"),
    "layers.1.window_kv": (np.array([[0x00, 0x80, 0x7F, 0x3C, 0xFF]] * 4, np.uint8), "float8_e4m3fn"),
    "layers.1.router": (np.arange(8, dtype=np.int32).reshape(4, 2) - 1, "int32"),
    "layers.1.hidden": (np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), "float32"),
    "final": (np.linspace(-1, 1, 24, dtype=np.float16).reshape(4, 6), "float16"),
}


def _cells(first: float, last: int = len(BUCKETS)) -> np.ndarray:
    """[run, layer, last] of different numbers."""
    return first + np.arange(len(RUNS) * LAYERS * last, dtype=np.float64).reshape(len(RUNS), LAYERS, last) / 8


def tables() -> dict[str, Table]:
    """Hook point -> its table against `full`."""
    n = np.where(np.arange(len(RUNS))[:, None, None] > 0, 4, 0) * np.ones(_cells(0).shape, np.int64)
    at = np.full((len(RUNS), LAYERS, len(THRESHOLDS)), -1, np.int64)
    state = {"n": n, "elements": n * 6, "diff2": _cells(1), "ref2": _cells(9), "nonfinite": n * 0, "last_at": at}
    discrete = {"n": n, "changed": n // 2, "min_margin": np.full(n.shape, np.nan)}
    return {
        "hidden": Table("state", BUCKETS, state, {"tol_abs": 1e-6, "tol_rel": 1e-3}),
        "router": Table("discrete", BUCKETS, discrete, {"top_k": 2}),
    }


def rows() -> dict[str, np.ndarray]:
    """Arrays [layer, packed row] of the row table of `hidden`."""
    return {"n": np.ones((LAYERS, 4), np.int64), "diff2": np.arange(8.0).reshape(LAYERS, 4)}


def small_trace(path: str | os.PathLike[str]) -> None:
    """Write it."""
    with TraceWriter(path, force=True) as out:
        out.header(config=CONFIG, provenance=PROVENANCE, tokens=TOKENS)
        out.runs(RUNS)
        for point, table in tables().items():
            out.table("full", point, table)
        out.rows("full", "hidden", OFFSETS, POSITIONS, rows())
        for name, (array, logical) in STATES.items():
            out.state(1, name, POSITIONS, array, logical)
        out.text("greedy", TEXT)


def check(trace: TraceReader) -> None:
    """Raises AssertionError unless the trace holds exactly what was written."""
    assert (trace.complete, trace.records) == (True, 11)
    assert (trace.config, trace.provenance) == (CONFIG, PROVENANCE)
    assert [tuple_of(run.to_json()) for run in trace.runs] == [tuple_of(run.to_json()) for run in RUNS]
    same(trace.tokens.ids, TOKENS.ids)
    assert trace.tokens.texts == list(TOKENS.texts)
    assert (trace.references(), trace.points("full"), trace.row_points("full")) == (
        ["full"], ["router", "hidden"], ["hidden"],
    )  # fmt: skip
    for point, table in tables().items():
        check_table(trace.table("full", point), table)
    assert set(trace.states()) == {(1, name) for name in STATES}
    for name in STATES:
        check_state(trace.state(1, name), name)
    kept = trace.rows("full", "hidden", 1)
    same(kept.position, POSITIONS)
    check_arrays(kept.arrays, rows())
    assert trace.texts() == ["greedy"] and trace.text("greedy") == TEXT


def check_table(found: Table, wanted: Table) -> None:
    """Kind, buckets, attributes and every number."""
    assert (found.kind, tuple(found.buckets), found.attrs) == (wanted.kind, tuple(wanted.buckets), wanted.attrs)
    check_arrays(found.arrays, wanted.arrays)


def check_state(found: State, name: str) -> None:
    """Positions, bits and dtype of one of STATES."""
    bits, logical = STATES[name]
    assert found.logical_dtype == logical
    same(found.positions, POSITIONS)
    same(found.bits, bits)


def check_arrays(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """The same names with the same bits."""
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        same(found[name], values)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same dtype, shape and bytes: NaN equals itself, -0.0 is not 0.0."""
    assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def tuple_of(value: object) -> object:
    """Lists as tuples, all the way down: JSON knows lists only."""
    if isinstance(value, Mapping):
        return tuple((key, tuple_of(item)) for key, item in value.items())
    return tuple(tuple_of(item) for item in value) if isinstance(value, list | tuple) else value
