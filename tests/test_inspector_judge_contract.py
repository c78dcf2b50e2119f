"""The contract: what it is known by, what it refuses, and the matrix that it stands for."""

from dataclasses import replace
from pathlib import Path

import pytest

from replayscope.inspector import judge_contract, judge_limits, judge_matrix, judge_prompts
from replayscope.inspector.cli import main
from replayscope.inspector.errors import UsageError
from replayscope.inspector.judge_matrix import Run
from replayscope.inspector.judge_tokens import Text
from replayscope.inspector.judge_verdict import judge
from replayscope.model import tokenizer
from replayscope.model.config import ModelConfig
from tests import judging

MINI = ModelConfig.load(Path(__file__).parents[1] / "model" / "mini.json")


TEXT = Text(tokenizer.encode, tokenizer.decode, "Some text. ")


def test_the_shipped_contract_loads_and_can_show_what_it_asks_for():
    shipped = judge_contract.load("default")
    groups = judge_matrix.groups(shipped)
    assert all(shipped.evidence.samples >= shipped.needed(group.task) for group in groups)
    arms = {run.arm for group in groups for run in group.runs}
    assert arms == {"hit", "encoder", "decoder", "both"}
    assert {group.output for group in groups} == set(judge_contract.OUTPUTS)
    for group in groups:
        one = judge_matrix.prompt(group, 1000, TEXT)
        made = judge_matrix.requests(MINI, group, one, "p", 40)
        assert len(made) == len(group.runs) + 1, f"{group.label}: a cell that never runs is never accepted"
        cuts = {request.cut for run, request in made if run is not None and run.arm in ("encoder", "both")}
        assert len(cuts) > 1, f"{group.label}: every prompt replays at another cut too"
        for _, request in made:
            request.check(MINI)


def test_a_contract_is_known_by_what_it_says_and_its_stamp_holds_it():
    one = judging.contract()
    assert judging.contract("# a comment\n\n" + judging.CONTRACT).sha256 == one.sha256
    assert judging.contract(**{"samples = 60": "samples = 61"}).sha256 != one.sha256
    frozen = judge_contract.parse(judge_contract.freeze(one, "2026-11-01"), "x.toml")
    assert frozen.sha256 == one.sha256 and frozen.stamp.endswith("frozen on 2026-11-01")
    again = judge_contract.parse(judge_contract.freeze(frozen, "2026-11-02"), "x.toml")
    assert again.frozen == {"sha256": one.sha256, "date": "2026-11-02"}
    changed = judge_contract.freeze(one).replace("samples = 60", "samples = 5")
    with pytest.raises(UsageError, match=r"x.toml was changed after it was frozen on"):
        judge_contract.parse(changed, "x.toml")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("samples = 60", "sample = 60", r"unknown key of made.toml \[evidence\] 'sample'; did you mean 'samples'"),
        ("samples = 60", "samples = true", r"\[evidence\]: samples must be a whole number, not True"),
        ("samples = 60", "samples = 60.5", "samples must be a whole number, not 60.5"),
        ("samples = 60", "confidence = 0.4", "between 0.5 and 1"),
        ("samples = 60", "budget = 0", r"\[evidence\]: budget must be a number of at least 1e-06 and below 1, not 0"),
        ('metric = "kl"', 'metric = "kI"', r"unknown metric of made.toml \[\[limit\]\] 1 'kI'"),
        ('statistic = "max"', 'statistic = "p95"', "unknown statistic 'p95'"),
        ('region = "window"', 'region = "last"', r"unknown region of window_kv in made.toml \[\[limit\]\] 3 'last'"),
        ('metric = "jump"', 'metric = "jump"\nlayer = 3', "jump has no layers"),
        ("at_most = 0.1\n", "", r"\[\[limit\]\] 1 lacks at_most"),
        ("lengths = [320]", "lengths = []", r"lengths must be a list of whole numbers, not empty, not \[\]"),
        ("lengths = [320]", "lengths = [0]", r"\[\[matrix\]\] 1: lengths must be from 1 to 10,000,000, not 0"),
        ("lengths = [320]", 'lengths = [320]\narms = ["full"]', "unknown arm"),
        ("lengths = [320]", 'lengths = [320]\ncuts = ["far"]', "unknown cut"),
        ("passkey.straddle", "passkeys", "unknown task"),
        ("[[matrix]]", "[[other]]", "unknown key of made.toml 'other'"),
        ('name = "made up"', 'name = "made up', "is no TOML"),
        (
            "[evidence]",
            '[service]\nneeds = ["magic"]\n[evidence]',
            r"feature of made.toml .service. needs 'magic'",
        ),
        ("[evidence]", '[service]\nneeds = "LoRA"\n[evidence]', "needs must be a list of texts"),
        (
            "[evidence]",
            '[service]\ncritical = ["magic"]\n[evidence]',
            r"task of made.toml .service. critical 'magic'",
        ),
        ("[evidence]", "[budgets]\nmagic = 0.1\n[evidence]", r"unknown task of made.toml \[budgets\] 'magic'"),
        ("[evidence]", "[budgets]\npasskey = nan\n[evidence]", r"\[budgets\]: passkey must be a number of at least"),
        ('name = "made up"', "name = 5", "made.toml: name must be text, not 5"),
        ("[evidence]", "budgets = 3\n[evidence]", r"\[budgets\] must be a table, not 3"),
        ('metric = "jump"', 'metric = "jump"\nlayer = 1.5', "layer must be text, not 1.5"),
        ("lengths = [320]", "lengths = [320]\nneighbours = 9999999999", "neighbours must be from 0 to 64"),
        ("lengths = [320]", f"lengths = {[320] * 9999}", r"\[\[matrix\]\]: 179,982 cells are more than 20,000"),
        ("samples = 60", f"seed = 0x{'f' * 5000}", "is no TOML that can be used"),
    ],
)
def test_what_cannot_be_used_is_named(old, new, says):
    with pytest.raises(UsageError, match=says):
        judging.contract(**{old: new})


