"""Byte-level tokens: ids 0-255 are the bytes of the UTF-8 text, 256-263 are specials. No torch.

One byte is one token, so a cut at token H is a cut at byte H, and no merge table decides where a cut may fall.
"""

from collections.abc import Sequence

BOS, EOS, PAD = 256, 257, 258
# The last five have no meaning yet; they make the vocabulary a multiple of 8.
SPECIALS = ("<bos>", "<eos>", "<pad>", "<special:3>", "<special:4>", "<special:5>", "<special:6>", "<special:7>")
VOCAB_SIZE = 256 + len(SPECIALS)
_ESCAPES = {9: "\\t", 10: "\\n", 13: "\\r"}


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of ``text`` as ids; no special is added. Raises ValueError for a lone surrogate."""
    try:
        return list(text.encode("utf-8"))
    except UnicodeEncodeError as e:
        raise ValueError(f"character {e.start} of the text is a lone surrogate, which UTF-8 cannot hold") from None


def decode(ids: Sequence[int]) -> str:
    """The text of ``ids``: specials are left out, bytes that are not valid UTF-8 become U+FFFD.

    The ids are the source of truth: decoding is lossless only for whole characters. Raises ValueError for an id
    outside the vocabulary.
    """
    return bytes(i for i in map(_checked, ids) if i < 256).decode("utf-8", errors="replace")


def token_texts(ids: Sequence[int]) -> list[str]:
    """One printable display string per id: ASCII as itself, ``\\n``, ``\\t``, ``\\r``, other bytes as ``\\xNN``."""
    return [_TEXTS[_checked(i)] for i in ids]


def _checked(i: int) -> int:
    if not 0 <= i < VOCAB_SIZE:
        raise ValueError(f"token id {i} is outside the vocabulary 0 … {VOCAB_SIZE - 1}")
    return int(i)


_TEXTS = [chr(i) if 32 <= i < 127 else _ESCAPES.get(i, f"\\x{i:02X}") for i in range(256)] + list(SPECIALS)
