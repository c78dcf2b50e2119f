"""A trace in memory with everything that figures and reports ask of a reader."""

from pathlib import Path

import numpy as np

from replayscope.traces import Tokens
from tests.edited import TOKENS, Edited, record
from tests.synthetic import Plant


def memory(*plants: Plant, cuts=(24,), **changes) -> Edited:
    """A trace in memory that a test may change; it keeps no rows."""
    made = record(*plants, cuts=cuts, **changes)
    made.path, made.config = Path("t.h5"), {"kv_source_layer_ids": [2]}
    made.tokens = Tokens(np.arange(TOKENS), ["x"] * TOKENS)
    made.row_points = lambda reference: []
    made.states = list
    return made
