"""Commands that read a trace, on a synthetic one: what they print, what they write, what they refuse."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from replayscope.inspector import cli
from tests.synthetic import synthetic_trace

WHO = ("--engine", "e", "--engine-version", "1", "--engine-commit", "c")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Two traces of the same prompt; the second has other numbers."""
    folder = tmp_path_factory.mktemp("traces")
    for name, seed in (("a.h5", 0), ("b.h5", 1)):
        synthetic_trace(folder / name, n_tokens=40, layers=3, cuts=(9, 24), seed=seed)
    return folder


@pytest.fixture
def run(traces, monkeypatch, capsys):
    """Run words in the folder of the traces: (exit code, stdout, stderr)."""
    monkeypatch.chdir(traces)

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(words)
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def test_show(run):
    code, out, err = run("show", "a.h5")
    assert (code, err) == (0, "") and "broken:floor@2" in out and "40 tokens" in out
    code, out, _ = run("show", "a.h5", "--json", "--verify")
    assert code == 0
    assert json.loads(out)["tokens"] == 40 and json.loads(out)["faults"] == []


def test_compare_with_itself_is_identical_and_with_another_is_over_its_tolerance(run):
    tolerance = "*=rel_l2<=0"
    code, out, _ = run("compare", "a.h5", "a.h5", "--tol", tolerance)
    assert code == 0 and "identical" in out
    code, out, _ = run("compare", "a.h5", "b.h5", "--json")
    assert code == 0 and any(row["metrics"].get("rel_l2") for row in json.loads(out)["rows"])
    code, out, _ = run("compare", "a.h5", "b.h5", "--tol", tolerance)
    assert code == 1 and "OVER" in out


@pytest.mark.parametrize("ending", ["html", "csv", "json"])
def test_plot_writes_one_file_and_says_which(ending, run, tmp_path):
    out = tmp_path / f"f.{ending}"
    words = ("plot", "a.h5", "--figure", "cut-layer", "--metric", "rel_l2", "-o", str(out))
    assert run(*words) == (0, f"{out}\n", "")
    kept = out.read_bytes()
    assert kept
    code, _, err = run(*words)
    assert code == 2 and "--force" in err and out.read_bytes() == kept
    assert run(*words, "--force")[0] == 0


def test_plot_all_into_a_folder(run, tmp_path):
    code, out, _ = run("plot", "a.h5", "--json", "-o", str(tmp_path / "figures"))
    written = json.loads(out)["written"]
    assert code == 0 and len(written) == len(list((tmp_path / "figures").iterdir())) > 1


def test_plot_tells_what_it_leaves_out_once_it_has_drawn_the_rest(run, tmp_path):
    _, _, said = run("plot", "a.h5", "-o", str(tmp_path / "all"))
    assert "figure replay-length left out: " in said
    code, _, err = run("plot", "a.h5", "-o", str(tmp_path / "all"))
    assert (code, err.count("\n")) == (2, 1) and "exists; add --force" in err


def test_plot_passes_on_what_a_figure_can_be_told(run, tmp_path):
    out = tmp_path / "f.json"
    words = ("--point", "hidden", "--region", "suffix", "--arm", "encoder", "--reference", "full")
    code, _, err = run("plot", "a.h5", "--figure", "cut-layer", *words, "-o", str(out))
    assert code == 0, err
    assert "hidden" in out.read_text()
    assert run("plot", "a.h5", "--figure", "logits-kl", "--arm", "encoder", "-o", str(tmp_path / "l.csv"))[0] == 0


def test_report(run, tmp_path):
    out = tmp_path / "r.html"
    assert run("report", "a.h5", "-o", str(out)) == (0, f"{out}\n", "")
    assert "<html" in out.read_text(encoding="utf-8")
    assert run("report", "a.h5", "-o", str(out))[0] == 2
    assert run("report", "a.h5", "b.h5", "-o", str(out), "--force")[0] == 0


@pytest.mark.parametrize("out", ["", "-", "."])
@pytest.mark.parametrize("typed", ["plot a.h5", "plot a.h5 --figure reach", "report a.h5", "record", "sweep", "demo"])
def test_an_output_without_a_name_is_refused(typed, out, run, traces):
    before = sorted(traces.iterdir())
    code, _, err = run(*typed.split(), "-o", out)
    assert (code, err.count("\n")) == (2, 1) and "-o needs a name" in err
    assert sorted(traces.iterdir()) == before


