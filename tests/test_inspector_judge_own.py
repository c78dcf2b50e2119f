"""Own tasks from a file in the matrix: their prompts are the file's, a contract knows the file, faults are found."""

import json
import random
import shutil
from pathlib import Path

import pytest

from replayscope.inspector import judge_contract, judge_matrix, judge_prompts, judge_tokens
from replayscope.inspector.cli import main
from replayscope.inspector.errors import UsageError
from replayscope.inspector.judge_results import Results, contract_of, header_of, read
from replayscope.inspector.judge_tokens import Text
from replayscope.model.config import ModelConfig
from replayscope.model.tasks import COLOURS
from replayscope.ui import judged
from tests import engines, hf

CONTRACT = """
name = "own"
[evidence]
samples = 60
budget = 0.5
reference = 0.0
resamples = 50
[[limit]]
metric = "kl"
at_most = 100
task = "settings"
length = "own"
[[matrix]]
task_file = "mine.jsonl"
neighbours = 0
concurrency = [2]
arms = ["encoder"]
"""
FILLER = "The old man walked along the river to the harbour and sat down. "
CELL = "settings/own/suffix-own/out-short/x2/encoder/paper/task"


def line(n=0, **changes):
    """A setting within the window before the question, a cut between them: easy, and longer than a window of 32."""
    colour = random.Random(n).choice(COLOURS)
    head = f"{n} {FILLER}\nmode = {colour};\n"
    said = {"prompt": head + "and then.\nmode? ", "answer": colour, "cut": len(head), "task": "settings"}
    return json.dumps({key: value for key, value in (said | changes).items() if value is not None})