@pytest.mark.parametrize("key", ["evidence", "limit", "matrix", "budgets", "service"])
def test_what_is_no_table_is_named(key):
    with pytest.raises(UsageError, match=rf"x.toml \[+{key}\]+ must be .* 3"):
        judge_contract.parse(f"{key} = 3", "x.toml")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-0.1", "1" + "0" * 400])
def test_no_number_switches_a_limit_off(value):
    says = r"\[\[limit\]\] 1: at_most must be a finite number of at least 0, not "
    with pytest.raises(UsageError, match=says):
        judging.contract(**{"at_most = 0.1": f"at_most = {value}"})
    assert judging.contract(**{"at_most = 0.1": "at_most = 0"}).limits[0].at_most == 0


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("confidence", ["nan", "inf", "0.5", "1"]),
        ("budget", ["nan", "1", "-0.1", "1e-17"]),
        ("reference", ["nan", "inf", "-0.1", "1.1"]),
        ("temperature", ["nan", "inf", "0", "-1"]),
        ("samples", ["-1", "0", "99999999999"]),
        ("resamples", ["-1", "0", "99999999999"]),
        ("seed", ["-1", "1" + "0" * 30]),
    ],
)
def test_a_number_of_the_evidence_out_of_its_range_is_named(key, values):
    for value in values:
        with pytest.raises(UsageError, match=rf"\[evidence\]: {key} must be .*, not "):
            judge_contract.parse(f"[evidence]\n{key} = {value}\n", "x.toml")


