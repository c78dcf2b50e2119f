"""The exact region: which rows an arm must reproduce, found by pushing booleans through the layer schedule."""

import numpy as np

from replayscope.inspector.geometry import Geometry
from replayscope.inspector.plan import Request

Intervals = list[tuple[int, int]]


def exact_rows(config: Geometry, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """enters, leaves: bool [layers, rows] for positions start … stop-1 of a right arm, against ``full``.

    enters[l] says that what enters layer l (``attn_in``, ``window_kv``) must be equal, leaves[l] what leaves it
    (``attn_out``, ``hidden``). Rows that a layer does not run are False. A row leaves exact if it entered exact and, as
    far as the layer has a window and global entries, every window key of an ordinary prefill is there and exact and
    every global entry that it may select from is clean.
    """
    r, L, W = request, config.num_hidden_layers, config.sliding_window
    rows = r.stop - r.start
    position = np.arange(r.start, r.stop)
    enters, leaves = np.zeros((L, rows), bool), np.zeros((L, rows), bool)
    exact = np.ones(rows, bool)
    clean: dict[int, np.ndarray] = {}
    keys: dict[int, np.ndarray] = {}
    # Below the start the owner of the window slots decides; only full's own window is the right one.
    below_ok = r.window_owner == "full"
    for l in config.layers:
        ratio = config.compress_ratios[l]
        enters[l] = exact & (position >= r.projected(l))
        if l in config.kv_source_layer_ids:
            clean[l] = _clean_entries(r, ratio, enters[l])
        out = enters[l] & (position >= r.first_row[l])
        owner = config.window_source(l)
        if owner == l:
            keys[l] = np.full(r.stop, below_ok)
            keys[l][r.start :] = enters[l] & (position >= r.first_window[l])
        if owner is not None:
            bad = np.concatenate(([0], np.cumsum(~keys[owner])))
            first_key = np.maximum(position - W + 1, 0)
            floor = np.zeros(rows, np.int64)
            for row, value in r.floors(l):
                floor[max(row - r.start, 0) :] = value
            out &= (first_key >= floor) & (bad[position + 1] == bad[first_key])
        source = config.kv_source(l)
        if source is not None:
            dirty = np.concatenate(([0], np.cumsum(~clean[source])))
            out &= dirty[(position + 1) // ratio] == 0
        leaves[l] = exact = out
    return enters, leaves


def _clean_entries(r: Request, ratio: int, enters: np.ndarray) -> np.ndarray:
    """bool [entries]: kept ones are clean, own ones are if every row they pool entered exact."""
    entries = r.stop // ratio
    rows = np.concatenate((np.ones(r.start, bool), enters))[: entries * ratio].reshape(entries, ratio)
    ok = np.logical_and.reduce(rows, axis=1)
    ok[: r.kept_entries(ratio)] = True
    return ok


def intervals(mask: np.ndarray, offset: int) -> Intervals:
    """Maximal runs of True in mask [rows] as [first, last+1) positions, the first row being at ``offset``."""
    edge = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a) + offset, int(b) + offset) for a, b in zip(edge[::2], edge[1::2], strict=True)]
