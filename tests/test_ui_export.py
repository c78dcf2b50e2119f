"""Figures as files: whole or not at all, the same bytes each time, strict JSON, nothing lost on the way."""

import csv
import io
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from replayscope.inspector import cli
from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import metric
from replayscope.traces import TraceError, TraceReader
from replayscope.ui import export as module
from replayscope.ui.export import export, table
from replayscope.ui.figures import FIGURES
from replayscope.ui.grid import ABSENT, DESIGN, Grid, MapChart
from replayscope.ui.scale import fit
from tests.synthetic import synthetic_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "t.h5"
    synthetic_trace(path, n_tokens=64, window=8, layers=4, cuts=(4, 8, 9, 24, 40, 63))
    return path


# The made-up trace has one replay length; every other figure can be made of it.
THERE = [name for name in FIGURES if name != "replay-length"]


def strict(text: str):
    return json.loads(text, parse_constant=lambda literal: pytest.fail(f"{literal} is no JSON"))


@pytest.mark.parametrize("kind", ["html", "csv", "json"])
@pytest.mark.parametrize("name", THERE)
def test_the_same_trace_gives_the_same_bytes(path, tmp_path, name, kind):
    first, second = (export(path, name, "rel_l2", tmp_path / f"{i}.{kind}")[0].read_bytes() for i in range(2))
    assert first == second and len(first) > 200


def test_csv_holds_every_cell(path, tmp_path):
    (out,) = export(path, "cut-layer", "rel_l2", tmp_path / "a.csv")
    rows = list(csv.DictReader(out.read_text().splitlines()))
    trace = TraceReader(path)
    stored = trace.table("full", "window_kv")
    value = metric(stored, "rel_l2")
    for row in rows:
        run = next(r for r in trace.runs if r.arm == "encoder" and r.cut == int(row["cut"]))
        assert float(row["value"]) == value[run.index, int(row["layer"]), stored.bucket("window")]
    assert len(rows) == 6 * 4


def test_json_is_strict_and_says_what_it_is(path, tmp_path):
    (out,) = export(path, "position-layer", "rel_l2", tmp_path / "a.json")
    said = strict(out.read_text())
    assert said["figure"] == "position-layer" and said["metric"] == "rel_l2" and said["trace"] == "t.h5"
    assert len(said["rows"][0]) == len(said["columns"])


def extreme() -> MapChart:
    value = np.array([[0.0, np.inf, np.nan, 0.5]])
    kind = np.array([["identical", DESIGN, ABSENT, DESIGN]])
    grid = Grid(value, np.ones((1, 4), int), np.full((1, 4), np.nan), kind, np.zeros((1, 4), bool), ["0"],
                np.arange(4), np.arange(4) + 1)  # fmt: skip
    return MapChart("t", "s", meta={"trace": "t.h5"}, grid=grid, scale=fit(value, "relative L2"), axis="cut H")


def test_inf_and_nan_stay_apart_in_csv_and_json():
    rows = list(csv.DictReader(io.StringIO(table(extreme()))))
    assert [row["value"] for row in rows] == ["0.0", "inf", "nan", "0.5"]
    said = strict(module.document({"cut-layer": extreme()}))
    assert [row[said["columns"].index("value")] for row in said["rows"]] == [0.0, "inf", None, 0.5]
    assert math.isinf(float(rows[1]["value"]))


def test_html_is_whole_and_reaches_for_nothing(path, tmp_path):
    (out,) = export(path, "cut-layer", "rel_l2", tmp_path / "a.html")
    text = out.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert len(text) < 2_500_000 and "Encoder replay changes the window KV" in text
    (every,) = export(path, "all", "rel_l2", tmp_path / "all.html")
    assert every.read_text().count('id="plotly"') == 1 and every.stat().st_size < 3_000_000


