"""The form of a sweep as the words of a command line, checked before anything starts.

Nothing that a browser sends can name a file: text goes through standard input, models and samples are chosen from
lists, and the trace gets a plain name in the root.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replayscope.inspector import cli
from replayscope.inspector.engines import ENGINES
from replayscope.inspector.errors import UsageError
from replayscope.inspector.listing import models
from replayscope.inspector.names import choose
from replayscope.inspector.samples import SAMPLES
from replayscope.inspector.specs import parse_count

OWN_TEXT = "own text"
PRECISIONS = ("fp32", "fp64", "bf16")
MOST_TEXT = 2_000_000  # characters
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True)
class Form:
    """A sweep as it was typed: every field is text that nobody has checked, or a tick."""

    model: str
    sample: str
    text: str
    tokens: str
    cuts: str
    replay: str
    suffix: str
    semantics: Sequence[str]
    precision: str
    audit: bool
    rows: bool
    name: str


@dataclass(frozen=True)
class Command:
    """words: after `replayscope`. out: name of the trace in the root. text: for standard input."""

    words: tuple[str, ...]
    out: str
    text: str


def command(form: Form, root: Path) -> Command:
    """The command line of a form. Raises UsageError that names the field and what would be valid."""
    model, sample = str(form.model or ""), str(form.sample or "")
    choose("model", model, model_names(root))
    choose("text", sample, [*SAMPLES, OWN_TEXT])
    text = _text(form) if sample == OWN_TEXT else ""
    prompt = text if text.startswith("ids:") else "-" if sample == OWN_TEXT else sample
    words = ["sweep", f"--model={model}", f"--prompt={prompt}"]
    # With "=" nothing that was typed can become an option of its own.
    for name in ("cuts", "replay", "suffix"):
        if typed := str(getattr(form, name) or "").strip():
            words.append(f"--{name}={typed}")
    if tokens := str(form.tokens or "").strip():
        words.append(f"--tokens={parse_count(tokens, 'tokens', least=1)}")
    for name in form.semantics or ():
        choose("semantics", str(name), list(ENGINES))
    words.append(f"--semantics={','.join(form.semantics or ['paper'])}")
    words.append(f"--dtype={choose('precision', str(form.precision), list(PRECISIONS))}")
    words += [f"--{name}" for name in ("audit", "rows") if getattr(form, name) is True]
    out = _out(str(form.name or "").strip(), root)
    words.append(f"--out={out}")
    cli.parse(words)
    if form.audit is True and form.precision == "bf16":
        raise UsageError("an audit needs fp64 or fp32: in bf16 rounding hides what it looks for")
    return Command(tuple(words), out, "" if text.startswith("ids:") else text)


def asking(one: Command) -> Command:
    """The same command with a limit of one byte: it says what the run would cost, and is refused before it writes."""
    return Command((*one.words, "--max-bytes=1"), one.out, one.text)


def model_names(root: Path) -> list[str]:
    """The presets, and folders with a checkpoint under the root."""
    found = [*models()]
    for pattern in ("*/config.json", "*/*/config.json"):
        for path in sorted(root.glob(pattern)):
            if path.resolve().is_relative_to(root):
                found.append(path.parent.relative_to(root).as_posix())
    return found


def free_name(root: Path) -> str:
    """A name for the next trace: none that a run has, or had when it was stopped."""
    taken = {path.name.removesuffix(".partial") for path in root.glob("run-*.h5*")}
    return next(f"run-{i}" for i in range(1, 1_000_000) if f"run-{i}.h5" not in taken)


def _text(form: Form) -> str:
    text = str(form.text or "")
    if not text.strip():
        raise UsageError("own text is empty; write some, or choose one of the samples")
    if len(text) > MOST_TEXT:
        raise UsageError(f"own text has {len(text):,} characters; give at most {MOST_TEXT:,}")
    return text


def _out(name: str, root: Path) -> str:
    name = name.removesuffix(".h5")
    if not _NAME.fullmatch(name):
        raise UsageError("the trace needs a plain name of letters, digits and . _ + -, without a folder")
    if (root / f"{name}.h5").exists():
        raise UsageError(f"{name}.h5 is there already; give the trace another name")
    if not os.access(root, os.W_OK):
        raise UsageError("this server may not write into its folder; start a sweep on the command line")
    return f"{name}.h5"
