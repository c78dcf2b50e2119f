"""Traces that open and are not sound: figures, report and page name the file and the part in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from replayscope.inspector import cli
from replayscope.inspector.errors import ReplayScopeError
from replayscope.traces import TraceError, TraceReader
from replayscope.ui.checked import CheckedReader, told
from replayscope.ui.export import export
from replayscope.ui.figures import FIGURES, chart, figure
from tests.synthetic import synthetic_trace
from tests.visitor import Visitor


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checked") / "a.h5"
    synthetic_trace(path, n_tokens=48, window=8, layers=3, cuts=(4, 24, 40))
    return path


def put(group: h5py.Group, name: str, values: np.ndarray) -> None:
    del group[name]
    group[name] = values


def document(file: h5py.File, name: str, value: object) -> None:
    put(file, name, np.frombuffer(json.dumps(value).encode(), np.uint8))


def read(file: h5py.File, name: str):
    return json.loads(file[name][()].tobytes())


def runs(file: h5py.File, **fields) -> None:
    """Other fields of the last run."""
    told = read(file, "runs")
    told[-1] |= fields
    document(file, "runs", told)


def arrays(file: h5py.File, change) -> None:
    """Every array of every table, changed."""
    for reference in file["divergence"].values():
        for group in reference.values():
            for name in [name for name in group if name != "buckets"]:
                put(group, name, change(group[name][()]))


def missing(file: h5py.File, *names: str) -> None:
    for reference in file["divergence"].values():
        for group in reference.values():
            for name in names:
                if name in group:
                    del group[name]


DAMAGE = {
    "run index": (lambda f: runs(f, index=10**9), "/runs run"),
    "run index as text": (lambda f: runs(f, index="0"), "/runs run"),
    "oracle": (lambda f: runs(f, oracle=10**9), "/runs run"),
    "cut": (lambda f: runs(f, cut=1.5), "/runs run"),
    "stop": (lambda f: runs(f, stop=10**30), "/runs run"),
    "stop before start": (lambda f: runs(f, start=30, stop=3), "/runs run"),
    "arm": (lambda f: runs(f, arm=None), "/runs run"),
    "exact region": (lambda f: runs(f, exact_in=[[[1]]]), "/runs run"),
    "layers": (lambda f: runs(f, exact_in=[[], []], exact_out=[[], []]), "/runs"),
    "field": (lambda f: document(f, "runs", [{"index": 0}]), "/runs"),
    "no object": (lambda f: document(f, "runs", [3]), "/runs"),
    "no runs": (lambda f: document(f, "runs", []), "/runs is empty"),
    "full alone": (lambda f: document(f, "runs", read(f, "runs")[:1]), "a.h5"),
    "one run less": (lambda f: document(f, "runs", read(f, "runs")[:-1]), "/divergence/"),
    "config": (lambda f: document(f, "config", {"text_config": [], "layers": 3}), "/config"),
    "sources": (lambda f: document(f, "config", {"kv_source_layer_ids": ["a"]}), "/config"),
    "no divergence": (lambda f: f.__delitem__("divergence"), "/divergence is empty"),
    "no table": (lambda f: [f["divergence/full"].clear(), f["divergence/oracle"].clear()], "/divergence/full is empty"),
    "runs of tables": (lambda f: arrays(f, lambda a: a[:-1]), "/divergence/full/"),
    "layers of tables": (lambda f: arrays(f, lambda a: np.concatenate([a, a], 1)), "/divergence/full/"),
    "regions of tables": (lambda f: arrays(f, lambda a: a[:, :, :-1]), "/divergence/full/"),
    "rank of tables": (lambda f: arrays(f, lambda a: a[0]), "/divergence/full/"),
    "tables without n": (lambda f: missing(f, "n"), "has no n"),
    "tables without sums": (lambda f: missing(f, "nonfinite", "flips"), "has no"),
    "region names": (lambda f: [document(f[f"divergence/full/{p}"], "buckets", ["all"]) for p in f["divergence/full"]],
                     "has no region window"),
    "point": (lambda f: f["divergence/full"].move("embed", "embedding"), "/divergence/full/embedding"),
}  # fmt: skip


@pytest.fixture(params=DAMAGE)
def damaged(request, sound, tmp_path) -> tuple[Path, str]:
    """A trace with one fault, and what must be said of it."""
    (tmp_path / "t").mkdir()
    path = shutil.copy(sound, tmp_path / "t" / "a.h5")
    damage, said = DAMAGE[request.param]
    with h5py.File(path, "r+") as file:
        damage(file)
    return Path(path), said


def visit(folder: Path) -> Visitor:
    return Visitor(folder, cuts=(4, 24, 40))


def cleared(new: dict) -> str:
    """The one line of a page on which nothing else is left."""
    assert [new.get(part, "") for part in ("header", "story", "overview_cut", "overview_position", "tables")] == [
        ""
    ] * 5
    return new["note"]


@pytest.mark.parametrize("figure", ["cut-layer", "position-layer", "reach", "logits-kl", "compare", "report"])
def test_the_command_line_names_the_file_and_the_part(damaged, figure, tmp_path, capsys):
    path, said = damaged
    out = str(tmp_path / "out.html")
    words = ["report", str(path)] if figure == "report" else ["plot", str(path), "--figure", figure]
    code = cli.main([*words, "-o", out])
    err = capsys.readouterr().err
    if (figure, said) == ("logits-kl", "/config"):
        assert code == 0, "it reads nothing of the config"
        return
    assert (code, err.count("\n")) == (2, 1) and "internal error" not in err and "''" not in err
    assert str(path) in err and said in err
    assert not Path(out).exists()


def test_the_page_is_cleared_and_says_one_line(damaged, capsys):
    path, _ = damaged
    visitor = visit(path.parent)
    # What only the verdict reads may be what is wrong.
    line = cleared(visitor.new) if visitor.new["header"] == "" else json.loads(visitor.act.describe("a.h5")[0])["html"]
    assert "a.h5" in line and str(path.parent) not in line and "\n" not in line and "Traceback" not in line
    assert "rs-empty" in line and visitor.choice.trace == "a.h5", "the page still knows which file the line is about"
    assert capsys.readouterr().err == ""


def test_a_sound_trace_passes_every_check(sound, tmp_path):
    checked, plain = CheckedReader(sound), TraceReader(sound)
    assert checked.runs == plain.runs and checked.config == plain.config
    for reference in plain.references():
        assert checked.points(reference) == plain.points(reference)
        for point in plain.points(reference):
            checked.table(reference, point)
        for point in plain.row_points(reference):
            for run in plain.runs:
                checked.rows(reference, point, run.index)
    assert len(export(sound, "all", None, tmp_path / "f")) == len(FIGURES) - 1, "there is one replay length only"


def test_no_figure_fails_without_words(damaged):
    """Figures that read little of a trace may be made of it all the same."""
    path, _ = damaged
    for name in ("healing", "replay-length", "logits-suffix", "tensor"):
        try:
            with told(path, "figure"):
                figure(chart(CheckedReader(path), name))
        except ReplayScopeError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("offsets", lambda a: a * 1000),
        ("offsets", lambda a: a[:2]),
        ("offsets", lambda a: np.stack([a, a])),
        ("position", lambda a: a[::-1]),
        ("position", lambda a: a.astype(float)),
        ("diff2", lambda a: a[:-1]),
        ("diff2", lambda a: a[0]),
        ("diff2", lambda a: a[:, :-5]),
    ],
)
def test_rows_that_do_not_fit_are_named(sound, tmp_path, name, change):
    path = Path(shutil.copy(sound, tmp_path / "a.h5"))
    with h5py.File(path, "r+") as file:
        put(file["rows/full/window_kv"], name, change(file[f"rows/full/window_kv/{name}"][()]))
    last = len(TraceReader(path).runs) - 1
    with pytest.raises(TraceError, match=r"a\.h5.*rows/full/window_kv|a\.h5 has no run"):
        CheckedReader(path).rows("full", "window_kv", last)
    with pytest.raises(TraceError, match=r"a\.h5"):
        export(path, "position-layer", None, tmp_path / "o.html", run=last)


def test_what_no_check_foresees_is_one_line_too(tmp_path):
    for error in (ValueError("a\nb"), KeyError("kl_max"), IndexError(), TypeError("x" * 500), ZeroDivisionError("y")):
        with pytest.raises(TraceError) as caught, told("a.h5", "figure reach"):
            raise error
        said = str(caught.value)
        assert said.startswith("a.h5: no figure reach") and "\n" not in said and len(said) < 250
    with pytest.raises(MemoryError), told("a.h5", "figure reach"):
        raise MemoryError


def test_a_fault_in_the_drawing_itself_reaches_no_reader(sound, monkeypatch, capsys):
    visitor = visit(sound.parent)
    assert visitor.new["overview_cut"] != ""
    broken = replace(visitor.act.tabs["overview"], content=lambda *_: np.zeros(2)[3])
    visitor.act.tabs["overview"] = broken
    assert "a.h5" in cleared(visitor.do(cut=0)) and capsys.readouterr().err == ""


EVENTS = {
    "open": lambda visitor: visitor.took(visitor.act.start("?trace=a.h5")),
    "describe": lambda visitor: {"note": json.loads(visitor.act.describe("a.h5")[0])["html"]},
    "draw": lambda visitor: visitor.do(region="suffix"),
    "move": lambda visitor: visitor.do(cut=0),
    "click": lambda visitor: visitor.do({"axis": "cut", "at": 24, "row": 1}),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("fate", ["deleted", "foreign", "empty", "no trace", "a folder"])
def test_a_file_that_goes_bad_while_it_is_open(event, fate, sound, tmp_path, capsys):
    path = Path(shutil.copy(sound, tmp_path / "a.h5"))
    visitor = visit(tmp_path)
    assert visitor.new["overview_cut"] and visitor.new["header"]
    path.unlink()
    if fate == "foreign":
        path.write_bytes(b"no trace at all")
    elif fate == "empty":
        path.touch()
    elif fate == "no trace":
        h5py.File(path, "w").close()
    elif fate == "a folder":
        path.mkdir()
    line = cleared(EVENTS[event](visitor))
    assert "a.h5" in line and str(tmp_path) not in line and "rs-empty" in line
    assert capsys.readouterr().err == ""


def test_what_no_menu_offers_is_mended_or_refused(sound, capsys):
    for odd in (None, 3, [], ["a"], {}, "no such", "../../etc"):
        visitor = visit(sound.parent)
        visitor.do(arm=odd, reference=odd, point=odd, region=odd, metric=odd, cut=odd, layer=odd, position=odd)
        assert visitor.choice.arm == "encoder" and "note" not in visitor.new
        if odd:
            line = cleared(visitor.do(trace=odd))
            assert "rs-empty" in line and "\n" not in line and str(sound.parent) not in line
    assert capsys.readouterr().err == ""
