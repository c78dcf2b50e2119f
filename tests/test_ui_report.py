"""The report: one file, everything in it, readable without a network and without a mouse."""

import re
from pathlib import Path

import pytest

from replayscope.inspector.errors import UsageError
from replayscope.inspector.verdict import verdict
from replayscope.traces import TraceError, TraceReader
from replayscope.ui import story
from replayscope.ui.flips import logit_rows
from replayscope.ui.report import figures, render, report
from replayscope.ui.series import run_of
from tests.memory import memory
from tests.synthetic import Plant, synthetic_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "t.h5"
    synthetic_trace(path, n_tokens=64, window=8, layers=4, cuts=(4, 8, 9, 24, 40))
    return path


def test_everything_is_in_one_file(path, tmp_path):
    out = report(path, tmp_path / "r.html")
    text = out.read_text()
    assert text.count('id="plotly"') == 1 and out.stat().st_size < 3_000_000
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    for words in ("Encoder replay changes the window KV", "Noise floor", "Arms", "Provenance", "oracle:encoder",
                  "weights sha256", "Where runs go wrong first", "t.h5 · synthetic · N 64 · W 8 · paper"):  # fmt: skip
        assert words in text, f"{words} is missing"
    assert text.count('data-figure="') == len(figures(TraceReader(path))) == 7
    assert report(path, tmp_path / "again.html").read_bytes() == out.read_bytes()


def test_flips_and_their_tokens_stand_in_it(path):
    text = render([TraceReader(path)])
    rows = logit_rows(TraceReader(path), run_of(TraceReader(path)))
    after = [flip for flip in rows.flips if flip.position >= rows.info.cut]
    assert "The text, token by token" in text and f'<b class="cut">H {rows.info.cut}</b>' in text
    assert text.count("beyond the noise</td>") + text.count("within the noise</td>") == len(after) > 0
    stored = (rows.info.index, "logits") in TraceReader(path).states()
    assert text.count('class="rs-topk"') == (min(3, len(after)) if stored else 0)


def test_several_traces_share_one_library(path, tmp_path):
    other = tmp_path / "other.h5"
    synthetic_trace(other, n_tokens=48, window=8, layers=3, cuts=(24,))
    text = render([TraceReader(path), TraceReader(other)])
    assert text.count('id="plotly"') == 1 and "other.h5 · synthetic" in text
    assert sorted(re.findall(r'data-figure="(\d+)"', text), key=int) == [str(i) for i in range(14)]


def test_nothing_is_lost(path, tmp_path):
    (tmp_path / "r.html").write_text("mine")
    with pytest.raises(TraceError, match="--force"):
        report(path, tmp_path / "r.html")
    with pytest.raises(UsageError, match="no folder"):
        report(path, tmp_path / "no" / "r.html")
    for name in ("r", "r.txt", "r.html.bak"):
        with pytest.raises(UsageError, match=r"ends in \.html"):
            report(path, tmp_path / name)
    with pytest.raises(UsageError, match="at least one"):
        render([])
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_a_clean_trace_says_so():
    text, tone = story.headline(memory(), verdict(memory()))
    assert text.startswith("No bug: every arm follows its own semantics, and the planted fault is found.")
    assert "by design, median" in text and tone == "good"


def test_a_bug_is_named_first():
    trace = memory(Plant("encoder", 24, "attn_out", 1, 30, 0.5))
    text, tone = story.headline(trace, verdict(trace))
    assert (
        text.startswith("Bug: encoder at cut 24 goes wrong first in layers.1.attn_out at position 30") and tone == "bug"
    )
    assert story.tiles(trace, verdict(trace))[0].value == "1 run"
    titles = [figure.layout.meta["title"] for figure in figures(trace)]
    assert any(title.startswith("Bug: ") for title in titles), "the arm with the bug is drawn against its oracle"


def test_a_fault_that_is_missed_takes_the_verdict_away():
    trace = memory()
    for (reference, _), table in trace.tables.items():
        if reference == "oracle":
            for array in table.arrays.values():
                array[trace.run("broken:floor@2")] = array[trace.run("encoder")]
    text, tone = story.headline(trace, verdict(trace))
    assert "was not found: no verdict stands" in text and tone == ""


def test_without_a_precision_for_it_there_is_no_claim():
    trace = memory(dtype="bfloat16")
    text, tone = story.headline(trace, verdict(trace))
    assert text.startswith("No claim of a bug from this trace.") and tone == ""
    assert story.tiles(trace, verdict(trace))[0].value == "no claim"
    assert "allows no claim" in story.overview(trace, verdict(trace))
