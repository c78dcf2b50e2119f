"""The documents against the code: what they name exists, and what exists is named in them."""

import re
import shlex
from pathlib import Path

import pytest

from replayscope.inspector.metrics import METRICS
from replayscope.inspector.parser import build_parser
from replayscope.inspector.points import LAYER_POINTS, POINTS
from replayscope.inspector.semantics import ARMS, BROKEN, SEMANTICS

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in DOCS}
ALL = "\n".join(TEXTS.values())
COMMANDS = build_parser()[1]
TRUE = {"-h", "--help", "--version"}

named = pytest.mark.parametrize("name", TEXTS)


def options_of(command: str) -> set[str]:
    return {name for action in COMMANDS[command]._actions for name in action.option_strings}


def calls(text: str) -> list[list[str]]:
    """Words of every `replayscope …` in backticks or on a line of a code block, without what follows a pipe."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```[a-z]*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}(.*)$", outside, re.MULTILINE)
    lines = [
        *re.findall(r"`([^`\n]+)`", outside),
        *indented,
        *(line for block in blocks for line in block.splitlines()),
    ]
    found = []
    for line in lines:
        if match := re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?replayscope (.*)", line):
            found.append(shlex.split(re.split(r" [|#>] ", match[1])[0], comments=True))
    return found


@named
def test_commands_and_options_in_the_documents_exist(name):
    for words in calls(TEXTS[name]):
        command = words[0]
        assert command in COMMANDS or command in TRUE, f"{name}: replayscope {command}"
        for word in words[1:]:
            if re.match(r"--?[a-z]", word):
                assert word.split("=")[0] in options_of(command) | TRUE, f"{name}: {command} {word}"


@named
def test_long_options_in_the_documents_exist(name):
    known = TRUE.union(*(options_of(command) for command in COMMANDS))
    prose = re.findall(r"`(--[a-z][a-z-]*)", TEXTS[name])
    assert not set(prose) - known


@named
def test_hook_points_in_the_documents_exist(name):
    for point in re.findall(r"(?<![\w.])layers\.(?:\*|\{[^}]*\}|[0-9]+)\.(\w\w+)", TEXTS[name]):
        assert point in LAYER_POINTS, f"{name}: {point}"


@named
def test_metrics_in_the_documents_exist(name):
    for metric in re.findall(r"(?:--metric |=)([a-z_0-9]+)(?:<=|\b(?= -o))", TEXTS[name]):
        assert metric in METRICS, f"{name}: {metric}"


@named
def test_links_to_files_of_the_repository_work(name):
    folder = next(path for path in DOCS if path.name == name).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[name]):
        assert (folder / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_documented(command):
    page = TEXTS["command-line.md"]
    assert f"`replayscope {command}" in page
    missing = [name for name in options_of(command) - {"-h"} if f"`{name}`" not in page]
    assert not missing, f"docs/command-line.md does not name {missing} of {command}"


@pytest.mark.parametrize(
    "names", [POINTS, METRICS, ARMS, SEMANTICS, BROKEN], ids=["hooks", "metrics", "arms", "semantics", "broken"]
)
def test_every_name_is_documented(names):
    missing = [name for name in names if not re.search(rf"(?<![\w+-]){re.escape(name)}(?![\w+-])", ALL)]
    assert not missing, f"no document names {missing}"


def test_the_documents_speak_of_the_make_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", ALL)) <= targets
