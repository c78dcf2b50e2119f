"""The tab Judge without a browser: results and contracts of the root, judged apart, hostile ones told in one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from replayscope.inspector import judge_text
from replayscope.inspector.errors import UsageError
from replayscope.inspector.judge_verdict import judge
from replayscope.ui import judged, judging, tab_judge
from replayscope.ui.judge_charts import drop_chart, kl_chart
from replayscope.ui.library import Library
from replayscope.ui.view import Choice
from tests import judging as made_up
from tests.visitor import Visitor

AT = "passkey.straddle/n320/suffix-short/out-short/x8"
BOTH = f"{AT}/both/paper/task"


def narrow(group: str, run: str, i: int) -> dict:
    """Ten prompts of sixty get worse in one cell, and nothing anywhere else."""
    return made_up.good(group, run, i) | ({"exact": i >= 10} if f"{group}/{run}" == BOTH else {})


def said_of(outcome=made_up.good, **header) -> dict:
    asked = made_up.contract()
    return judge_text.data(judge(made_up.results(asked, outcome, header), asked))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / ".hidden"
    folder.mkdir()
    asked = made_up.contract()
    source = {"made": {"source": f"{folder}/made.toml"}}
    made_up.write(folder / "narrow.jsonl", made_up.results(asked, narrow, source))
    (folder / "strict.toml").write_text(made_up.CONTRACT.replace("at_most = 0.1", "at_most = 0.001"))
    (folder / "project.toml").write_text("[project]\nname = 'no contract'\n")
    (folder / "other.jsonl").write_text('{"name": "no results"}\n')
    return folder


@pytest.fixture
def root(tmp_path, folder) -> Path:
    for path in folder.iterdir():
        os.link(path, tmp_path / path.name)
    return tmp_path


def shown(root: Path, results: str = "", contract: str = "") -> dict:
    return tab_judge.content(Library(root), Choice("", results=results, contract=contract))


def test_the_newest_results_are_judged_under_the_contract_they_began_with(folder):
    found = shown(folder)
    assert [name for name, _ in found["results"].options] == ["narrow.jsonl"], "only what judge run wrote is listed"
    assert [name for _, name in found["contract"].options] == ["", "default", "strict.toml"]
    assert "Accept decoder replay only: 1 of 14 cells fails, 0 open" in found["judge_story"]
    order = found["judge_story"].index("both replays off"), found["judge_story"].index("decoder replay alone")
    assert order == tuple(sorted(order))
    assert (
        f"--cells {BOTH} -o cell.jsonl" in found["judge_details"] and "success drops by 16.7%" in found["judge_details"]
    )
    assert "By cut" in found["judge_details"] and "By output" not in found["judge_details"], "one output is no table"
    assert "judge run made.toml" in found["judge_details"], "of a path that was typed here the folder is left out"
    assert str(folder) not in json.dumps(found, default=str)
    assert json.loads(found["header"])["address"] == "?tab=judge&reference=full&point=window_kv&region=window" \
        "&metric=rel_l2&results=narrow.jsonl"  # fmt: skip
    for part in ("judge_drop", "judge_kl"):
        assert json.loads(found[part])["data"]


def test_another_contract_judges_again_and_says_so(folder):
    found = shown(folder, "narrow.jsonl", "strict.toml")
    assert found["contract"].value == "strict.toml" and "it may know their outcome" in found["judge_story"]
    assert "Refuse: 14 of 14 cells fail" in found["judge_story"]
    shipped = shown(folder, "narrow.jsonl", "default")
    assert "cells of the contract did not run" in shipped["judge_story"]


@pytest.mark.parametrize(
    "name", ["../secret.jsonl", "/etc/passwd", "link.jsonl", "narrow.toml", "a\0.jsonl", "x" * 300]
)
def test_nothing_outside_the_root_is_judged(root, name):
    """The twin: the same file under a name of the root is."""
    (root.parent / "secret.jsonl").write_bytes((root / "narrow.jsonl").read_bytes())
    (root / "link.jsonl").symlink_to(root.parent / "secret.jsonl")
    found = shown(root, name)
    assert "rs-empty" in found["judge_story"] and found["judge_drop"] == found["judge_details"] == ""
    assert str(root.parent) not in json.dumps(found, default=str) and "link.jsonl" not in dict(found["results"].options)
    assert "Accept decoder" not in found["judge_story"]
    bad = shown(root, "narrow.jsonl", name.replace(".jsonl", ".toml") if name != "narrow.toml" else "missing.toml")
    assert "rs-empty" in bad["judge_story"] and str(root.parent) not in json.dumps(bad, default=str)


HEADER = '{"kind":"replayscope judge results","schema":1'
HOSTILE = {
    "no header": "[]\n",
    "no contract": HEADER + "}\n",
    "no text": HEADER + ',"contract":{"sha256":3}}\n',
    "no toml": HEADER + ',"contract":{"sha256":"","name":"","frozen":null,"text":"= <b>"}}\n',
    "deep": HEADER + ',"x":' + "[" * 100_000 + "\n",
    "no runs": '{"kind":"prompt"}',
    "odd numbers": '{"kind":"prompt","group":"a/b/c/d/e","seed":0,"runs":[{"run":"full","exact":"x"},{"run":"a/b/c"}]}',
    "another schema": HEADER.replace(":1", ":2") + "}\n",
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_file_of_a_stranger_becomes_one_line(root, fault):
    """The twin is the first test: the same header with sound lines below it is judged."""
    text, (first, *_) = HOSTILE[fault], (root / "narrow.jsonl").read_text().split("\n")
    (root / "odd.jsonl").write_text(f"{first}\n{text}\n" if text.startswith('{"kind":"prompt"') else text)
    found = shown(root, "odd.jsonl")
    said = found["judge_story"]
    assert said.count("rs-empty") == 1 and "odd.jsonl" in said and "\n" not in said and "<b>" not in said
    assert "Error" not in said and "Traceback" not in said and found["judge_drop"] == ""


def test_a_judgement_that_takes_too_long_or_is_too_large_is_given_up(root, monkeypatch):
    monkeypatch.setattr(judging, "_SECONDS", 0.01)
    assert "took more than" in shown(root, "narrow.jsonl")["judge_story"]
    monkeypatch.setattr(judging, "_SECONDS", 120.0)
    monkeypatch.setattr(judging, "_LARGEST", 1000)
    assert "too many for a page" in shown(root, "narrow.jsonl")["judge_story"]
    monkeypatch.setattr(judging, "_LARGEST", 1 << 30)
    monkeypatch.setattr(judging, "_MEMORY", 1 << 20)
    assert "rs-empty" in shown(root, "narrow.jsonl")["judge_story"], "without memory there is a line as well"
    monkeypatch.setattr(judging, "_MEMORY", 4 << 30)
    assert "Accept decoder" in shown(root, "narrow.jsonl")["judge_story"], "and nothing of it was kept"


def test_the_tab_needs_no_trace_and_keeps_its_choice(folder):
    visitor = Visitor(folder, "?tab=judge&contract=strict.toml")
    assert visitor.new["note"] == "" and visitor.choice.trace == "" and visitor.choice.contract == "strict.toml"
    assert json.loads(visitor.new["header"])["subtitle"] == "narrow.jsonl"
    assert "No traces here yet" in visitor.do(nav="overview")["note"]


def test_without_results_the_tab_says_how_to_make_some(tmp_path):
    assert "judge run default" in shown(tmp_path)["judge_story"]
    with pytest.raises(UsageError, match="choose"):
        judging.judgement(Library(tmp_path), "none.jsonl")


def test_every_cell_stands_in_the_figure_with_its_interval():
    said = said_of(narrow)
    chart = drop_chart(said)
    bars = {curve.label: curve for curve in chart.curves if not curve.listed}
    assert {name: np.isnan(bar.y).sum() for name, bar in bars.items()} == {"pass": 13, "fail": 1}
    cell = next(cell for cell in said["cells"] if cell["cell"] == BOTH)
    np.testing.assert_allclose(bars["fail"].y[:2], [100 * cell["drop"][0], 100 * cell["drop"][2]])
    assert BOTH.split("/")[-1] in bars["fail"].hover[0] and chart.limits == ((5.0, "budget 5 %"),)
    assert chart.title == "1 cell of 14 drops by more than the budget"
    assert drop_chart(said_of()).title == "No cell is shown to drop by more than the budget"
    places = np.concatenate([curve.x for curve in bars.values()])
    assert len({*places[~np.isnan(places)]}) == 14, "no two cells stand on one another"


def test_kl_stands_at_its_cut():
    def louder(group, run, i):
        return made_up.good(group, run, i) | ({"kl": [0.4] * 4} if f"{group}/{run}" == BOTH else {})

    chart = kl_chart(said_of(louder))
    assert chart.title.startswith("KL is largest at the cut task: 0.4 nats a token with both")
    assert [text for _, text in chart.ticks] == ["task-1", "task", "task+1", "none"]
    curve = next(curve for curve in chart.curves if curve.label == "both")
    assert np.nanargmax(curve.y) == 1 and curve.y[1] == pytest.approx(0.4) and np.isnan(curve.y[3])
    assert dict(chart.limits) == {0.1: "mean kl ≤ 0.1"}


OPEN = {"cell": "group/both/paper/task", "state": "open", "control": False}


@pytest.mark.parametrize(
    ("changed", "words", "tone"),
    [
        ({"verdict": "accept"}, "Accept: 14 cells", "good"),
        ({"verdict": "refuse"}, "Refuse: 1 of 14 cells fails", "bug"),
        ({"verdict": "not enough evidence", "cells": [OPEN]}, "Not enough evidence: 1 of 1 cell", ""),
        (
            {"verdict": "not enough evidence", "reasons": ["9 cells did not run"]},
            "Not enough evidence: 9 cells did not run.",
            "",
        ),
        ({"verdict": "refuse", "cells": []}, "Refuse: the service needs", "bug"),
    ],
)
def test_each_verdict_is_one_sentence(changed, words, tone):
    text, meant = judged.headline(said_of(narrow) | changed)
    assert text.startswith(words) and meant == tone
