"""The embedded prompts: three real texts of more than 2,000 tokens each. No torch.

Their sources and terms are in samples/SOURCES.md.
"""

from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Sample:
    """One embedded text: ``file`` in the folder ``samples``, one line of what it is, and where it comes from."""

    file: str
    description: str
    source: str


SAMPLES = {
    "prose": Sample(
        "prose.txt", "English prose: Pride and Prejudice, chapters 1 and 2", "Jane Austen, 1813; public domain"
    ),
    "code": Sample(
        "code.py.txt", "source code: the Python module sched", "CPython 3.11.7, Lib/sched.py; PSF License Version 2"
    ),
    "tools": Sample(
        "tools.json.txt",
        "a JSON tool log: calls and results over source files",
        "executed by model/build_corpus.py over CPython 3.11.7; quoted lines PSF License Version 2",
    ),
}


def load(name: str) -> str:
    """The text of sample ``name``. Raises KeyError, with the valid names, for any other."""
    if name not in SAMPLES:
        raise KeyError(f"no sample {name!r}; there are {', '.join(SAMPLES)}")
    # Read as bytes: the text must be the same on a platform that would translate newlines.
    return files("replayscope.inspector").joinpath("samples", SAMPLES[name].file).read_bytes().decode("utf-8")
