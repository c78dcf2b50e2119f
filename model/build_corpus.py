"""Rebuilds the embedded samples and the training corpus from their public sources; no torch.

    python -m replayscope.model.build_corpus --novels Rdata.rdb --corpus model/corpus --samples inspector/samples

``Rdata.rdb`` is in the Debian package r-cran-janeaustenr 1.0.0 (under usr/lib/R/site-library/janeaustenr/data): six
novels in the public domain. Source code and tool logs come from the standard library of the running Python; the files
in the repository were made with 3.11.7. What a sample shows is held out of the corpus.
"""

import argparse
import json
import lzma
import random
import re
import struct
import sysconfig
import zlib
from pathlib import Path
from typing import Any

STDLIB = Path(sysconfig.get_paths()["stdlib"])
# Title -> the first words of the text in the package. Pride and Prejudice is the sample, so it is not trained on.
CORPUS_NOVELS = {
    "Sense and Sensibility": "The family of Dashwood",
    "Emma": "Emma Woodhouse, handsome",
    "Northanger Abbey": "THIS little work",
    "Persuasion": "Sir Walter Elliot",
}
SAMPLE_NOVEL = "It is a truth universally acknowledged"
SAMPLE_CODE = "sched.py"
SAMPLE_TOOL_DIRS = ("json", "wsgiref")
LOG_DIRS = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
    "ctypes",
    "dbm",
    "tkinter",
    "xmlrpc",
    "zoneinfo",
)
CODE_DIRS = (".", "asyncio", "collections", "email", "http", "logging", "unittest", "importlib")
LARGEST_MODULE = 40_000  # bytes; longer ones are mostly tables, or would be most of the corpus
HEADER = (
    "# From the Python 3.11.7 standard library, Lib/{name}, unchanged below this line.\n"
    "# Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved. "
    "Licence: PSF License Version 2.\n"
)


def novels(rdb: Path) -> list[str]:
    """The texts in an R lazy-load database of string vectors, one string per novel, lines joined by newlines."""
    data, texts = rdb.read_bytes(), []
    while data:
        stream = zlib.decompressobj()
        block = stream.decompress(data[4:])
        data = stream.unused_data
        lines, at = [], 14
        while at + 8 <= len(block):
            flags, size = struct.unpack(">Ii", block[at : at + 8])
            # A string is (flags, length, bytes) with type 9 in the low byte of its flags.
            if flags & 0xFF == 9 and -1 <= size < 2000:
                lines.append(block[at + 8 : at + 8 + max(size, 0)].decode("utf-8"))
                at += 8 + max(size, 0)
            else:
                at += 4
        texts.append("\n".join(lines))
    return texts


def starting_at(texts: list[str], words: str) -> str:
    """The one text with ``words``, cut to begin there."""
    (text,) = [t for t in texts if words in t]
    return text[text.index(words) :]


class Tools:
    """Read-only calls over one folder, and the log of what was asked and answered, as JSON lines."""

    def __init__(self, root: Path) -> None:
        self.root, self.lines, self.calls = root, [], 0

    def call(self, name: str, **args: Any) -> Any:
        self.calls += 1
        result = getattr(self, "_" + name)(**args)
        self.lines.append(json.dumps({"id": self.calls, "call": name, "args": args}))
        self.lines.append(json.dumps({"id": self.calls, "result": result}))
        return result

    def _text(self, path: str) -> list[str]:
        return (self.root / path).read_text(encoding="utf-8").splitlines()

    def _list_dir(self, path: str) -> list[str]:
        return sorted(p.name for p in (self.root / path).glob("*.py"))

    def _stat(self, path: str) -> dict[str, int]:
        return {"bytes": (self.root / path).stat().st_size, "lines": len(self._text(path))}

    def _grep(self, path: str, pattern: str, limit: int) -> list[dict[str, Any]]:
        hits = [(n, t) for n, t in enumerate(self._text(path), 1) if re.search(pattern, t)]
        return [{"line": n, "text": t} for n, t in hits[:limit]]

    def _read_lines(self, path: str, start: int, count: int) -> list[str]:
        return self._text(path)[start - 1 : start - 1 + count]

    def _count_word(self, path: str, word: str) -> int:
        return len(re.findall(rf"\b{re.escape(word)}\b", "\n".join(self._text(path))))