LIMIT = '[[limit]]\nmetric = "kl"\nat_most = 1\n'
DEAD = [
    (LIMIT + 'task = "pasky"\n', r"5, mean kl ≤ 1 \(task pasky\): no cell of the matrix has task 'pasky'; "
     r"did you mean 'passkey'\? there are: passkey\.before, passkey\.straddle$"),
    (LIMIT + 'task = "chain"\n', "no cell of the matrix has task 'chain'"),
    (LIMIT + "length = 512\n", "no cell of the matrix has length '512'; there are: 320$"),
    (LIMIT + 'suffix = "long"\n', "no cell of the matrix has suffix 'long'; there are: short$"),
    (LIMIT + 'output = "turns"\n', "no cell of the matrix has output 'turns'; there are: short$"),
    (LIMIT + 'arm = "exact"\n', "no cell of the matrix has arm 'exact'; there are: encoder, decoder, both$"),
    (LIMIT + 'arm = "engine"\n', "no cell of the matrix has arm 'engine'"),
    (LIMIT + 'semantics = "vllm-0.33"\n', "no cell of the matrix has semantics 'vllm-0.33'; there are: paper$"),
    (LIMIT + 'cut = "end"\n', r"no cell of the matrix has cut 'end'; there are: task-1, task, task\+1, none$"),
    (LIMIT + 'cut = "task"\narm = "decoder"\n', "each of these is in the matrix, but no cell has all"),
    (LIMIT.replace('"kl"', '"jump"') + 'arm = "decoder"\n', "neighbours = 1"),
    (LIMIT.replace('"kl"', '"window_kv"') + 'arm = "decoder"\n', "before the cut none there is no window"),
    (LIMIT.replace('"kl"', '"ttft"') + 'task = "passkey"\n', "ttft is of an arm over all its cells; leave task out"),
    (LIMIT.replace('"kl"', '"ttft"') + 'arm = "hit"\n', "ttft is not judged of the control"),
    ("[budgets]\nchain = 0.1\n", "made.toml budgets: no cell of the matrix has task 'chain'; there are: passkey.bef"),
    ('[service]\ncritical = ["edit.*"]\n', r"made.toml critical: no cell of the matrix has task 'edit\.\*'; there are"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "says"), DEAD)
def test_what_no_cell_can_be_held_to_is_refused_before_anything_runs(more, says):
    with pytest.raises(UsageError, match=says):
        judge_limits.check(judging.contract(judging.CONTRACT + more), "made.toml")


@pytest.mark.parametrize(
    "more",
    [
        'task = "passkey"',
        'task = "*.straddle"',
        'length = "3*"',
        'arm = "hit"',
        'arm = "hit"\ncut = "task"',
        'cut = "task*"',
    ],
)
def test_a_limit_that_selects_a_cell_is_taken(more):
    judge_limits.check(judging.contract(judging.CONTRACT + LIMIT + more), "made.toml")


def test_every_limit_that_is_taken_is_measured_and_what_is_refused_would_not_be():
    """Held against the judge itself. The made-up results have a window and a time even where no run could."""
    dead = [text for text, _ in DEAD if "[[limit]]" in text and "window_kv" not in text and "ttft" not in text]
    for more in [*dead, ""]:
        asked = judging.contract(judging.CONTRACT + more)
        told = judge(judging.results(asked), asked).reasons
        assert any("nothing was measured" in reason for reason in told) == (more != ""), (more, told)


def test_a_limit_for_an_engine_is_of_its_arm_and_rules():
    asked = judging.contract(judging.CONTRACT + LIMIT + 'arm = "engine"\nsemantics = "vllm-0.33"\n')
    judge_limits.check(asked, "made.toml", "vllm-0.33")
    with pytest.raises(UsageError, match=r"semantics 'vllm-0\.33'; there are: paper, sglang-0\.5\.23"):
        judge_limits.check(asked, "made.toml", "sglang-0.5.23")


