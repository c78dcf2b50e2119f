"""The embedded texts: long enough, really what they claim, and held out of the training corpus."""

import ast
import json
import lzma
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from replayscope.inspector.samples import SAMPLES, load
from replayscope.model.tokenizer import encode

CORPUS = Path(__file__).parents[1] / "model" / "corpus"


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_longer_than_2500_tokens(name):
    assert len(encode(load(name))) >= 2500


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_listed_with_its_source(name):
    sources = files("replayscope.inspector").joinpath("samples", "SOURCES.md").read_text(encoding="utf-8")
    assert SAMPLES[name].file in sources
    assert SAMPLES[name].source


def test_unknown_sample_names_the_valid_ones():
    with pytest.raises(KeyError, match="prose, code, tools"):
        load("poem")


def test_code_sample_is_python():
    assert any(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(load("code"))))


def test_tool_log_has_one_result_for_each_call():
    lines = [json.loads(line) for line in load("tools").splitlines()]
    calls, results = lines[0::2], lines[1::2]
    assert all("call" in c and "result" in r and c["id"] == r["id"] for c, r in zip(calls, results, strict=True))


def shared_run(corpus: bytes, text: bytes, size: int = 100) -> bytes | None:
    """A run of ``size`` bytes that both hold, or None. ``size`` must be even."""
    half = size // 2
    runs = {text[i : i + size] for i in range(len(text) - size + 1)}
    halves = {text[i : i + half] for i in range(len(text) - half + 1)}
    # A shared run covers a whole block of half its size wherever it lies, so only blocks need to be looked up.
    for at in range(0, len(corpus) - half + 1, half):
        if corpus[at : at + half] in halves:
            for start in range(max(0, at - half), at + 1):
                if corpus[start : start + size] in runs:
                    return corpus[start : start + size]
    return None


def test_no_100_bytes_of_a_sample_are_in_the_training_corpus():
    corpus = b"\0".join(lzma.decompress(p.read_bytes()) for p in sorted(CORPUS.glob("*.xz")))
    assert len(corpus) > 5_000_000
    for name in SAMPLES:
        text = load(name).encode()
        assert shared_run(corpus, text) is None
        # Planted: the last 100 bytes of the sample, at a place that is no multiple of anything.
        assert shared_run(corpus[:12_347] + text[-100:] + corpus[12_347:50_000], text) == text[-100:]


def test_needs_no_torch():
    code = "import sys, replayscope.inspector.samples as s; s.load('prose'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
