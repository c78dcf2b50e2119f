"""The pages on the embedded models say what was measured: every table is the one that the stored numbers give."""

import copy
import re
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import findings_text


@pytest.fixture(scope="module")
def made():
    return findings_text.tables(*findings_text.measured())


@pytest.mark.parametrize("page", findings_text.PAGES)
def test_tables_are_those_of_the_stored_numbers(page, made):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert findings_text.written(text, made) == text


def test_a_number_that_was_not_measured_is_seen(made):
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    findings, scores = findings_text.measured()
    planted = copy.deepcopy(findings)
    planted[0]["hits"][0]["kl"]["median"] *= 1.5
    assert findings_text.written(page, findings_text.tables(planted, scores)) != page


def test_every_table_is_shown_somewhere(made):
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in findings_text.PAGES)
    assert set(re.findall(r"<!-- table: (.*?) -->", pages)) == set(made)


def test_intervals_are_wilsons():
    # Reference values: Newcombe 1998, Statistics in Medicine 17:857, table I.
    assert findings_text.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert findings_text.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert findings_text.wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_what_is_lost_is_told_by_a_larger_divergence():
    import findings

    told = findings.predicts([3.0, 2.0], [1.0, 2.0])
    # Of four pairs three are won and one is a tie.
    assert (told["share"], told["least"], told["most"]) == (0.875, 2.0, 2.0)
    assert told["low"] <= told["share"] <= told["high"]
    assert findings.predicts([1.0], [2.0])["share"] == 0.0
    assert findings.predicts([], [2.0])["share"] is None
    assert findings.predicts([2.0], [])["most"] is None


def test_the_figures_draw_what_was_measured():
    from findings_figures import figures

    findings, _ = findings_text.measured()
    for name, figure in figures(findings).items():
        drawn = [t for t in figure.data if t.mode == "lines+markers"]
        assert len(drawn) >= len(findings), name
