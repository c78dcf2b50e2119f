"""Where the tokens of a prompt come from: a file, standard input, typed text, token ids or an embedded sample."""

import sys
from dataclasses import dataclass
from pathlib import Path

from replayscope.inspector import samples
from replayscope.inspector.errors import UsageError, system_error
from replayscope.inspector.names import nearest
from replayscope.inspector.streams import reason

FORMS = "@FILE, - (standard input), ids:1,2,3, a sample's name, or the text itself"


@dataclass(frozen=True)
class Prompt:
    """kind is `file`, `stdin`, `text`, `ids` or `sample`; value is the path, the text, the ids as typed or the name."""

    kind: str
    value: str

    @property
    def note(self) -> str:
        """What a user who mistyped a sample's name should read, else empty."""
        near = nearest(self.value, samples.SAMPLES) if self.kind == "text" else None
        return f"{self.value!r} is taken as the prompt's text; the sample is called {near!r}" if near else ""

    def read(self) -> str | tuple[int, ...]:
        """The text, or the token ids. Reads the file or standard input.

        Raises UsageError for an empty prompt, a file that cannot be read and bytes that are not UTF-8.
        """
        if self.kind == "ids":
            return _ids(self.value)
        if self.kind == "text":
            return self.value
        if self.kind == "sample":
            return samples.load(self.value)
        name = f"prompt file {self.value}" if self.kind == "file" else "standard input"
        try:
            data = Path(self.value).read_bytes() if self.kind == "file" else sys.stdin.buffer.read()
        except OSError as error:
            why = f"{reason(error)}; give @FILE or the text itself" if self.kind == "stdin" else system_error(error)
            raise UsageError(f"{name} cannot be read: {why}") from None
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{name} is not UTF-8 text (byte {error.start}); give its token ids as ids:…") from None
        if not text:
            raise UsageError(f"{name} is empty; give at least one character")
        return text


def parse_prompt(text: str) -> Prompt:
    """The form of a prompt as typed; nothing is read yet. Raises UsageError for an empty prompt or bad token ids."""
    if text == "-":
        return Prompt("stdin", "-")
    if text.startswith("@"):
        if not text[1:]:
            raise UsageError("@ needs a file name: @FILE")
        # A pipe will do, as the shell's <(command) is one: it is read once.
        path = Path(text[1:])
        if not path.exists():
            raise UsageError(f"no prompt file {text[1:]!r}; give the path of a file")
        if not (path.is_file() or path.is_fifo()):
            what = "a folder" if path.is_dir() else "a device"
            raise UsageError(f"prompt file {text[1:]!r} is {what}; give the path of a file, or - for standard input")
        return Prompt("file", text[1:])
    if text.startswith("ids:"):
        _ids(text[4:])
        return Prompt("ids", text[4:])
    if text in samples.SAMPLES:
        return Prompt("sample", text)
    if not text:
        raise UsageError(f"the prompt is empty; give {FORMS}")
    return Prompt("text", text)


def _ids(text: str) -> tuple[int, ...]:
    """Token ids between commas; whether the vocabulary has them is for the model to say."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < 10):
            raise UsageError(f"token id {part!r} is not a whole number of 0 or more; write ids:1,2,3")
    return tuple(map(int, parts))
