"""How a matrix speaks to a model: prompts and answers as its token ids, and what it produces as text. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
# What text in the middle of a prompt may be read behind without growing together with it.
_ANCHORS = ("\n", "a")
# So many of a prompt's last tokens are enough to read on from.
_TAIL = 8


@dataclass(frozen=True)
class Text:
    """encode: a prompt's token ids, with what begins one. decode: the text of some. filler: of the prompts.
    unknown: the id that stands for what the tokenizer cannot say, if it has one.

    As it stands, of a tokenizer whose tokens are bytes, which never grow together.
    """

    encode: Encode
    decode: Decode
    filler: str
    unknown: int | None = None

    def asked(self, prompt: str) -> tuple[str, str]:
        """The prompt that is given, and what of it is left to the answer to begin with."""
        return prompt, ""

    def inside(self, text: str) -> list[int]:
        """Token ids of text that goes on behind other text."""
        return self.encode(text)

    def said(self, before: Sequence[int], ids: list[int]) -> str:
        """The text of ``ids`` that were produced behind those of ``before``."""
        return self.decode(ids)


class TokenText(Text):
    """Of a model's own tokenizer, whose tokens hold several characters, a leading space among them."""

    def asked(self, prompt: str) -> tuple[str, str]:
        """Spaces at the end belong to the answer's first token, where such tokenizers have seen them."""
        stem = prompt.rstrip(" ")
        return stem, prompt[len(stem) :]

    def inside(self, text: str) -> list[int]:
        for anchor in _ANCHORS:
            before, both = self.encode(anchor), self.encode(anchor + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        whole = self.encode(text)
        return whole[shared(self.encode(""), whole) :]

    def said(self, before: Sequence[int], ids: list[int]) -> str:
        """Without leading spaces, which the tokenizer may give to either side."""
        tail = list(before[-_TAIL:])
        known, whole = self.decode(tail), self.decode(tail + ids)
        return (whole[len(known) :] if whole.startswith(known) else self.decode(ids)).lstrip(" ")


def of_tokenizer(tokenizer: Any, filler: str) -> TokenText:
    """The text of a Hugging Face tokenizer: its special tokens begin a prompt, none ends it, none is in the output."""

    def encode(text: str) -> list[int]:
        ids = list(tokenizer(text)["input_ids"])
        while ids and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        return ids

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return TokenText(encode, decode, filler, tokenizer.unk_token_id)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of their first tokens two texts have in common: what a prefix cache would find of one for the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
