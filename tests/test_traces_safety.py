"""Files that a stranger made: each is refused in one line, and nothing outside of the file is touched."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from replayscope.traces import TraceError, TraceFormatError, TraceReader, TraceVersionError, safe
from replayscope.traces.schema import SCHEMA_VERSION, stored_name
from tests.synthetic import synthetic_trace

HIDDEN = "divergence/full/hidden"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("safety") / "good.h5"
    synthetic_trace(path, n_tokens=40, layers=3, cuts=(9, 24))
    return path


@pytest.fixture
def path(good, tmp_path) -> Path:
    return Path(shutil.copy(good, tmp_path / "t.h5"))


def change(path: Path, name: str, make: Callable[[h5py.Group, str], object]) -> None:
    """Replace one part of the file by what `make(group, name)` puts there."""
    group, _, last = name.rpartition("/")
    with h5py.File(path, "r+") as file:
        at = file[group or "/"]
        del at[last]
        make(at, last)


def refused(act: Callable[[], object], says: str, kind: type[TraceError] = TraceFormatError) -> None:
    with pytest.raises(kind) as raised:
        act()
    message = str(raised.value)
    assert says in message and "\n" not in message and len(message) < 500, message


def test_zero_bytes(tmp_path):
    (tmp_path / "t.h5").write_bytes(b"")
    refused(lambda: TraceReader(tmp_path / "t.h5"), "is empty (0 bytes)")


@pytest.mark.parametrize(
    "data", [b"not hdf5" * 100, b"PK\x03\x04" + bytes(2000), b"\x89HDF\r\n\x1a\n" + b"\xff" * 2000]
)
def test_not_hdf5(tmp_path, data):
    (tmp_path / "t.h5").write_bytes(data)
    refused(lambda: TraceReader(tmp_path / "t.h5"), "t.h5")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.99])
def test_truncated(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    refused(lambda: TraceReader(path), "t.h5")


def test_missing_and_folder(tmp_path):
    refused(lambda: TraceReader(tmp_path / "none.h5"), "no trace at", TraceError)
    refused(lambda: TraceReader(tmp_path), "is a folder", TraceError)


def test_hdf5_of_somebody_else(tmp_path):
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["weights"] = np.zeros(4)
    refused(lambda: TraceReader(tmp_path / "t.h5"), "not a ReplayScope trace")


@pytest.mark.parametrize("value", [np.zeros(3), np.float64(1.0), "one", 0, -1])
def test_a_schema_version_that_is_none(path, value):
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = value
    refused(lambda: TraceReader(path), "no valid schema version")


def test_a_newer_schema_is_named(path):
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = SCHEMA_VERSION + 1
    refused(
        lambda: TraceReader(path), f"schema version {SCHEMA_VERSION + 1}, this program reads up to", TraceVersionError
    )


def test_links_are_never_followed(path, tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["secret"] = np.frombuffer(b'{"secret": 1}', np.uint8)
    links = {"soft": h5py.SoftLink("/provenance"), "external": h5py.ExternalLink("secret.h5", "/secret")}
    for kind, link in links.items():
        change(path, "config", lambda at, name, link=link: at.__setitem__(name, link))
        refused(lambda: TraceReader(path).config, "/config is a soft or external link, which is never followed")
        assert any("/config is a soft or external link" in fault for fault in TraceReader(path).verify()), kind


def test_a_linked_group_is_not_followed_either(path):
    change(path, HIDDEN, lambda at, name: at.__setitem__(name, h5py.SoftLink("/divergence/full/attn_in")))
    refused(lambda: TraceReader(path).table("full", "hidden"), "is a soft or external link")


def test_external_storage_is_not_read(path, tmp_path):
    (tmp_path / "secret.txt").write_bytes(b'{"secret": "root:x:0:0"}')
    place = [(str(tmp_path / "secret.txt"), 0, 24)]
    change(path, "config", lambda at, name: at.create_dataset(name, (24,), np.uint8, external=place))
    refused(lambda: TraceReader(path).config, "keeps its data in another file")


def test_a_virtual_dataset_is_not_read(path, good):
    layout = h5py.VirtualLayout(shape=(4,), dtype=np.uint8)
    layout[:] = h5py.VirtualSource(str(good), "config", shape=(4,))
    change(path, "config", lambda at, name: at.create_virtual_dataset(name, layout))
    refused(lambda: TraceReader(path).config, "is a virtual dataset")


@pytest.mark.parametrize(
    "dtype",
    [h5py.string_dtype(), h5py.vlen_dtype(np.int64), h5py.ref_dtype, np.dtype("V8"), np.dtype([("a", int)]), bool],
)
def test_only_plain_numbers_are_read(path, dtype):
    change(path, f"{HIDDEN}/diff2", lambda at, name: at.create_dataset(name, (2,), dtype))
    refused(lambda: TraceReader(path).table("full", "hidden"), "not numbers")


@pytest.mark.parametrize("chunks", [None, (1 << 20,)])
def test_a_shape_bomb_allocates_nothing(path, chunks):
    make = {"shape": (1 << 40,), "dtype": np.float64, "chunks": chunks}
    change(path, f"{HIDDEN}/diff2", lambda at, name: at.create_dataset(name, **make))
    refused(lambda: TraceReader(path).table("full", "hidden"), "claims 8796093022208 bytes but the file holds 0")


def test_a_bomb_of_many_dimensions_does_not_overflow(path):
    change(
        path, f"{HIDDEN}/diff2", lambda at, name: at.create_dataset(name, (1 << 20,) * 3, np.uint8, chunks=(1, 1, 1))
    )
    refused(lambda: TraceReader(path).table("full", "hidden"), f"claims {1 << 60} bytes")


def test_a_chunk_larger_than_the_file_is_not_allocated(tmp_path):
    with h5py.File(tmp_path / "t.h5", "w") as file:
        data = file.create_dataset("x", data=np.zeros(4, np.uint8), chunks=(64,), maxshape=(None,))
        assert safe.unsafe(data, 5000) is None
        assert safe.unsafe(data, 63) == "claims chunks larger than the file"


def test_a_compressed_bomb_is_not_unpacked(path):
    make = {"data": np.zeros(1 << 27, np.uint8), "compression": "gzip", "chunks": (1 << 20,)}
    (run, name), *_ = TraceReader(path).states()
    place = f"states/{run:04d}/{stored_name(name)}"
    tag = {"logical_dtype": np.bytes_("uint8")}
    change(path, place, lambda at, name: at.create_dataset(name, **make).attrs.update(tag))
    refused(lambda: TraceReader(path).state(run, name), f"claims {1 << 27} bytes but the file holds")


def test_only_what_is_read_one_at_a_time_may_be_compressed(path):
    """A thousand parts, each just below the bound, would be a bomb together."""
    make = {"data": np.zeros(1 << 12, np.uint8), "compression": "gzip"}
    change(path, f"{HIDDEN}/diff2", lambda at, name: at.create_dataset(name, **make))
    refused(lambda: TraceReader(path).table("full", "hidden"), "is compressed, which only raw states may be")
    assert any("only raw states" in fault for fault in TraceReader(path).verify())


def test_a_filter_that_traces_do_not_use_is_refused(path):
    make = {"data": np.zeros(1 << 12, np.uint8), "compression": "lzf"}
    change(path, "config", lambda at, name: at.create_dataset(name, **make))
    refused(lambda: TraceReader(path).config, "is stored with a filter that traces do not use")


def test_groups_where_numbers_belong_and_the_other_way_round(path):
    change(path, f"{HIDDEN}/diff2", lambda at, name: at.create_group(name))
    refused(lambda: TraceReader(path).table("full", "hidden"), "is a group, not numbers")
    change(path, "tokens", lambda at, name: at.create_dataset(name, data=np.zeros(2)))
    refused(lambda: TraceReader(path).tokens, "is not a group")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"{", b"[" * 100_000, b'["a list"]', b"7"])
def test_json_that_is_none(path, text):
    change(path, "config", lambda at, name: at.create_dataset(name, data=np.frombuffer(text, np.uint8)))
    refused(lambda: TraceReader(path).config, "/config is not")


@pytest.mark.parametrize("runs", [[1], [{"index": 0}], ["full"]])
def test_runs_that_are_none(path, runs):
    text = json.dumps(runs).encode()
    change(path, "runs", lambda at, name: at.create_dataset(name, data=np.frombuffer(text, np.uint8)))
    refused(lambda: TraceReader(path).runs, "a run in the trace is")


@pytest.mark.parametrize("offsets", [[0], [0, 5, 3], np.arange(41) * 1000])
def test_token_offsets_that_do_not_fit(path, offsets):
    change(path, "tokens/offsets", lambda at, name: at.create_dataset(name, data=np.asarray(offsets)))
    refused(lambda: TraceReader(path).tokens, "token texts do not fit")


def test_an_unknown_dtype_tag_is_refused(path):
    with h5py.File(path, "r+") as file:
        file["states/0000/layers.000.window_kv"].attrs["logical_dtype"] = np.bytes_("float4")
    refused(lambda: TraceReader(path).state(0, "layers.0.window_kv"), "unknown dtype 'float4'")


def test_a_tag_of_another_width_is_refused(path):
    with h5py.File(path, "r+") as file:
        file["states/0000/layers.000.window_kv"].attrs["logical_dtype"] = np.bytes_("float8_e5m2")
    refused(lambda: TraceReader(path).state(0, "layers.0.window_kv"), "does not fit its dtype tag")


def test_deep_nesting_ends(path):
    with h5py.File(path, "r+") as file:
        file.create_group("a/b/c/d/e/f/g/h")
        file["a/b/loop"] = file["a"]
    assert any("nested too deep" in fault for fault in TraceReader(path).verify())


def test_a_flipped_byte_is_found_and_named(path):
    with h5py.File(path) as file:
        data = file["states/0000/layers.002.hidden"]
        where = data.id.get_chunk_info(0).byte_offset
    raw = bytearray(path.read_bytes())
    raw[where + 5] ^= 1
    path.write_bytes(raw)
    faults = TraceReader(path).verify()
    assert len(faults) == 1 and "/states/0000/layers.002.hidden" in faults[0] and "rows 0 to 39" in faults[0]
    refused(lambda: TraceReader(path).state(0, "layers.2.hidden"), "is damaged")
    assert len(TraceReader(path).state(0, "layers.1.hidden").values) == 40


def test_tables_of_another_shape_are_found(path):
    change(path, f"{HIDDEN}/n", lambda at, name: at.create_dataset(name, data=np.ones((1, 1, 1))))
    assert any("/divergence/full/hidden/n is (1, 1, 1), want" in fault for fault in TraceReader(path).verify())


def test_damage_is_named_where_it_is_met_and_once_by_verify(path):
    with h5py.File(path) as file:
        places = {name: file[name].id.get_chunk_info(0).byte_offset for name in ("runs", f"{HIDDEN}/diff2")}
    data = bytearray(path.read_bytes())
    for at in places.values():
        data[at] ^= 255
    path.write_bytes(data)
    said = "is damaged: the stored bytes fail their checksum or cannot be read; replayscope show --verify"
    refused(lambda: TraceReader(path).runs, f"/runs {said}")
    refused(lambda: TraceReader(path).table("full", "hidden"), f"/diff2 {said}")
    faults = TraceReader(path).verify()
    assert len(faults) == 2 and all("damaged at rows" in fault for fault in faults), faults


@pytest.mark.parametrize("size", [9, 10, 16, 30, 47, 60])
def test_a_stub_of_a_trace_is_truncated(path, size):
    path.write_bytes(path.read_bytes()[:size])
    refused(lambda: TraceReader(path), "is truncated: the file ends before its data")
