"""Runs started from the page: the form as a command line, one run at a time, and how one ends."""

import time
from dataclasses import replace

import pytest

from replayscope.inspector.errors import UsageError
from replayscope.inspector.parser import build_parser
from replayscope.traces import TraceReader
from replayscope.ui.form import Form, asking, command, free_name, model_names
from replayscope.ui.jobs import MOST_WAITING, Job, Jobs
from replayscope.ui.tab_run import told

FORM = Form("mini", "prose", "", "48", "grid", "W", "8", ["paper"], "fp32", False, False, "one")


@pytest.fixture
def jobs(tmp_path):
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.close()


def wait(jobs: Jobs, id_: str, until=lambda job: job.over) -> Job:
    began = time.monotonic()
    while time.monotonic() - began < 120:
        job = jobs.get(id_)
        assert job is not None
        if until(job):
            return job
        time.sleep(0.05)
    raise AssertionError(f"still {job}")


def test_a_form_becomes_a_command_line(tmp_path):
    one = command(replace(FORM, cuts="8,16", audit=True, precision="fp64", rows=True), tmp_path)
    assert one.out == "one.h5" and one.text == ""
    typed = build_parser()[0].parse_args(one.words)
    assert (typed.model, typed.cuts, typed.suffix, typed.tokens) == ("mini", "8,16", 8, 48)
    assert typed.audit and typed.rows and typed.dtype == "fp64" and typed.prompt.value == "prose"
    assert build_parser()[0].parse_args(asking(one).words).max_bytes == 1
    own = command(replace(FORM, sample="own text", text="@/etc/passwd"), tmp_path)
    assert own.text == "@/etc/passwd" and build_parser()[0].parse_args(own.words).prompt.kind == "stdin"
    ids = command(replace(FORM, sample="own text", text="ids:1,2,3"), tmp_path)
    assert ids.text == "" and build_parser()[0].parse_args(ids.words).prompt.kind == "ids"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "/etc"}, "model"),
        ({"model": ".."}, "model"),
        ({"sample": "@/etc/passwd"}, "text"),
        ({"sample": "own text", "text": "  "}, "empty"),
        ({"sample": "own text", "text": "ids:1,x"}, "token id"),
        ({"cuts": "--force"}, "cut"),
        ({"cuts": "1:2:3:4"}, "cut"),
        ({"replay": "0x"}, "replay"),
        ({"suffix": "-1"}, "suffix"),
        ({"tokens": "many"}, "tokens"),
        ({"semantics": ["papr"]}, "semantics"),
        ({"precision": "fp8"}, "precision"),
        ({"audit": True, "precision": "bf16"}, "audit"),
        ({"name": "../x"}, "plain name"),
        ({"name": "-o"}, "plain name"),
        ({"name": ""}, "plain name"),
        ({"name": "there"}, "already"),
        ({"model": None}, "model"),
    ],
)
def test_a_form_that_cannot_be_run_is_refused_in_one_line(tmp_path, change, said):
    (tmp_path / "there.h5").touch()
    with pytest.raises(UsageError, match=said) as error:
        command(replace(FORM, **change), tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)


def test_models_are_the_presets_and_folders_of_the_root(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    names = model_names(tmp_path)
    assert "mini" in names and names[-1] == "tiny"
    assert free_name(tmp_path) == "run-1"
    (tmp_path / "run-1.h5").touch()
    assert free_name(tmp_path) == "run-2"
    (tmp_path / "run-2.h5.partial").touch()
    assert free_name(tmp_path) == "run-3"


def test_a_run_is_asked_for_its_cost_then_run_and_its_trace_is_there(jobs, tmp_path):
    one = command(FORM, tmp_path)
    ask = asking(one)
    cost = wait(jobs, jobs.submit(ask.words, ask.out, ask.text))
    assert cost.phase == "done" and "runs" in cost.estimate and "MB" in cost.estimate, cost
    assert list(tmp_path.iterdir()) == [], "the question writes nothing"
    assert "The cost" in told(cost) and "href" not in told(cost)
    done = wait(jobs, jobs.submit(one.words, one.out, one.text))
    assert done.phase == "done" and done.total > 0 and done.done == done.total, done
    assert TraceReader(tmp_path / "one.h5").complete and "?trace=one.h5" in told(done)
    assert jobs.busy() == 0


def test_one_runs_the_others_wait_and_a_cancelled_one_leaves_nothing(jobs, tmp_path):
    long = command(replace(FORM, tokens="2000", cuts="all", suffix="all", name="long"), tmp_path)
    first = jobs.submit(long.words, long.out, long.text)
    second = jobs.submit(("list", "models"), "none.h5")
    third = jobs.submit(("list", "nothing"), "none.h5")
    wait(jobs, first, lambda job: job.phase == "running")
    assert jobs.get(second).ahead == 1 and jobs.get(third).ahead == 2 and jobs.busy() == 3
    (tmp_path / f"{long.out}.resume").touch()  # as a run that takes longer keeps it
    jobs.cancel(first)
    assert jobs.get(first).phase == "cancelled"
    assert wait(jobs, second).phase == "done"
    failed = wait(jobs, third)
    assert failed.phase == "failed" and "unknown topic" in failed.said and "Could not run" in told(failed)
    assert list(tmp_path.iterdir()) == []
    jobs.cancel("no such job")
    assert jobs.get("no such job") is None


def test_a_queue_has_an_end_and_what_waits_can_be_taken_out(tmp_path):
    jobs = Jobs(tmp_path)
    jobs._thread = object()  # type: ignore[assignment]  # nothing is started
    ids = [jobs.submit(("list", "models"), "x.h5") for _ in range(MOST_WAITING)]
    with pytest.raises(UsageError, match="wait already"):
        jobs.submit(("list", "models"), "x.h5")
    jobs.cancel(ids[0])
    assert jobs.get(ids[0]).phase == "cancelled" and jobs.get(ids[1]).ahead == 0


def test_what_a_run_says_is_escaped():
    job = Job("x", (), "<b>.h5", phase="failed", said="<script>alert(1)</script>")
    assert "<script>" not in told(job) and "<b>.h5" not in told(job)
