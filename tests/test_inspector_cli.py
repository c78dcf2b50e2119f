"""The command line: quick help without torch, one line for every error, results on stdout and nothing else."""

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

from replayscope.inspector import cli, commands, specs
from replayscope.inspector.errors import UsageError
from replayscope.inspector.listing import TOPICS
from replayscope.inspector.options import DemoOptions, Result, RunOptions
from replayscope.inspector.prompts import parse_prompt

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("demo", "record", "sweep", "compare", "import", "show", "plot", "report", "ui", "list")


@pytest.fixture
def usecases(monkeypatch):
    """Stands in for the use cases: keeps what it was asked for and returns `result`."""
    fake = types.SimpleNamespace(asked=[], result=Result("done", {"done": True, "traces": []}))

    def run(options):
        fake.asked.append(options)
        if isinstance(fake.result, BaseException):
            raise fake.result
        return fake.result

    for name, functions in (("usecases", ("record", "sweep")), ("demo", ("demo",))):
        module = types.ModuleType(f"replayscope.inspector.{name}")
        vars(module).update(dict.fromkeys(functions, run))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(module.__name__, module, raising=False)
    monkeypatch.setattr("replayscope.ui.report.report", lambda traces, out, force: out)
    monkeypatch.setattr(commands, "models", lambda: {"mini": None})
    return fake


def one_line(capsys) -> str:
    """The only line of stderr; stdout must be empty."""
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1 and told.err.startswith("replayscope: ")
    return told.err


def python(*words: str, **rest) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, **rest)


def test_help_is_quick(tmp_path):
    """In seconds of processor time, which other programs on the machine do not change much."""
    took = []
    for _ in range(5):
        before = os.times()
        done = python("-m", "replayscope.inspector", "--help", cwd=tmp_path)
        after = os.times()
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS)
    assert min(took) < 0.3, f"--help took {min(took):.2f} s at best"


@pytest.mark.parametrize("typed", ["--help", "sweep --help", "list hooks", "list arms", "show none.h5"])
def test_what_runs_no_model_imports_no_torch(typed, tmp_path):
    script = (
        "import sys\nfrom replayscope.inspector.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'plotly', 'gradio'} & set(sys.modules)"
    )
    done = python("-c", script, *typed.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help():
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            cli.main([name, "--help"])
        assert left.value.code == 0


def test_the_options_arrive_as_typed(usecases, tmp_path, capsys):
    out = tmp_path / "t.h5"
    words = f"sweep -o {out} -m mini -p ids:1,2,3 --cuts around:W,5 --replay W,exact --suffix 64 --arms full,broken:*"
    words += (
        " --hooks layers.{0,1}.hidden,logits --hooks embed --rows --audit --dtype float64 --max-bytes 1GiB --forced 3"
    )
    assert cli.main(words.split()) == 0
    assert capsys.readouterr().out == "done\n"
    (asked,) = usecases.asked
    assert isinstance(asked, RunOptions)
    assert (asked.prompt.kind, asked.prompt.read()) == ("ids", (1, 2, 3))
    assert (asked.cuts, asked.replay, asked.suffix) == ("around:W,5", "W,exact", 64)
    assert asked.arms == ("full", "broken:*")
    assert asked.hooks == ("layers.{0,1}.hidden", "logits", "embed")
    assert asked.rows and asked.audit and not asked.reproducible
    assert (asked.dtype, asked.max_bytes, asked.forced, asked.device) == ("fp64", 2**30, 3, "auto")


def test_demo_writes_into_a_folder_that_is_its_own(usecases, tmp_path, capsys):
    out = tmp_path / "demo"
    assert cli.main(["demo", "-o", str(out)]) == 0
    assert usecases.asked == [DemoOptions(out=out)]
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    capsys.readouterr()
    assert cli.main(["demo", "-o", str(out)]) == 2
    assert "--force" in one_line(capsys)
    assert cli.main(["demo", "-o", str(out), "--force"]) == 0
    assert (out / "mine.txt").read_text() == "kept"


def test_a_result_over_a_threshold_is_exit_code_1_and_json_is_strict(usecases, tmp_path, capsys):
    usecases.result = Result(
        "over", {"worst": np.float64("inf"), "mean": float("nan"), "rows": np.arange(2)}, exit_code=1
    )
    assert cli.main(["record", "--json", "-o", str(tmp_path / "t.h5")]) == 1

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=refuse) == {"worst": "inf", "mean": None, "rows": [0, 1]}


