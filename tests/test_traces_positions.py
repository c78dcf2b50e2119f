"""Which rows a state has: most states of a run have the same, which are stored once for all of them."""

import h5py
import numpy as np
import pytest

from replayscope.traces import TraceError, TraceFormatError, TraceReader, TraceWriter
from tests import small

ROWS = {
    "embed": np.arange(6),
    "layers.0.hidden": np.arange(6),
    "layers.0.window_kv": np.arange(2, 6),
    "layers.1.hidden": np.arange(6),
    "layers.1.window_kv": np.arange(2, 6),
    "layers.1.global_kv": np.arange(3),
}


def values(name: str) -> np.ndarray:
    return np.full((len(ROWS[name]), 3), list(ROWS).index(name), np.float32)


def begin(out: TraceWriter) -> None:
    out.header(config=small.CONFIG, provenance=small.PROVENANCE, tokens=small.TOKENS)
    out.runs(small.RUNS)


def put(out: TraceWriter, *names: str) -> None:
    for name in names:
        out.state(0, name, ROWS[name], values(name), "float32")


def check(trace: TraceReader) -> None:
    """Every state has its rows; those of the run are stored once, those of the window states once for the two."""
    assert trace.verify() == [] and {name for _, name in trace.states()} == set(ROWS)
    for name, rows in ROWS.items():
        assert (trace.positions(0, name) == rows).all() and len(trace.positions(0, name)) == len(rows)
        state = trace.state(0, name)
        assert (state.positions == rows).all() and (state.values == values(name)).all() and len(state.values)
    with h5py.File(trace.path) as file:
        group = file["states/0000"]
        found = {name: h5py.h5o.get_info(group[name].id).addr for name in group if name.endswith("positions")}
    window = [f"layers.{layer:03d}.window_kv.positions" for layer in (0, 1)]
    assert set(found) == {"positions", *window, "layers.001.global_kv.positions"}
    assert len(set(found.values())) == 3 and found[window[0]] == found[window[1]]


@pytest.mark.parametrize("together", [False, True])
def test_each_set_of_rows_is_stored_once(tmp_path, together):
    with TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        if together:
            with out.together():
                put(out, *ROWS)
        else:
            put(out, *ROWS)
    check(TraceReader(tmp_path / "t.h5"))


def test_a_writer_that_goes_on_finds_the_rows_of_the_run(tmp_path):
    first, rest = list(ROWS)[:2], list(ROWS)[2:]
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        put(out, *first)
        raise KeyboardInterrupt
    out = TraceWriter(tmp_path / "t.h5")
    out.resume = True
    with out:
        put(out, *first, *rest)
    check(TraceReader(tmp_path / "t.h5"))


def test_a_record_that_failed_leaves_no_rows_behind(tmp_path):
    """The states after it do not refer to positions that were taken back with it."""
    with TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        with pytest.raises(LookupError, match="stop"), out.together():
            put(out, *ROWS)
            raise LookupError("stop")
        put(out, *ROWS)
    check(TraceReader(tmp_path / "t.h5"))


def test_states_of_other_rows_than_their_positions_are_refused(tmp_path):
    with TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        put(out, *ROWS)
    with h5py.File(tmp_path / "t.h5", "r+") as file:
        del file["states/0000/layers.001.global_kv.positions"]
    with pytest.raises(TraceFormatError, match="does not fit its dtype tag or its positions"):
        TraceReader(tmp_path / "t.h5").state(0, "layers.1.global_kv")


@pytest.mark.parametrize("name", ["positions", "layers.0.positions", "embed.positions"])
def test_no_state_has_the_name_of_positions(tmp_path, name):
    with TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        with pytest.raises(ValueError, match="is a name for positions"):
            out.state(0, name, np.arange(2), np.zeros((2, 3), np.float32), "float32")
    assert TraceReader(tmp_path / "t.h5").states() == []


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "i4"])
def test_bits_that_do_not_say_what_they_are_are_refused_and_plain_numbers_are_not(tmp_path, dtype):
    logical = {"u1": "float8_e4m3fn", "u2": "bfloat16"}.get(dtype, np.dtype(dtype).name)
    with TraceWriter(tmp_path / "t.h5") as out:
        begin(out)
        out.state(0, "embed", np.arange(2), np.ones((2, 3), dtype), logical)
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.state(0, "embed").logical_dtype == logical
    with h5py.File(trace.path, "r+") as file:
        attributes = file["states/0000/embed"].attrs
        assert ("logical_dtype" in attributes) is dtype.startswith("u")
        attributes.pop("logical_dtype", None)
    if dtype.startswith("u"):
        with pytest.raises(TraceError, match="has no logical_dtype"):
            trace.state(0, "embed")
    else:
        assert trace.state(0, "embed").logical_dtype == logical