def write(folder, lines, contract=CONTRACT):
    (folder / "mine.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "c.toml"
    path.write_text(contract)
    return path


@pytest.fixture
def mine(tmp_path):
    return write(tmp_path, [line(0), "", line(1), line(2)])


def said(capsys, *words):
    code = main(["judge", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_prompts_of_a_cell_are_those_of_the_file(mine):
    contract = judge_contract.load(str(mine))
    (group,) = judge_matrix.groups(contract)
    assert [group.cell(run) for run in group.runs][1:] == [CELL]
    assert list(group.seeds(contract.evidence)) == [1, 3, 4], "seeds are line numbers"
    one = judge_matrix.prompt(group, 3, Text(lambda t: list(t.encode()), lambda ids: bytes(ids).decode(), ""))
    wanted = json.loads(line(1))
    assert bytes(one.ids).decode() == wanted["prompt"] and one.cut == wanted["cut"]
    assert bytes(one.answer).decode() == wanted["answer"]
    capped = judge_contract.load(str(write(mine.parent, [line(n) for n in range(4)], CONTRACT.replace("60", "2"))))
    (group,) = judge_matrix.groups(capped)
    assert list(group.seeds(capped.evidence)) == [1, 2]


def test_every_name_of_a_file_is_a_task_beside_those_of_the_project(tmp_path):
    lines = [line(0), line(1, task="bills"), line(2, task=None), line(3, task="bills")]
    more = '[[matrix]]\ntasks = ["passkey.before"]\nlengths = [320]\n[budgets]\nbills = 0.1\n'
    more += '[service]\ncritical = ["own"]\n'
    contract = judge_contract.load(str(write(tmp_path, lines, CONTRACT + more)))
    found = {group.task: len(group.seeds(contract.evidence)) for group in judge_matrix.groups(contract)}
    assert found == {"settings": 1, "bills": 2, "own": 1, "passkey.before": 60}
    assert contract.budget("bills") == 0.1 and contract.budget("settings") == 0.5


def test_a_frozen_contract_notices_a_changed_file(mine, capsys):
    before = judge_contract.load(str(mine)).sha256
    assert said(capsys, "freeze", mine)[0] == 0
    assert judge_contract.load(str(mine)).sha256 == before
    file = mine.parent / "mine.jsonl"
    file.write_text(file.read_text().replace("walked", "strode", 1))
    code, out, err = said(capsys, "plan", mine)
    assert code == 2 and not out and "c.toml or mine.jsonl was changed after it was frozen" in err
    assert said(capsys, "freeze", mine)[0] == 0 and judge_contract.load(str(mine)).sha256 != before
    # Frozen into another folder, the contract would name a file that is not there.
    (mine.parent / "b").mkdir()
    assert said(capsys, "freeze", mine, "-o", mine.parent / "b" / "c.toml")[0] == 2
    assert not (mine.parent / "b" / "c.toml").exists()


def test_the_way_of_an_own_task_on_mini(mine, capsys):
    code, out, err = said(capsys, "plan", mine)
    tokens = len(json.loads(line(0))["prompt"])
    assert code == 0 and "1 cell, 3 prompts" in out, err
    row = out.splitlines()[1].split()
    assert row[:4] == ["settings/own/suffix-own/out-short/x2", "1", str(tokens), "3"]
    results = mine.parent / "r.jsonl"
    code, out, err = said(capsys, "run", mine, "-o", results)
    # Three prompts are too few for this budget; nothing else is wrong.
    assert code == 1 and out.startswith("verdict: not enough evidence") and "0 of 1 cell fail, 1 open" in out, err
    held = read(results)
    assert [one["seed"] for one in held.prompts] == [1, 3, 4] and held.header["contract"]["task_files"]["mine.jsonl"]
    before = results.read_bytes()
    assert said(capsys, "run", mine, "-o", results)[0] == 1 and results.read_bytes() == before
    # Results are judged without the file, in the terminal, the report and the page.
    (mine.parent / "mine.jsonl").unlink()
    assert said(capsys, "verdict", results)[1] == out
    assert contract_of(held, "r.jsonl").own == ("settings",)
    (cell,) = [one for one in judged.judgement(results)["cells"] if not one["control"]]
    assert (cell["cell"], cell["prompts"], cell["faults"]) == (CELL, 3, [])
    write(mine.parent, [line(0), line(1)])
    code, _, err = said(capsys, "run", mine, "-o", results)
    assert code == 2 and "holds results of another contract" in err


@pytest.mark.parametrize("where", ["mine.jsonl", "b/../mine.jsonl", "link.jsonl", "c.jsonl"])
@pytest.mark.parametrize("served", [(), ("--endpoint", "http://127.0.0.1:9/v1", "--engine-model", "m",
                                         "--engine-semantics", "paper")], ids=["model", "engine"])  # fmt: skip
def test_results_never_replace_the_contract_or_its_tasks(served, where, mine, capsys):
    folder = mine.parent
    (folder / "b").mkdir()
    (folder / "link.jsonl").symlink_to(folder / "mine.jsonl")
    contract = folder / "c.jsonl"
    mine.rename(contract)
    before = {path: path.read_bytes() for path in folder.glob("*.jsonl")}
    code, out, err = said(capsys, "run", contract, *served, "-o", folder / where, "--force")
    assert code == 2 and not out and err.count("\n") == 1 and "which this command reads; give another -o" in err, err
    assert {path: path.read_bytes() for path in folder.glob("*.jsonl")} == before


def test_a_frozen_contract_never_replaces_its_tasks(mine, capsys):
    tasks = mine.parent / "mine.jsonl"
    mine.write_text(CONTRACT.replace("mine.jsonl", "tasks.toml"))
    tasks = tasks.rename(mine.parent / "tasks.toml")
    before = tasks.read_bytes()
    code, _, err = said(capsys, "freeze", mine, "-o", tasks, "--force")
    assert code == 2 and "tasks.toml, which this command reads; give another -o" in err and tasks.read_bytes() == before
    # Over itself a contract is frozen, as without -o.
    assert said(capsys, "freeze", mine, "-o", mine, "--force")[0] == 0


@pytest.mark.parametrize(("kind", "says"), [("overwrite", "entries changed in 3 of 3"), ("start+1", "replayed 31")])
def test_a_broken_arm_in_an_own_task_is_found(mine, capsys, kind, says):
    plant = ("--plant", f"{CELL}=broken:{kind}", "-o", mine.parent / "p.jsonl")
    code, out, err = said(capsys, "run", mine, *plant)
    assert code == 1 and out.startswith("verdict: refuse") and f"fail  {CELL}" in out and says in out, err


def test_enough_prompts_that_mini_answers_are_accepted(tmp_path, capsys):
    path = write(tmp_path, [line(n) for n in range(12)], CONTRACT.replace("reference = 0.0", "reference = 0.5"))
    code, out, err = said(capsys, "run", path, "-o", tmp_path / "r.jsonl")
    assert code == 0 and out.startswith("verdict: accept"), out + err


LONG = "x" * 5000


@pytest.mark.parametrize(("lines", "says"), [
    (None, "mine.jsonl cannot be read: No such file"),
    ([line(0), line(1, cut=0)], "mine.jsonl:2: before cut 0 mini has no whole token to cache under paper"),
    ([line(0), line(1, prompt=LONG)], "mine.jsonl:2: this prompt comes to 5,006 tokens with what is produced, more"),
    ([line(0), line(1, prompt="\ud800 mode? ", cut=1)], "mine.jsonl:2: a lone surrogate"),
    ([line(0), line(1, answer=";")], "mine.jsonl:2: an answer without a letter or digit"),
    ([line(0), line(0)], "mine.jsonl:2: the prompt of line 1 again"),
    ([line(0, task="passkey")], "mine.jsonl: passkey is a task of the project already"),
    ([line(0, task="a/b")], "task 'a/b' is part of a cell's name"),
], ids=["missing", "cut", "long", "surrogate", "answer", "twice", "collides", "name"])  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_line_before_anything_is_written(tmp_path, capsys, lines, says):
    path = write(tmp_path, lines or [], CONTRACT.replace('task = "settings"\n', ""))
    if lines is None:
        (tmp_path / "mine.jsonl").unlink()
    code, out, err = said(capsys, "run", path, "-o", tmp_path / "r.jsonl")
    assert code == 2 and not out and says in err and err.count("\n") == 1, err
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(("more", "says"), [
    ("lengths = [320]\n", "prompts of a task_file are as they are; leave lengths out"),
    ('tasks = ["passkey"]\n', "leave tasks out"),
    ('[[matrix]]\ntask_file = "other.jsonl"\n', "other.jsonl: settings is a task of mine.jsonl already"),
    ('[[matrix]]\narms = ["both"]\n', r"\[\[matrix\]\] 2 lacks tasks, or a task_file"),
    ("[[matrix]]\ntask_file = 3\n", "task_file must be text"),
])  # fmt: skip
def test_a_block_has_the_prompts_of_a_file_or_those_of_the_project(mine, more, says):
    shutil.copy(mine.parent / "mine.jsonl", mine.parent / "other.jsonl")
    mine.write_text(CONTRACT + more)
    with pytest.raises(UsageError, match=says):
        judge_contract.load(str(mine))


def test_a_contract_from_elsewhere_opens_no_file(mine):
    with pytest.raises(UsageError, match=r"names the task file mine.jsonl, which cannot be found from here"):
        judge_contract.parse(mine.read_text(), "c.toml")
    # Results that do not hold the names of their own tasks are no reason to look for the file either.
    contract = judge_contract.load(str(mine))
    header = header_of(contract, "mini", "*", "c.toml")
    assert contract_of(Results(header), "r.jsonl").sha256 == contract.sha256
    for files in ({}, {"mine.jsonl": {"sha256": "0"}}, {"mine.jsonl": {"sha256": "0", "tasks": 3}}):
        held = Results(header | {"contract": header["contract"] | {"task_files": files}})
        with pytest.raises(UsageError, match=r"r.jsonl does not hold what its contract needs"):
            contract_of(held, "r.jsonl")


def test_a_running_engine_is_asked_the_prompts_of_the_file(tmp_path, capsys):
    made = [f"{n} {FILLER}\npasskey = {1000 + 7 * n};\n" for n in range(12)]
    rest = "\npasskey? "
    lines = [line(prompt=one + rest, cut=len(one), answer=one[-6:-2]) for one in made]
    path = write(tmp_path, lines)
    engine = ("--engine-model", "tiny", "--engine-semantics", "paper", "--salt")
    cell = "settings/own/suffix-own/out-short/x1/engine/paper/task"
    for forget, wanted in ((None, 0), ("paper/task", 1)):
        cache = engines.Cache(forget=forget)
        with engines.served(cache) as url:
            code, out, err = said(
                capsys, "run", path, "--endpoint", url, *engine, "-o", tmp_path / f"{wanted}.jsonl", "--json"
            )
        assert code == wanted, out + err
        found = {one["cell"]: one for one in json.loads(out)["cells"]}
        assert list(found) == [cell] and found[cell]["worse"] == 12 * wanted
        asked = {body["prompt"] for body in cache.requests[3:]}
        assert asked == {one + more for one in made for more in ("", rest)}
    write(tmp_path, [*lines, line(20, cut=0)])
    with engines.served(engines.Cache()) as url:
        code, _, err = said(capsys, "run", path, "--endpoint", url, *engine, "-o", tmp_path / "n.jsonl")
    assert code == 2 and "mine.jsonl:13: cut 0 leaves nothing to cache" in err


def test_a_cut_inside_a_word_moves_to_its_start_and_words_that_are_unknown_are_refused(tmp_path):
    """A tokenizer of whole words, which has none for most of a text."""
    import transformers

    hf.tokenizer(tmp_path)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    own.unk_token = "<unk>"
    text, config = (
        judge_tokens.of_tokenizer(own, ""),
        ModelConfig.load(Path(__file__).parents[1] / "model" / "mini.json"),
    )
    prompt = "the cat sat : the"

    def checked(**changes):
        fields = {"prompt": prompt, "answer": "cat", "cut": prompt.index("sat") + 2} | changes
        contract = judge_contract.load(str(write(tmp_path, [line(**fields)])))
        groups = judge_matrix.groups(contract)
        judge_prompts.check(groups, contract.evidence, text, "tiny", config)
        return judge_matrix.prompt(groups[0], 1, text)

    # <bos> the cat | sat: its beginning alone is another word.
    assert checked().cut == 3
    with pytest.raises(UsageError, match=r"mine.jsonl:1: the tokenizer of tiny has no tokens for some of this prompt"):
        checked(prompt="the dog sat : the")
    with pytest.raises(UsageError, match=r"mine.jsonl:1: before cut 2 tiny has no whole token to cache"):
        checked(cut=2)
    with pytest.raises(UsageError, match="writes the answer 'dog' as"):
        checked(answer="dog")