def test_quiet_leaves_out_the_notes_and_nothing_else(usecases, tmp_path, capsys):
    usecases.result = Result("table\nnote: of little faith\n  note: in a cell\nt.h5", {"notes": ["of little faith"]})
    words = ["record", "-o", str(tmp_path / "t.h5")]
    assert cli.main(words) == 0 and "\nnote: of little faith\n" in capsys.readouterr().out
    assert cli.main([*words, "-q"]) == 0 and capsys.readouterr().out == "table\n  note: in a cell\nt.h5\n"
    assert cli.main([*words, "-q", "--json"]) == 0 and "of little faith" in capsys.readouterr().out


def test_an_option_that_is_given_twice_is_told(usecases, tmp_path, capsys):
    words = ["sweep", "-o", str(tmp_path / "t.h5"), "--hooks", "embed", "--hooks", "final", "--cuts", "1", "--rows"]
    assert cli.main(words) == 0 and capsys.readouterr().err == ""
    assert cli.main([*words, "--cuts", "2", "--rows", "--cuts", "3", "-m", "mini"]) == 0
    assert capsys.readouterr().err == "--cuts is given more than once; the last one counts\n"
    assert [asked.cuts for asked in usecases.asked] == ["1", "3"]
    assert cli.main(["list", "hooks", "-q"]) == 0


BAD = {
    "no command": ([], "give a command: demo, record"),
    "command": (["swep"], "did you mean 'sweep'"),
    "option": (["sweep", "-o", "t.h5", "--jsn"], "unknown option --jsn; did you mean --json"),
    "no output": (["record"], "required: -o"),
    "topic": (["list", "hook"], "did you mean 'hooks'"),
    "extra": (["list", "hooks", "more"], "unexpected argument 'more'"),
    "no value": (["sweep", "--cuts"], "expected one argument"),
    "model": (["sweep", "-o", "t.h5", "-m", "minni"], "unknown model 'minni'; did you mean 'mini'"),
    "arm": (
        ["sweep", "-o", "t.h5", "--arms", "full,encodr"],
        "unknown arm 'encodr'; did you mean 'encoder'.*broken:stale",
    ),
    "broken arm": (["sweep", "-o", "t.h5", "--arms", "broken:floor@"], "unknown arm"),
    "empty arm": (["sweep", "-o", "t.h5", "--arms", "full,,hit"], "empty arm"),
    "semantics": (["sweep", "-o", "t.h5", "--semantics", "papr"], "did you mean 'paper'"),
    "cut": (["sweep", "-o", "t.h5", "--cuts", "twelve"], "cut 'twelve' is not a number"),
    "negative cut": (["sweep", "-o", "t.h5", "--cuts", "-1"], "cut '-1' is not a number"),
    "replay": (["sweep", "-o", "t.h5", "--replay", "grid"], "replay length 'grid'"),
    "suffix": (["sweep", "-o", "t.h5", "--suffix", "0"], "suffix '0'"),
    "dtype": (["sweep", "-o", "t.h5", "--dtype", "fp16"], "valid: fp64, fp32, bf16"),
    "device": (["sweep", "-o", "t.h5", "--device", "gpu"], "valid: auto, cpu, cuda"),
    "size": (["sweep", "-o", "t.h5", "--max-bytes", "lots"], "size 'lots'"),
    "tokens": (["sweep", "-o", "t.h5", "--tokens", "1e99"], "'1e99' must be a whole number of at least 1, in digits"),
    "huge number": (["sweep", "-o", "t.h5", "--tokens", "9" * 999], "'9{20}…' is too large; .* 9223372036854775807"),
    "too large by one": (["sweep", "-o", "t.h5", "--seed", str(2**63)], "--seed '9223372036854775808' is too large"),
    "huge size": (["sweep", "-o", "t.h5", "--max-bytes", "9" * 999], "size '9{20}…' is too large"),
    "seed": (["sweep", "-o", "t.h5", "--seed", "x"], "--seed 'x'"),
    "audit": (["sweep", "-o", "t.h5", "--audit", "--dtype", "bf16"], "--audit needs fp64 or fp32"),
    "empty prompt": (["sweep", "-o", "t.h5", "-p", ""], "prompt is empty"),
    "prompt file": (["sweep", "-o", "t.h5", "-p", "@none.txt"], "no prompt file 'none.txt'"),
    "prompt folder": (["sweep", "-o", "t.h5", "-p", "@."], "prompt file '.' is a folder; give the path of a file"),
    "prompt device": (["sweep", "-o", "t.h5", "-p", "@/dev/zero"], "prompt file '/dev/zero' is a device"),
    "token ids": (["sweep", "-o", "t.h5", "-p", "ids:1,x"], "token id 'x'"),
    "missing folder": (["sweep", "-o", "none/t.h5"], "no folder none"),
    "ending": (["sweep", "-o", "t.html"], "ends in .h5"),
    "folder as output": (["sweep", "-o", ".."], "is a folder"),
    "this folder as output": (["sweep", "-o", "."], "-o needs a name"),
    "empty output": (["sweep", "-o", ""], "-o needs a name"),
    "no trace": (["show", "none.h5"], "no trace none.h5"),
    "folder as trace": (["show", "."], "is a folder"),
    "no root": (["ui", "--root", "none"], "no folder none"),
    "port": (["ui", "--root", ".", "--port", "x"], "port 'x'"),
}


