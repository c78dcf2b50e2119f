"""Byte tokens: lossless, printable one by one, and strict about what is not a token."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayscope.model import tokenizer


@given(st.text())
def test_text_survives_encode_and_decode(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_byte_is_one_token():
    assert tokenizer.encode("Aé\n") == [65, 0xC3, 0xA9, 10]


def test_every_id_has_a_printable_text_of_its_own():
    texts = tokenizer.token_texts(range(tokenizer.VOCAB_SIZE))
    assert len(texts) == 264 == len(set(texts))
    assert all(t.isprintable() for t in texts)
    assert tokenizer.token_texts([65, 10, 0xC3, 0, tokenizer.BOS]) == ["A", "\\n", "\\xC3", "\\x00", "<bos>"]


def test_decode_leaves_specials_out_and_marks_broken_characters():
    assert tokenizer.decode([tokenizer.BOS, 72, 105, tokenizer.EOS]) == "Hi"
    assert tokenizer.decode([0xC3, 65]) == "\N{REPLACEMENT CHARACTER}A"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("bad", [-1, 264, 100_000])
def test_an_id_outside_the_vocabulary_is_named(bad):
    with pytest.raises(ValueError, match=str(bad)):
        tokenizer.decode([65, bad])
    with pytest.raises(ValueError, match="0 … 263"):
        tokenizer.token_texts([bad])


def test_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(ValueError, match="character 2"):
        tokenizer.encode("ab\ud800")


def test_needs_no_torch():
    code = "import sys, replayscope.model.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
