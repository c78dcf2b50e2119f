"""The n-gram baseline against counting by hand."""

import math

import pytest

from replayscope.model.ngram import NGram


def by_hand(text: bytes, context: bytes, byte: int) -> float:
    p = 1 / 256
    for n in range(len(context) + 1):
        h = context[len(context) - n :]
        follow = [text[i + n] for i in range(len(text) - n) if text[i : i + n] == h]
        kinds = len(set(follow))
        if follow:
            p = (follow.count(byte) + kinds * p) / (len(follow) + kinds)
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_are_those_counted_by_hand(order):
    text, asked = b"abracadabra, abacus and cadaver; abracadabra.", b"a cadabra abaz"
    want = [-math.log2(by_hand(text, asked[i - order + 1 : i], asked[i])) for i in range(order - 1, len(asked))]
    assert NGram(text, order).bits_per_byte(asked) == pytest.approx(sum(want) / len(want), rel=1e-12)


def test_repetition_costs_little_and_noise_costs_eight_bits():
    model = NGram(b"abcdefgh" * 500)
    assert model.bits_per_byte(b"abcdefgh" * 10) < 0.02
    assert model.bits_per_byte(bytes(range(128, 256))) > 7.9