def test_the_largest_count_is_taken_and_zeros_before_it_too():
    assert specs.parse_count(f"{'0' * 30}{2**63 - 1}", "n") == 2**63 - 1
    assert specs.parse_count("000", "n") == 0


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2(case, usecases, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, says = BAD[case]
    assert cli.main(words) == 2
    assert re.search(says, one_line(capsys))
    assert not usecases.asked and not list(tmp_path.iterdir())


def test_a_prompt_comes_through_a_pipe(tmp_path):
    """As the shell's `-p @<(command)` gives it."""
    os.mkfifo(tmp_path / "pipe")
    prompt = parse_prompt(f"@{tmp_path / 'pipe'}")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("one\ntwo"), daemon=True)
    writer.start()
    assert prompt.read() == "one\ntwo"
    writer.join(timeout=10)


def test_output_that_exists_is_kept(usecases, tmp_path, capsys):
    out = tmp_path / "t.h5"
    out.write_text("mine")
    assert cli.main(["record", "-o", str(out)]) == 2
    assert "exists; add --force" in one_line(capsys)
    assert out.read_text() == "mine" and not usecases.asked
    assert cli.main(["record", "-o", str(out), "--force"]) == 0


def test_a_trace_that_was_not_finished_is_named(tmp_path, capsys):
    (tmp_path / "t.h5.partial").touch()
    assert cli.main(["show", str(tmp_path / "t.h5")]) == 2
    assert "t.h5.partial is there" in one_line(capsys)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("layer 99 is not there"), 2, "layer 99"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "out of memory"),
        (OSError(28, "No space left on device", "t.h5"), 2, "t.h5: No space left on device"),
        (RuntimeError("two\nlines"), 2, "internal error: RuntimeError: two lines; run again with --debug"),
    ],
)
def test_errors_of_a_use_case(error, code, says, usecases, tmp_path, capsys):
    usecases.result = error
    words = ["record", "-o", str(tmp_path / "t.h5")]
    assert cli.main(words) == code
    assert says in one_line(capsys)
    # The same code, and where it came from.
    assert cli.main([*words, "--debug"]) == code
    err = capsys.readouterr().err
    assert "Traceback" in err and type(error).__name__ in err and says in err


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    script = "import os, sys\nfrom replayscope.inspector.cli import main\nsys.exit(main(['list', 'hooks']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_behind_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "replayscope.inspector", "list", "hooks"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    said = "replayscope: cannot write to standard output: No space left on device; send it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_token_that_the_terminal_cannot_show_is_escaped(usecases, tmp_path):
    script = (
        "from replayscope.inspector import cli\nfrom replayscope.inspector.options import Result\n"
        "cli._emit(Result('a\\udcff\\u4e2d', {}), False)"
    )
    done = python("-c", script, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stdout == "a\\udcff\\u4e2d\n", done.stderr


@pytest.mark.parametrize("topic", TOPICS)
def test_list(topic, capsys):
    assert cli.main(["list", topic]) == 0
    assert capsys.readouterr().out.strip()
    assert cli.main(["list", topic, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[topic]
    assert all(row["name"] for row in rows)


def test_a_list_has_headings_and_says_that_tasks_can_be_ones_own(capsys):
    assert cli.main(["list", "tasks"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "name" and head.index("chance of a guess") == rows[0].index("0.0001")
    assert "JSONL file with prompt, answer, cut, task" in rows[-1]


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("replayscope 0.")


@pytest.mark.parametrize(
    ("typed", "kind", "text"), [("prose", "sample", None), ("hello", "text", "hello"), ("ids:1, 2", "ids", (1, 2))]
)
def test_prompts(typed, kind, text):
    from replayscope.inspector.prompts import parse_prompt

    prompt = parse_prompt(typed)
    assert prompt.kind == kind
    assert text is None or prompt.read() == text
    assert "called 'prose'" in parse_prompt("prse").note and not prompt.note


def test_prompt_files_are_utf8_and_not_empty(tmp_path):
    from replayscope.inspector.prompts import parse_prompt

    path = tmp_path / "p.txt"
    for data, says in ((b"", "is empty"), (b"\xff\xfe", "not UTF-8")):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=says):
            parse_prompt(f"@{path}").read()
    path.write_bytes("a\r\nz\u0301\u0000".encode())
    assert parse_prompt(f"@{path}").read() == "a\r\nz\u0301\u0000"


def test_hook_points_are_the_same_everywhere():
    from replayscope.inspector.points import POINTS
    from replayscope.traces import schema

    assert tuple(POINTS) == schema.POINTS


def test_a_command_that_is_typed_by_its_path_works(tmp_path):
    script = Path(sys.executable).with_name("replayscope")
    done = subprocess.run([script, "list", "samples"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and "prose" in done.stdout


def test_control_characters_of_a_stranger_do_not_reach_the_terminal():
    from replayscope.inspector.cli import _printable

    assert _printable("a\x1b[31mb\tc\nd\x07é窗") == "a\\x1b[31mb\tc\nd\\x07é窗"


LOADING = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "replayscope.inspector.parser":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
sys.argv = ["replayscope", "list", "hooks"]
runpy.run_module(sys.argv0, run_name="__main__")
"""


@pytest.mark.parametrize("module", ["replayscope.inspector", "replayscope.inspector.cli"])
def test_interrupted_while_it_is_being_loaded(module):
    """The twin is the command line without the entry that catches it."""
    script = LOADING.replace("sys.argv0", repr(module))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    said = done.stderr.splitlines()
    if module == "replayscope.inspector":
        assert (done.returncode, done.stdout, said) == (130, "", ["replayscope: interrupted"])
    else:
        assert "Traceback (most recent call last):" in said


def test_the_program_begins_at_its_entry():
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["scripts"] == {"replayscope": "replayscope.inspector.entry:main"}