def test_a_map_of_4096_cuts_stays_under_five_megabytes(tmp_path):
    value = np.random.default_rng(0).lognormal(size=(40, 4096))
    grid = Grid(value, np.full(value.shape, 32), np.full(value.shape, 1e-6), np.full(value.shape, DESIGN),
                np.zeros(value.shape, bool), [str(i) for i in range(40)], np.arange(4096),
                np.arange(4096) + 1)  # fmt: skip
    big = MapChart("t", "s", meta={"trace": "t.h5"}, grid=grid, scale=fit(value, "relative L2"), axis="cut H")
    assert len(module._html({"cut-layer": big})) < 5_000_000


def test_all_figures_into_a_folder(path, tmp_path):
    written = export(path, "all", "rel_l2", tmp_path / "figures")
    assert [p.name for p in written] == [f"{name}.html" for name in THERE]
    with pytest.raises(TraceError, match="--force"):
        export(path, "all", "rel_l2", tmp_path / "figures")
    export(path, "all", "rel_l2", tmp_path / "figures", force=True)
    said = strict(export(path, "all", "rel_l2", tmp_path / "all.json")[0].read_text())
    assert list(said["figures"]) == THERE


def test_one_figure_too_many_in_a_folder_and_none_is_written(path, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "reach.html").write_text("mine")
    with pytest.raises(TraceError, match="--force"):
        export(path, "all", "rel_l2", tmp_path / "figures")
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["reach.html"]
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(UsageError, match="not a folder"):
        export(path, "all", "rel_l2", tmp_path / "plain", force=True)


@pytest.mark.parametrize("metric_name", ["rel_l2", "cosine", "kl", "jaccard"])
def test_all_takes_any_metric_and_each_figure_its_own_where_it_must(path, tmp_path, metric_name):
    assert len(export(path, "all", metric_name, tmp_path / "o")) == len(THERE)


def test_two_traces_in_one_file(path, tmp_path):
    other = tmp_path / "other.h5"
    synthetic_trace(other, n_tokens=48, window=8, layers=3, cuts=(24,))
    said = strict(export([path, other], "cut-layer", "rel_l2", tmp_path / "a.json")[0].read_text())
    assert list(said["figures"]) == ["t-cut-layer", "other-cut-layer"]