def test_a_layer_that_the_model_does_not_have_is_named():
    judge_limits.check_layers(judging.contract(), "made.toml", "mini", MINI)
    with pytest.raises(
        UsageError, match=r"\[\[limit\]\] 3, max window_kv ≤ 1e-05 \(region window, layer 99\): mini has "
    ):
        judge_limits.check_layers(judging.contract(**{"layer = 0": "layer = 99"}), "made.toml", "mini", MINI)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(judging.CONTRACT, encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert judge_contract.load(str(path)).sha256 == judging.contract().sha256
    assert main(["judge", "freeze", str(path)]) == 0 and judge_contract.load(str(path)).frozen


HUGE = "x" * 5_000_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "made up"', "HUGE = 1"),
        ('name = "made up"', 'name = "a"\nHUGE = 1\nHUGE = 2'),
        ('metric = "jump"', 'metric = "HUGE"'),
        ('statistic = "max"', 'statistic = "HUGE"'),
        ('statistic = "max"', 'statistic = "qDIGITS"'),
        ('region = "window"', 'region = "HUGE"'),
        ('"passkey.straddle"', '"HUGE"'),
        ("[evidence]", "[budgets]\nHUGE = 0.1\n[evidence]"),
        ("[evidence]", '[service]\ncritical = ["HUGE"]\n[evidence]'),
        ("[evidence]", '[frozen]\nsha256 = "0"\ndate = "HUGE"\n[evidence]'),
        ("[evidence]", "[frozen]\nsha256 = \"0\"\ndate = 2026-11-01\n[evidence]"),
    ],
)  # fmt: skip
def test_a_name_of_megabytes_is_one_short_line(old, new):
    with pytest.raises(UsageError) as error:
        judging.contract(**{old: new.replace("HUGE", HUGE).replace("DIGITS", "9" * 5000)})
    assert len(str(error.value)) < 1000 and "\n" not in str(error.value)


def test_a_long_name_that_is_read_is_shown_by_a_line():
    with pytest.raises(UsageError, match=r"made.toml: name has 5,000,000 characters, at most 1,000 are read"):
        judging.contract(**{"made up": HUGE})
    long = HUGE[:1000]
    asked = judging.contract(**{"made up": long})
    assert len(asked.stamp) < 200 and asked.stamp.startswith("contract xxx") and "1,000 characters" in asked.stamp
    dead = judging.contract(judging.CONTRACT + LIMIT + f'task = "{long}"\n')
    with pytest.raises(UsageError, match="no cell of the matrix has task 'xxx") as error:
        judge_limits.check(dead, "made.toml")
    assert len(str(error.value)) < 500


def test_a_matrix_beyond_all_machines_is_refused_before_it_is_made():
    with pytest.raises(UsageError, match=r"samples × cells of .* is 180,000,000, more than 10,000,000"):
        judging.contract(**{"samples = 60": "samples = 100000", "lengths = [320]": f"lengths = {[320] * 100}"})
    e, groups = judging.contract().evidence, judge_matrix.groups(judging.contract())
    # Four digits are asked for, and a token more is produced.
    judge_prompts.check(groups, e, TEXT, "mini", replace(MINI, max_position_embeddings=325))
    with pytest.raises(UsageError, match=r"lengths: 320 comes to 325 tokens with .*, more than mini takes, 324"):
        judge_prompts.check(groups, e, TEXT, "mini", replace(MINI, max_position_embeddings=324))
    with pytest.raises(UsageError, match="the tokenizer of mini has token id 121, its vocabulary ends at 99"):
        judge_prompts.check(groups, e, TEXT, "mini", replace(MINI, vocab_size=100))


def test_a_contract_without_cells_is_refused():
    with pytest.raises(UsageError, match="nothing would run"):
        judge_contract.parse('name = "empty"', "empty.toml")
    with pytest.raises(UsageError, match="no cell is called 'x'"):
        judge_matrix.groups(judging.contract(), "x")


def test_one_cell_brings_its_control_and_its_neighbours():
    (group,) = judge_matrix.groups(judging.contract(), "passkey.straddle/*/encoder/paper/task")
    assert [run.label for run in group.runs] == [
        "hit/paper/task", "encoder/paper/task", "encoder/paper/task-1", "encoder/paper/task+1",
    ]  # fmt: skip
    assert judge_matrix.neighbours(Run("decoder", "paper", None)) == []


