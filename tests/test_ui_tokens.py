"""Logits along the suffix, the token strip and the most likely tokens: the trace's numbers, in text that is safe."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from replayscope.inspector.errors import UsageError
from replayscope.inspector.metrics import logits_sums, metric
from replayscope.traces import RunInfo, Tokens, TraceReader, TraceWriter
from replayscope.ui.curves import draw_curves
from replayscope.ui.flips import Flip, logit_rows, top_k
from replayscope.ui.page import figure_json
from replayscope.ui.states import NotRecorded
from replayscope.ui.suffix import MOST_POINTS, _peaks, suffix_chart
from replayscope.ui.tokens import flip_words, plain, token_strip, top_k_table, visible
from tests.memory import memory
from tests.synthetic import synthetic_trace

N, CUT, WINDOW, VOCABULARY = 24, 12, 4, 6
NASTY = ["<script>alert(1)</script>", "a b", "\n", "\t", '"&', "窗", "\udce9", "\x00", "", "</i>"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> TraceReader:
    path = tmp_path_factory.mktemp("tokens") / "t.h5"
    synthetic_trace(path, n_tokens=64, window=8, layers=4, cuts=(4, 24, 40, 63))
    return TraceReader(path)


def raw(path: Path, logits: np.ndarray, changed: np.ndarray, length: int = N) -> TraceReader:
    """A trace with raw logits and no table: `full` and `encoder` at one cut."""
    spans = [[[0, length]]]
    runs = [
        RunInfo(0, "full", "paper", None, None, 0, length, length, WINDOW, exact_in=spans, exact_out=spans),
        RunInfo(
            1, "encoder", "paper", CUT, WINDOW, CUT - WINDOW, length, length, WINDOW, exact_in=[[]], exact_out=[[]]
        ),
    ]
    ids = np.arange(length) % VOCABULARY
    with TraceWriter(path, force=True) as out:
        out.header(config={}, provenance={"dtype": "float32"},
                   tokens=Tokens(ids, [NASTY[i % len(NASTY)] for i in range(length)]))  # fmt: skip
        out.runs(runs)
        out.state(0, "logits", np.arange(length), logits, "float32")
        out.state(1, "logits", np.arange(CUT - WINDOW, length), changed[CUT - WINDOW :], "float32")
    return TraceReader(path)


@pytest.fixture(scope="module")
def values() -> tuple[np.ndarray, np.ndarray]:
    logits = np.random.default_rng(1).normal(size=(N, VOCABULARY)).astype(np.float32)
    changed = logits.copy()
    logits[15], changed[15] = [3, 2.5, 0, 0, 0, 0], [2, 2.5, 0, 0, 0, 0]
    logits[18], changed[18] = [1, 1, 0, 0, 0, 0], [1, 1.25, 0, 0, 0, 0]
    changed[20, 0] += 0.1
    return logits, changed


class NoTables(TraceReader):
    """A trace that was compared with `full`, of which nothing was kept but raw states."""

    def references(self):
        return ["full"]

    def points(self, reference):
        return ["hidden"]


def test_the_curve_is_the_row_table(trace):
    run = next(run for run in trace.runs if run.arm == "encoder" and run.cut == 24)
    made = suffix_chart(trace, run.index)
    rows = trace.rows("full", "logits", run.index)
    replayed, suffix = made.curves
    assert replayed.label == "replayed rows" and suffix.label == "suffix"
    np.testing.assert_array_equal(np.r_[replayed.x, suffix.x], rows.position)
    np.testing.assert_array_equal(np.r_[replayed.y, suffix.y], metric(rows, "kl")[0])
    assert replayed.x[-1] == 23 and made.marks[0][:2] == (24.0, "cut H 24, then the suffix")
    flipped = rows.position[rows.arrays["flips"][0] > 0]
    assert [x for x, _, _ in made.flips] == flipped.tolist() and len(flipped)
    json.loads(figure_json(draw_curves(made)), parse_constant=lambda literal: pytest.fail(f"{literal} is no JSON"))


def test_raw_logits_stand_in_for_rows(tmp_path, values):
    logits, changed = values
    raw(tmp_path / "t.h5", logits, changed)
    trace = NoTables(tmp_path / "t.h5")
    rows = logit_rows(trace, trace.runs[1])
    expected = logits_sums(changed[8:], logits[8:], np.array([*range(9, N), -1]) % VOCABULARY)["kl"]
    np.testing.assert_allclose(rows.value["kl"], expected)
    assert [(flip.position, flip.margin) for flip in rows.flips] == [(15, 0.5), (18, 0.0)]


def test_the_most_likely_tokens_of_both_sides(tmp_path, values):
    trace = raw(tmp_path / "t.h5", *values)
    top = top_k(trace, trace.runs[1], 15, k=2)
    assert [(c.token, c.ref_rank, c.arm_rank) for c in top.candidates] == [(0, 1, 2), (1, 2, 1)]
    weights = np.exp([3, 2.5, 0, 0, 0, 0])
    assert top.candidates[0].ref_p == pytest.approx(weights[0] / weights.sum())
    assert (top.flipped, top.ref_margin, top.arm_margin, top.follows) == (True, 0.5, 0.5, 16 % VOCABULARY)
    assert top.noise is None and top.inside is None
    assert not top_k(trace, trace.runs[1], 20).flipped
    assert top_k(trace, trace.runs[1], N - 1).follows is None
    html = top_k_table(trace, 15, 1)
    assert "margin 0.5 logits" in html and "Record repeat, rechunk or hit as well" in html
    assert "out of a tie" in top_k_table(trace, 18, 1) and "is the same" in top_k_table(trace, 20, 1)
    with pytest.raises(UsageError, match="no logits at position 3"):
        top_k(trace, trace.runs[1], 3)


@pytest.mark.parametrize(
    ("margin", "noise", "inside", "words"),
    [
        (0.5, 1e-3, False, "beyond the 0.001"),
        (5e-4, 1e-3, True, "within the 0.001"),
        (0.0, None, None, "of a tie"),
        (0.5, None, None, "no noise run"),
        (None, 1e-3, None, "--hooks logits"),
    ],
)
def test_a_flip_lies_within_the_noise_or_not(margin, noise, inside, words):
    flip = Flip(3, margin, noise)
    assert flip.inside is inside and words in flip_words(flip)


def test_the_noise_of_a_gap_is_twice_what_noise_moves_a_logit_by():
    trace = memory()
    table = trace.table("full", "logits")
    b = table.bucket("all")
    for run in trace.runs:
        if run.arm in ("repeat", "rechunk", "hit"):
            table.arrays["max_abs"][run.index] = 0
    table.arrays["max_abs"][trace.run("rechunk"), 0, b] = 0.25
    from replayscope.ui.flips import gap_noise

    assert gap_noise(trace, trace.runs[trace.run("encoder")]) == 0.5  # type: ignore[arg-type]


def test_what_was_not_kept_is_said_with_the_option():
    with pytest.raises(NotRecorded, match="--rows or --hooks logits"):
        suffix_chart(memory())  # type: ignore[arg-type]


def test_a_stored_row_of_logits_is_asked_for(trace):
    run = next(run for run in trace.runs if run.arm == "encoder" and run.cut == 4)
    with pytest.raises(NotRecorded, match="--hooks 'logits'"):
        top_k(trace, run, 20)


class Balanced(HTMLParser):
    """Collects text and tags, and fails on an end without a beginning."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_strip_shows_white_space_and_nothing_of_a_token_is_markup(tmp_path, values):
    raw(tmp_path / "t.h5", *values)
    trace = NoTables(tmp_path / "t.h5")
    html = token_strip(trace, 1)
    page = Balanced()
    page.feed(html)
    assert not page.open and page.tags <= {"div", "i", "b", "br", "span"}
    assert "<script>alert(1)</script>" in page.text, "shown as text"
    for words in ("a·b", "↵", "⇥", "␦", "∅", "窗", "H 12", "s 8"):
        assert words in page.text
    assert html.count("flip") >= 2 and html.index("s 8") < html.index("H 12")
    assert len(re.findall(r'class="cached"', html)) == 8 + 1, "the tokens before s, and the key"
    html.encode()


def test_the_strip_of_two_thousand_tokens_is_quick(tmp_path):
    length = 2000
    logits = np.random.default_rng(0).normal(size=(length, VOCABULARY)).astype(np.float32)
    changed = logits + np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
    raw(tmp_path / "t.h5", logits, changed, length)
    trace = NoTables(tmp_path / "t.h5")
    rows_alone = time.process_time()
    logit_rows(trace, trace.runs[1])
    rows_alone = time.process_time() - rows_alone
    began = time.process_time()
    html = token_strip(trace, 1)
    # Making the HTML costs less than reading and comparing the rows, which it has to do as well.
    assert time.process_time() - began < 2 * rows_alone + 0.1
    assert len(html) < 400 * length


def test_every_peak_survives_in_a_long_curve():
    value = np.full(100_000, 1e-6)
    value[[12_345, 99_999]] = 1.0
    keep = _peaks(value, [777], np.arange(100_000))
    assert len(keep) <= MOST_POINTS + 3 and {0, 777, 12_345, 99_999} <= set(keep.tolist())
    assert (np.diff(keep) > 0).all()


def test_tokens_in_files_are_plain():
    assert plain("a b") == "a b" and plain("\udce9\n") == "\\udce9\\n"
    assert visible(" a ") == "·a·"
