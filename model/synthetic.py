"""Lines that reward looking far back: passkeys, key-value recall, copies, and short chains of local state. No torch.

Each task is (what is said first, what is asked later); the answer is the end of the question, so that the byte before
it is known to the reader. Text between the two is whatever the caller puts there.
"""

import random
from dataclasses import dataclass

NOUNS = (
    "apple bridge candle desert engine forest garden harbor island jacket kettle ladder marble needle orange pencil "
    "quartz ribbon saddle temple umbra velvet window yellow zephyr anchor basket copper dragon falcon"
).split()


@dataclass(frozen=True)
class Piece:
    """A run of text, ``before`` + ``payload`` + ``tail``.

    ``known``: the payload follows from what was said earlier; otherwise nothing predicts it.
    """

    before: str
    payload: str
    tail: str
    known: bool

    @property
    def text(self) -> str:
        return self.before + self.payload + self.tail


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def passkey(rng: random.Random) -> tuple[Piece, Piece]:
    """A four-digit key, and the question for it."""
    key = _digits(rng, 4)
    return Piece("\n[[passkey: ", key, "]]\n", False), Piece("\n[[passkey? ", key, "]]\n", True)


def recall(rng: random.Random, noun: str) -> tuple[Piece, Piece]:
    """A value set for one name among others, and its look-up, in the manner of a tool log."""
    value = _digits(rng, 3)
    return (
        Piece(f'\n{{"set": "{noun}", "value": ', value, "}\n", False),
        Piece(f'\n{{"get": "{noun}", "value": ', value, "}\n", True),
    )


def copy(rng: random.Random) -> tuple[Piece, Piece]:
    """A few words that make no sense together, and the same again."""
    words = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(2, 4))) + " " + _digits(rng, 3)
    return Piece("\n<<copy: ", words, ">>\n", False), Piece("\n<<paste: ", words, ">>\n", True)


def chain(rng: random.Random, steps: int) -> list[Piece]:
    """A state between 0 and 9, then ``steps`` changes to it modulo 10; each piece ends on the new state."""
    state = rng.randrange(10)
    pieces = [Piece("\n(state ", str(state), ")\n", False)]
    for _ in range(steps):
        change = rng.randint(1, 9)
        state = (state + change) % 10
        pieces.append(Piece(f"\n(add {change} gives ", str(state), ")\n", True))
    return pieces


def insertions(rng: random.Random, length: int) -> list[tuple[int, Piece]]:
    """Tasks for a text of ``length`` bytes as (place, piece), in order of place.

    Distances are log-uniform from 16 to the length: near ones teach the task, far ones make it global.
    """
    placed: list[tuple[int, Piece]] = []

    def pair(said: Piece, asked: Piece) -> None:
        room = max(16, length - len(said.text) - len(asked.text))
        distance = int(16 * (room / 16) ** rng.random())
        start = rng.randint(0, max(0, room - distance))
        placed.extend([(start, said), (start + distance, asked)])

    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.35 and all("passkey" not in p.before for _, p in placed):
            pair(*passkey(rng))
        elif kind < 0.6 and all("set" not in p.before for _, p in placed):
            for noun in rng.sample(NOUNS, rng.randint(1, 4)):
                pair(*recall(rng, noun))
        elif kind < 0.8 and all("copy" not in p.before for _, p in placed):
            pair(*copy(rng))
        elif all("state" not in p.before for _, p in placed):
            at = rng.randint(0, length // 2)
            for piece in chain(rng, rng.randint(3, 8)):
                placed.append((at, piece))
                at += rng.randint(0, 40)
    return sorted(placed, key=lambda item: item[0])
