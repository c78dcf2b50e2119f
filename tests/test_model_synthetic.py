"""Synthetic tasks: the answers are right, and the weights mark exactly the bytes that can be known."""

import random
import re

import numpy as np

from replayscope.model import synthetic, train_data

TEXT = np.frombuffer(b"the quick brown fox " * 60, np.uint8)


def test_a_question_repeats_what_was_said():
    rng = random.Random(1)
    for said, asked in (synthetic.passkey(rng), synthetic.recall(rng, "apple"), synthetic.copy(rng)):
        assert said.payload == asked.payload
        assert (said.known, asked.known) == (False, True)


def test_a_chain_adds_modulo_ten():
    pieces = synthetic.chain(random.Random(2), 50)
    state = int(pieces[0].payload)
    for piece in pieces[1:]:
        state = (state + int(re.search(r"add (\d)", piece.before)[1])) % 10
        assert piece.payload == str(state)


def test_weights_mark_the_answer_and_the_noise():
    said, asked = synthetic.passkey(random.Random(3))
    ids, weights = train_data.with_pieces(TEXT, [(10, said), (200, asked)])
    text = bytes(ids.tolist()).decode()
    assert "".join(text[i] for i in np.flatnonzero(weights == train_data.ANSWER_WEIGHT)) == asked.payload
    assert "".join(text[i] for i in np.flatnonzero(weights == 0)) == said.payload
    assert text.index(said.text) == 10
    assert text.index(asked.text) == 200
    assert text.replace(said.text, "").replace(asked.text, "") == bytes(TEXT.tolist()).decode()


def test_questions_come_after_what_they_ask_for_and_reach_far():
    rng, distances = random.Random(4), []
    for _ in range(300):
        seen = {}
        for place, piece in synthetic.insertions(rng, 1024):
            assert 0 <= place < 1024 + 8 * 60
            if not piece.known:
                seen[piece.payload] = place
            elif "add" not in piece.before:
                distances.append(place - seen[piece.payload])
    assert min(distances) >= 0
    assert np.mean(np.array(distances) > 256) > 0.2


def test_a_batch_is_the_same_for_the_same_seed_and_step():
    corpus = train_data.Corpus(dict.fromkeys(train_data.MIX, TEXT))
    first, again, other = (train_data.batch(corpus, 7, step, 4, 128) for step in (5, 5, 6))
    assert first[0].shape == (4, 129)
    assert first[1].shape == (4, 128)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