def tool_log(folder: str, seed: int, rounds: int) -> str:
    """``rounds`` looks into files of one folder; every call after the listing uses something an earlier result said."""
    rng, tools = random.Random(seed), Tools(STDLIB)
    files = tools.call("list_dir", path=folder)
    for _ in range(rounds):
        path = f"{folder}/{rng.choice(files)}"
        stat = tools.call("stat", path=path)
        pattern = rng.choice([r"^\s*def ", r"^class ", r"^import |^from ", r"\breturn\b", r"\braise\b"])
        hits = tools.call("grep", path=path, pattern=pattern, limit=rng.randint(2, 5))
        if hits:
            hit = rng.choice(hits)
            tools.call("read_lines", path=path, start=hit["line"], count=rng.randint(2, 6))
            words = re.findall(r"[A-Za-z_]{4,}", hit["text"])
            if words:
                tools.call("count_word", path=path, word=rng.choice(words))
        elif stat["lines"]:
            tools.call("read_lines", path=path, start=1, count=min(3, stat["lines"]))
    return "\n".join(tools.lines) + "\n"


def code_files() -> list[str]:
    """Corpus modules, relative to the standard library: neither the code sample nor what the tool sample looks into."""
    found = sorted(p for d in CODE_DIRS for p in (STDLIB / d).glob("*.py"))
    return [
        str(p.relative_to(STDLIB)) for p in found if p.name != SAMPLE_CODE and 1000 < p.stat().st_size <= LARGEST_MODULE
    ]


def shingles(text: bytes, size: int = 100) -> set[bytes]:
    """Every run of ``size`` bytes of ``text``."""
    return {text[i : i + size] for i in range(len(text) - size + 1)}


def build(rdb: Path, corpus: Path, samples: Path) -> None:
    """Writes three samples and three ``.xz`` parts; documents of a part are separated by a NUL byte."""
    texts = novels(rdb)
    prose = starting_at(texts, SAMPLE_NOVEL)
    held_out = {
        "prose.txt": prose[: prose.index("\n\nChapter 3")].strip() + "\n",
        "code.py.txt": HEADER.format(name=SAMPLE_CODE) + (STDLIB / SAMPLE_CODE).read_text(encoding="utf-8"),
        "tools.json.txt": "".join(tool_log(d, seed=11, rounds=5) for d in SAMPLE_TOOL_DIRS),
    }
    for name, text in held_out.items():
        (samples / name).write_text(text, encoding="utf-8")
    parts = {
        "prose": [starting_at(texts, words).strip() + "\n" for words in CORPUS_NOVELS.values()],
        "code": [(STDLIB / name).read_text(encoding="utf-8") for name in code_files()],
        "logs": [tool_log(d, seed, rounds=6) for seed in range(16) for d in LOG_DIRS],
    }
    forbidden = set().union(*(shingles(t.encode()) for t in held_out.values()))
    for name, documents in parts.items():
        # A document that shares 100 bytes with a sample is left out whole.
        kept = [d for d in documents if forbidden.isdisjoint(shingles(d.encode()))]
        raw = "\0".join(kept).encode()
        (corpus / f"{name}.txt.xz").write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
        print(f"{name}: {len(kept)} of {len(documents)} documents, {len(raw)} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rebuilds the embedded samples and the training corpus.")
    for option in ("--novels", "--corpus", "--samples"):
        parser.add_argument(option, type=Path, required=True)
    options = parser.parse_args()
    build(options.novels, options.corpus, options.samples)