def test_cuts_are_where_their_names_say_and_what_the_engine_admits():
    (group, _) = judge_matrix.groups(judging.contract())
    one = judge_matrix.prompt(group, 1000, TEXT)
    N = len(one.ids)
    assert one.sample.prompt.encode()[: one.cut] == one.sample.prompt[: one.sample.cut].encode()

    def at(cut, semantics="paper"):
        return judge_matrix.cut_of(Run("encoder", semantics, cut), one, 32)

    assert [at(c) for c in ("start", "window-1", "window", "middle", "end", "task+1")] == [
        0, 31, 32, N // 2, N - 1, one.cut + 1,
    ]  # fmt: skip
    assert at("start-1") is None and at("end+1") is None
    assert at("middle", "sglang-0.5.23") == N // 2 // 2 * 2 and at("middle+1", "sglang-0.5.23") == at("middle") + 2
    assert at("end", "vllm-0.33") % 128 == 0 and at("end-1", "vllm-0.33") == at("end", "vllm-0.33") - 128


def test_an_engine_is_asked_what_can_be_seen_from_outside():
    asked = judging.contract(judging.CONTRACT + 'cuts = ["task", "window", "start"]\noutputs = ["short", "turns"]\n')
    groups = judge_matrix.engine_groups(asked, "*", "vllm-0.33")
    assert {group.output for group in groups} == {"short"} and {group.concurrency for group in groups} == {1}
    cuts = {run.cut for group in groups for run in group.runs}
    assert cuts == {"task", "task-1", "task+1", "start+1"}


def test_freeze_and_refusals_on_the_command_line(tmp_path, capsys):
    mine = tmp_path / "mine.toml"
    assert main(["judge", "freeze", "default", "-o", str(mine)]) == 0
    assert "frozen on" in capsys.readouterr().out and "[frozen]" in mine.read_text()
    assert main(["judge", "freeze", "default", "-o", str(mine)]) == 2 and "--force" in capsys.readouterr().err
    assert main(["judge", "freeze", str(mine)]) == 0, "a contract of one's own is stamped in place"
    edited = mine.read_text().replace("samples = 60", "samples = 70") + "\n[budgets]\npasskey = 0.1\n"
    mine.write_text(edited)
    assert main(["judge", "plan", str(mine)]) == 2 and "(judge freeze mine.toml)" in capsys.readouterr().err
    assert main(["judge", "freeze", str(mine)]) == 0, "what was changed is frozen again, wherever the stamp stands"
    again = judge_contract.load(str(mine))
    assert (again.evidence.samples, again.budgets) == (70, {"passkey": 0.1}) and mine.read_text().count("[frozen]") == 1
    capsys.readouterr()
    for words, says in (
        (["judge", "freeze"], "give a copy a name"),
        (["judge", "fly"], "unknown action 'fly'"),
        (["judge", "plan", "--worst", "3"], "judge plan has no --worst"),
        (["judge", "run", "default", "-o", "x.h5"], "ends in .jsonl"),
        (["judge", "run", "default", "-o", "x.jsonl", "--plant", "*=broken:nope"], "start-1, window+1, stale, "),
        (["judge", "run", "default", "-o", "x.jsonl", "-m", str(tmp_path)], "no folder with a tokenizer"),
        (["judge", "run", "default", "-o", "x.jsonl", "-m", "minni"], "did you mean 'mini'"),
        (["judge", "run", "default", "-o", "x.jsonl", "--salt"], "--salt is for --endpoint"),
        (["judge", "verdict"], "needs the results file"),
        (["judge", "verdict", str(tmp_path / "none.jsonl")], "No such file"),
        (["judge", "run", "default", "--endpoint", "http://x", "-m", "mini"], "--model is for a model that runs here"),
        (["judge", "plan", str(tmp_path / "none.toml")], "no contract"),
    ):
        assert main(words) == 2 and says in capsys.readouterr().err, words
    service = tmp_path / "service.toml"
    service.write_text(judging.CONTRACT + 'semantics = ["sglang-day0"]\n[service]\nneeds = ["multimodal"]\n')
    assert main(["judge", "run", str(service), "-o", str(tmp_path / "r.jsonl")]) == 1
    assert "refuse, before anything ran" in capsys.readouterr().out and not (tmp_path / "r.jsonl").exists()
