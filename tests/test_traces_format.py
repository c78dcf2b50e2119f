"""The file itself: what is written comes back bit by bit, and docs/trace-format.md tells the truth about it."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayscope.traces import RunInfo, Table, Tokens, TraceError, TraceFormatError, TraceReader, TraceWriter
from replayscope.traces.dtypes import BITVIEWS, decode, encode_bf16, storage_dtype
from replayscope.traces.schema import (
    POINTS,
    bucket_names,
    distance_bins,
    kind_of,
    natural_key,
    natural_name,
    relative_l2,
    stored_name,
)
from tests.synthetic import synthetic_trace

RUN = RunInfo(index=0, arm="full", semantics="paper", cut=None, replay=None, start=0, stop=4, prompt_end=4, window=8)
TOKENS = Tokens(np.arange(4), ["a", "b", "c", "d"])


def write(path: Path, tokens: Tokens = TOKENS, config: dict | None = None, runs=(RUN,)) -> TraceWriter:
    out = TraceWriter(path, force=True).__enter__()
    out.header(config=config or {}, provenance={"dtype": "float32"}, tokens=tokens)
    out.runs(runs)
    return out


def close(out: TraceWriter) -> TraceReader:
    out.__exit__(None, None, None)
    return TraceReader(out.path)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("format") / "trace.h5"
    synthetic_trace(path, n_tokens=64, layers=4, cuts=(8, 9, 32))
    return path


def test_the_script_of_the_document_reads_a_trace_with_h5py_alone(path, root):
    text = (root / "docs" / "trace-format.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(script.splitlines()) == 10
    done = subprocess.run([sys.executable, "-c", script], cwd=path.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trace = TraceReader(path)
    run = next(i for i, _ in trace.states() if trace.runs[i].arm == "encoder")
    state, table = trace.state(run, "layers.1.window_kv"), trace.table("full", "window_kv")
    at = run, 1, table.bucket("window")
    value = relative_l2(table.arrays["diff2"][at], table.arrays["ref2"][at], 1)
    assert done.stdout == f"{trace.runs[run].cut} {state.values[0, :4]} {value}\n"


def test_the_document_names_every_array_and_every_key(path, root):
    text = (root / "docs" / "trace-format.md").read_text(encoding="utf-8")
    trace = TraceReader(path)
    words = set(re.findall(r"`([a-z_0-9]+)`", text))
    for point in trace.points("full"):
        table = trace.table("full", point)
        assert set(table.arrays) <= words, point
        assert set(table.attrs) <= set(re.findall(r"\w+", text)), point
    assert set(RUN.to_json()) <= words


def test_every_part_comes_back(path):
    trace = TraceReader(path)
    assert trace.complete and trace.verify() == []
    assert trace.references() == ["full", "oracle"] and tuple(trace.points("full")) == POINTS
    assert trace.config["window"] == 8 and trace.provenance["dtype"] == "float64"
    assert [run.arm for run in trace.runs[:4]] == ["full", "repeat", "rechunk", "hit"]
    assert trace.text("greedy") == " and so on \udcff" and trace.texts() == ["greedy"]
    run = next(run for run in trace.runs if run.arm == "encoder" and run.cut == 32)
    rows = trace.rows("full", "hidden", run.index)
    assert rows.position.tolist() == list(range(24, 64)) and rows.arrays["diff2"].shape == (4, 40)
    table = trace.table("full", "hidden")
    np.testing.assert_allclose(table.arrays["diff2"][run.index, :, 0], rows.arrays["diff2"].sum(1))


def test_every_dataset_carries_checksums_and_no_attribute_is_large(path):
    with h5py.File(path) as file:
        seen = []

        def check(name: str, item: h5py.Group | h5py.Dataset) -> None:
            assert all(np.asarray(value).nbytes < 1000 for value in item.attrs.values())
            if isinstance(item, h5py.Dataset):
                seen.append(name)
                assert item.fletcher32 and item.chunks and item.dtype.kind in "iuf", name

        file.visititems(check)
    assert len(seen) > 300


def test_a_long_prompt_and_a_large_config_are_stored(tmp_path):
    tokens = Tokens(np.arange(20_000), [f"token {i}" for i in range(20_000)])
    config = {"note": "x" * 200_000, "窗口": [1.5, None, True]}
    trace = close(write(tmp_path / "t.h5", tokens, config))
    assert trace.config == config
    assert trace.tokens.texts == tokens.texts and (trace.tokens.ids == tokens.ids).all()


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(), max_size=4), max_size=8))
def test_any_text_comes_back(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "texts.h5"
    out = write(path, Tokens(np.arange(len(texts)), texts))
    out.text("all", "".join(texts))
    trace = close(out)
    assert trace.tokens.texts == texts and trace.text("all") == "".join(texts)


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\udcff", "\ud800", "窗口🙂", ""])
def test_awkward_token_texts_come_back(tmp_path, text):
    trace = close(write(tmp_path / "t.h5", Tokens(np.arange(2), [text, "b"]), {"text": text}))
    assert trace.tokens.texts == [text, "b"] and trace.config["text"] == text


def test_an_empty_prompt_and_an_empty_state_are_stored(tmp_path):
    out = write(tmp_path / "t.h5", Tokens(np.arange(0), []))
    out.state(0, "layers.0.topk", np.arange(0), np.zeros((0, 4), np.int32), "int32")
    trace = close(out)
    assert trace.tokens.texts == [] and trace.state(0, "layers.0.topk").values.shape == (0, 4)


def test_a_scalar_table_attribute_and_run_survive(tmp_path):
    out = write(tmp_path / "t.h5")
    n = np.ones((1, 3, 5), np.int64)
    out.table("full", "topk", Table("discrete", bucket_names(0)[:5], {"n": n}, {"top_k": 4, "tol_rel": 1e-3}))
    trace = close(out)
    assert trace.table("full", "topk").attrs == {"top_k": 4, "tol_rel": 1e-3}
    assert json.dumps(trace.runs[0].to_json()) == json.dumps(RUN.to_json())


# --- dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(set(BITVIEWS) - {"float4_e2m1fn_x2", "bool"}))
def test_all_codes_decode_as_torch_decodes_them_and_come_back_as_bits(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    storage = BITVIEWS[dtype]
    bits = np.arange(1 << (8 * storage.itemsize), dtype=np.uint32).astype(storage)
    signed = bits.view(np.int16 if storage.itemsize == 2 else np.int8)
    theirs = torch.from_numpy(signed).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(decode(bits, dtype), theirs)
    out = write(tmp_path / "t.h5")
    out.state(0, "layers.0.window_kv", np.arange(len(bits)), bits, dtype)
    state = close(out).state(0, "layers.0.window_kv")
    assert state.logical_dtype == dtype and (state.bits == bits).all()
    np.testing.assert_array_equal(np.signbit(state.values), np.signbit(theirs))


def test_packed_fp4_reads_as_two_numbers_and_keeps_its_bytes(tmp_path):
    out = write(tmp_path / "t.h5")
    bits = np.arange(256, dtype=np.uint8).reshape(4, 64)
    out.state(0, "layers.0.window_kv", np.arange(4), bits, "float4_e2m1fn_x2")
    state = close(out).state(0, "layers.0.window_kv")
    assert state.values.shape == (4, 128) and (state.bits == bits).all()
    assert state.values[0, :4].tolist() == [0.0, 0.0, 0.5, 0.0], "the first number is the low half"
    assert state.values[3, -2:].tolist() == [-6.0, -6.0] and np.signbit(
        decode(np.array([[8]], np.uint8), "float4_e2m1fn_x2")[0, 0]
    )


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_torch_values_come_back_bit_by_bit(tmp_path, name):
    torch = pytest.importorskip("torch")
    from replayscope.inspector.tables import stored

    size = torch.empty((), dtype=getattr(torch, name)).element_size()
    raw = np.random.default_rng(0).integers(0, 256, 24 * size, dtype=np.uint8)
    if name == "bool":
        raw &= 1
    if name.startswith("float"):
        raw[:size], raw[size : 2 * size] = 0xFF, 0  # a NaN with a payload; then -0.0
        raw[2 * size - 1] = 0x80
    if name == "int64":
        raw = np.arange(-12, 12, dtype=np.int64).view(np.uint8)  # choices are stored as int32
    values = torch.from_numpy(raw.copy()).view(getattr(torch, name)).reshape(4, 6)
    array, logical = stored(values)
    assert logical == ("int32" if name == "int64" else name)
    out = write(tmp_path / "t.h5")
    out.state(0, "embed", np.arange(4), array, logical)
    state = close(out).state(0, "embed")
    if name == "int64":
        assert (state.values == values.numpy()).all()
    else:
        assert state.bits.tobytes() == raw.tobytes() and state.values.dtype == np.dtype(name)


def test_bf16_and_fp16_of_the_same_bits_are_different_numbers():
    assert decode(np.array([0x3F95], np.uint16), "bfloat16")[0] == 1.1640625
    assert decode(np.array([0x3F95], np.uint16).view(np.float16), "float16")[0] != 1.1640625


def test_bf16_keeps_what_fp16_cannot():
    values = np.array([1e30, -0.0, np.inf, -np.inf, np.nan, 65504.0 * 2], np.float32)
    back = decode(encode_bf16(values), "bfloat16")
    np.testing.assert_allclose(back, values, rtol=2**-8)
    assert np.signbit(back[1])


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_encoding_bf16_rounds_as_torch_does(values):
    torch = pytest.importorskip("torch")
    values = np.array(values, np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decode(encode_bf16(values), "bfloat16"), theirs)


def test_an_unknown_dtype_or_another_width_is_refused():
    with pytest.raises(TraceFormatError, match="unknown dtype 'float4'"):
        storage_dtype("float4")
    with pytest.raises(TraceFormatError, match="expected uint16"):
        decode(np.zeros(2, np.uint8), "bfloat16")


# --- names ------------------------------------------------------------------------------------------------------


def test_names_sort_by_layer_in_the_file_and_are_natural_outside(tmp_path):
    names = [f"layers.{i}.window_kv" for i in (0, 2, 10, 100)]
    out = write(tmp_path / "t.h5")
    for name in reversed(names):
        out.state(0, name, np.arange(1), np.zeros((1, 2), np.float32), "float32")
    trace = close(out)
    assert [name for _, name in trace.states()] == names
    with h5py.File(trace.path) as file:
        assert list(file["states/0000"]) == [*(stored_name(name) for name in names), "positions"]


@given(st.integers(0, 999), st.sampled_from(POINTS))
def test_stored_and_natural_names_are_inverse(layer, point):
    name = f"layers.{layer}.{point}"
    assert natural_name(stored_name(name)) == name


def test_points_sort_in_the_order_of_the_data():
    names = ["logits", "final", "layers.10.attn_in", "layers.2.hidden", "layers.2.attn_in", "embed"]
    assert sorted(names, key=natural_key) == [names[i] for i in (5, 4, 3, 2, 1, 0)]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "x" * 300, "a\x00", "naïve", ".hidden"])
def test_a_name_that_would_be_a_path_is_refused_in_one_line(tmp_path, name):
    out = write(tmp_path / "t.h5")
    for record in (lambda: out.text(name, ""), lambda: out.state(0, name, np.arange(1), np.zeros(1), "float64")):
        with pytest.raises(TraceError, match="cannot name a part of a trace"):
            record()
    assert close(out).verify() == []


def test_a_run_with_any_label_is_stored(tmp_path):
    runs = [replace(RUN, arm=name, index=i) for i, name in enumerate(["exp/1", ".", "", "x" * 300])]
    assert [run.arm for run in close(write(tmp_path / "t.h5", runs=runs)).runs] == [run.arm for run in runs]


@given(st.integers(0, 5000))
def test_bins_cover_every_distance_once(longest):
    bins = distance_bins(longest)
    assert bins[0] == (0, 0) and bins[-1][1] >= longest
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(bins))
    assert len(set(bucket_names(longest))) == 5 + len(bins)


def test_an_unknown_point_is_named():
    with pytest.raises(TraceError, match="no hook point 'windowkv'; the hook points are embed"):
        kind_of("windowkv")