@pytest.mark.parametrize(
    ("typed", "out"),
    [
        ("import a.h5 --format vllm-hidden --map v41 --against OUT", "kept.h5"),
        ("import a.h5 --format vllm-hidden --map v41 --against kept.h5.partial", "kept.h5"),
        ("import OUT --format vllm-hidden --map v41 --against a.h5", "kept.h5"),
        ("import a.h5 --format vllm-hidden --map OUT --against a.h5", "kept.h5"),
        ("import a.h5 --format vllm-hidden --map v41 -m mini -p @OUT", "kept.h5"),
        ("record -p @OUT", "kept.h5"),
        ("sweep -p @OUT", "kept.h5"),
        ("plot OUT --figure cut-layer", "kept.html"),
        ("plot a.h5 OUT --figure compare", "kept.html"),
        ("plot OUT", "kept.html"),
        ("plot OUT --figure all", "."),
        ("report a.h5 OUT", "kept.html"),
    ],
)
@pytest.mark.parametrize("spelling", ["same", "dots", "symbolic", "hard"])
def test_output_over_what_is_read_is_refused_under_any_name_and_with_force(
    spelling, typed, out, run, traces, tmp_path, monkeypatch
):
    shutil.copy(traces / "a.h5", tmp_path / "a.h5")
    (tmp_path / "folder").mkdir()
    # In a folder each figure has a name of its own.
    held = tmp_path / "folder" / ("reach.html" if out == "." else out)
    shutil.copy(traces / "a.h5", held)
    shutil.copy(traces / "b.h5", tmp_path / "folder" / "kept.h5.partial")
    before, asked = held.read_bytes(), str(held)
    monkeypatch.chdir(tmp_path)
    target = "folder" if out == "." else str(held)
    if spelling == "dots":
        asked = f"folder/../folder/{held.name}"
    elif spelling != "same" and ".partial" not in typed:
        asked = f"link{held.suffix}"
        (os.symlink if spelling == "symbolic" else os.link)(held, asked)
    typed = typed.replace("OUT", asked).replace("kept.h5.partial", "folder/kept.h5.partial")
    words = [*typed.split(), *(WHO if typed.startswith("import") else ()), "-o", target, "--force"]
    files = sorted(tmp_path.rglob("*"))
    code, told, err = run(*words)
    assert (code, told, err.count("\n")) == (2, "", 1) and "which this command reads; give another -o" in err, err
    assert sorted(tmp_path.rglob("*")) == files and held.read_bytes() == before


BAD = {
    "figure": (["plot", "a.h5", "--figure", "cut-laier", "-o", "f.csv"], "did you mean 'cut-layer'"),
    "metric": (["plot", "a.h5", "--metric", "rel_l3", "-o", "f.html"], "did you mean 'rel_l2'"),
    "point": (["plot", "a.h5", "--figure", "reach", "--point", "hiden", "-o", "f.csv"], "did you mean 'hidden'"),
    "no such setting": (["plot", "a.h5", "--figure", "reach", "--region", "all", "-o", "f.csv"], "has no --region"),
    "setting for all": (["plot", "a.h5", "--point", "hidden", "-o", "f.html"], "name it with --figure"),
    "run": (["plot", "a.h5", "--figure", "position-layer", "--run", "x", "-o", "f.csv"], "--run 'x'"),
    "no ending": (["plot", "a.h5", "--figure", "reach", "-o", "f"], "no ending"),
    "folder with an ending": (["plot", "a.h5", "-o", "figures.v2"], "valid endings"),
    "report's ending": (["report", "a.h5", "-o", "a.txt"], "ends in .html"),
    "report without one": (["report", "a.h5", "-o", "a"], "ends in .html"),
    "ending": (["plot", "a.h5", "--figure", "reach", "-o", "f.bmp"], "valid endings"),
    "tolerance": (["compare", "a.h5", "b.h5", "--tol", "*=rel_l3<=1"], "did you mean 'rel_l2'"),
    "tolerance form": (["compare", "a.h5", "b.h5", "--tol", "1e-3"], "cannot be read"),
    "tolerance point": (["compare", "a.h5", "b.h5", "--tol", "layers.9.hidden=rel_l2<=1"], "unknown hook point"),
    "second trace": (["compare", "a.h5", "c.h5"], "no trace c.h5"),
    "foreign file": (["show", "notes.txt"], "notes.txt is not an HDF5 file; give a file that record, sweep or import"),
    "empty file": (["show", "empty.h5"], "empty.h5 is empty (0 bytes); copy or record it again"),
    "torn file": (["show", "torn.h5"], "torn.h5 is truncated: the file ends before its data; copy or record it again"),
    "page of no trace": (["ui", "notes.txt"], "notes.txt is not an HDF5 file; give a file"),
    "all figures as csv": (["plot", "a.h5", "-o", "f.csv"], "csv holds one figure; name one with --figure"),
    "all figures as an image": (["plot", "a.h5", "--figure", "all", "-o", "f.png"], "png holds one figure"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2(case, run, traces):
    (traces / "notes.txt").write_text("not a trace")
    (traces / "empty.h5").touch()
    (traces / "torn.h5").write_bytes((traces / "a.h5").read_bytes()[:5000])
    before = sorted(traces.iterdir())
    words, says = BAD[case]
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("replayscope: ") and says in err and "internal error" not in err
    assert sorted(traces.iterdir()) == before


@pytest.mark.parametrize(
    "typed", ["show a.h5", "compare a.h5 a.h5", "plot a.h5 --figure cut-layer -o FILE.html", "list figures"]
)
def test_reading_a_trace_loads_no_torch(typed, traces, tmp_path):
    script = (
        "import sys\nfrom replayscope.inspector.cli import main\ncode = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    words = [word.replace("FILE", str(tmp_path / "f")) for word in typed.split()]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=traces, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_readable_copy_needs_nothing_but_itself(run, traces, tmp_path):
    shutil.copy(traces / "a.h5", tmp_path / "moved.h5")
    assert run("show", str(tmp_path / "moved.h5"))[0] == 0