@pytest.mark.parametrize(
    ("figure", "metric_name", "out", "said"),
    [
        ("cut-layer", "rel_l2", "a.gif", ".html, .png, .svg, .pdf, .csv, .json"),
        ("cut-layr", "rel_l2", "a.html", "cut-layer"),
        ("cut-layer", "kl", "a.html", "logits-kl"),
        ("all", "rel_l2", "a.csv", "one figure"),
        ("cut-layer", "rel_l2", "missing/a.html", "no folder"),
        ("cut-layer", "rel_l2", "a", "no ending"),
        ("all", "rel_l2", "figures.v2", "valid endings"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(path, tmp_path, figure, metric_name, out, said):
    with pytest.raises(UsageError) as error:
        export(path, figure, metric_name, tmp_path / out)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_kept_without_force(path, tmp_path):
    (tmp_path / "a.html").write_text("mine")
    with pytest.raises(TraceError, match="exists"):
        export(path, "cut-layer", "rel_l2", tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    export(path, "cut-layer", "rel_l2", tmp_path / "a.html", force=True)
    assert (tmp_path / "a.html").read_text() != "mine"


def test_a_failed_write_leaves_the_old_file(path, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("mine")
    monkeypatch.setattr(module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="No space left"):
        export(path, "cut-layer", "rel_l2", tmp_path / "a.csv", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"] and (tmp_path / "a.csv").read_text() == "mine"


def lacking(*packages: str):
    """`find_spec` of a machine on which these packages are not installed, and all others are."""
    return lambda name: None if name in packages else name


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_an_image_without_any_package_names_them(path, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "find_spec", lacking("kaleido", "matplotlib"))
    with pytest.raises(UsageError) as error:
        export(path, "cut-layer", "rel_l2", tmp_path / f"a.{kind}")
    said = str(error.value)
    assert "kaleido is missing" in said and "pip install 'replayscope[export]'" in said and "\n" not in said
    assert "html, csv and json need no browser" in said
    assert not list(tmp_path.iterdir()), "no zero-byte file"


def test_an_image_without_a_browser_names_the_browser(path, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lacking("matplotlib"))
    told = "Image export using the kaleido engine requires Google Chrome to be installed: Kaleido needs it"
    monkeypatch.setattr(
        "plotly.graph_objects.Figure.to_image", lambda *_, **__: (_ for _ in ()).throw(RuntimeError(told))
    )
    with pytest.raises(UsageError) as error:
        export(path, "cut-layer", "rel_l2", tmp_path / "a.png")
    said = str(error.value)
    assert "no Chrome or Chromium could be started" in said and "\n" not in said
    assert "html, csv and json need no browser" in said
    assert not list(tmp_path.iterdir())


def test_a_real_search_for_a_browser_that_is_not_there(path, tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(UsageError, match="no Chrome" if find_spec("kaleido") else "kaleido is missing"):
        export(path, "cut-layer", "rel_l2", tmp_path / "a.png")


SIGNATURES = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", THERE)
def test_matplotlib_draws_every_figure_where_no_browser_is(path, tmp_path, monkeypatch, caplog, name, dark):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "kaleido" else find_spec(name))
    caplog.set_level("INFO")
    kind = "svg" if dark else "png"
    if find_spec("matplotlib") is None:
        with pytest.raises(UsageError, match="matplotlib"):
            export(path, name, None, tmp_path / f"a.{kind}")
        return
    (out,) = export(path, name, None, tmp_path / f"a.{kind}", dark=dark)
    assert out.read_bytes().startswith(SIGNATURES[kind])
    assert "drawn by matplotlib: the package kaleido is missing" in caplog.text
    if dark:
        assert "#161b1f" in out.read_text() and "#ffffff" not in out.read_text().lower()


@pytest.mark.browser
def test_an_image_is_drawn(path, tmp_path, chromium):
    if find_spec("kaleido") is None:
        with pytest.raises(UsageError, match=r"replayscope\[export\]"):
            export(path, "cut-layer", "rel_l2", tmp_path / "a.png")
        return
    (out,) = export(path, "cut-layer", "rel_l2", tmp_path / "a.svg", dark=True)
    text = out.read_text()
    assert text.startswith("<svg") and "Encoder replay changes" in text and "rgb(22, 27, 31)" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["OTHER", "--figure", "cut-layer"], "a second trace is for --figure compare"),
        (["--figure", "healing", "--layer", "3"], "figure healing has no --layer"),
        (["--figure", "all", "--other-arm", "hit"], "--other-arm is for one figure"),
        (["--figure", "tensor", "--layer", "x"], "--layer"),
        (["--figure", "replay-length"], "--replay W,2W,4W,exact"),
        (["--figure", "tensor", "--metric", "cosine"], "leave --metric cosine out"),
    ],
)
def test_the_command_line_names_what_does_not_fit(path, tmp_path, capsys, words, said):
    words = [str(path) if word == "OTHER" else word for word in words]
    assert cli.main(["plot", str(path), *words, "-o", str(tmp_path / "a.html")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_command_line_goes_down_to_single_values(path, tmp_path, capsys):
    out = tmp_path / "a.csv"
    words = ["--figure", "tensor", "--point", "hidden", "--layer", "2", "--position", "30", "-o", str(out)]
    assert cli.main(["plot", str(path), *words]) == 0
    assert capsys.readouterr().out.split() == [str(out)]
    rows = list(csv.DictReader(out.read_text().splitlines()))
    arm = [row for row in rows if row["panel"] == "arm" and row["position"] == "30"]
    trace = TraceReader(path)
    run = next(run for run in trace.runs if run.arm == "encoder" and (run.index, "layers.2.hidden") in trace.states())
    state = trace.state(run.index, "layers.2.hidden")
    assert [float(row["value"]) for row in arm] == state.values[state.positions == 30][0].tolist()


def test_all_says_what_it_leaves_out_and_how_to_record_it(path, tmp_path, caplog):
    caplog.set_level("INFO")
    export(path, "all", None, tmp_path / "figures")
    assert "figure replay-length left out" in caplog.text and "--replay W,2W,4W,exact" in caplog.text
