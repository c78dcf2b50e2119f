"""What does not go together is refused by name, before a form is chosen: torch would broadcast what a kernel would read
past the end of."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replayscope.kernels.attention import packed_attention
from replayscope.kernels.compressor import compress_pairs
from replayscope.kernels.divergence import logits_rows, row_sums
from replayscope.kernels.index import candidate_blocks, index_scores, topk_entries
from replayscope.kernels.packed import EntryRows, WindowRows

# Triton itself cannot run on a CPU: a refusal of another kind would show that a form was chosen first.
both = pytest.mark.parametrize("impl", ["torch", "triton"])


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


@both
@pytest.mark.parametrize(
    ("a", "r", "pairs", "says"),
    [
        (zeros(3, 16), zeros(3, 7), None, r"rows of the same shape \[rows, …\], not \[3, 16\] and \[3, 7\]"),
        (zeros(3, 2, 8), zeros(3, 8, 2), None, r"rows of the same shape \[rows, …\], not \[3, 2, 8\] and \[3, 8, 2\]"),
        (zeros(3), zeros(3), None, r"rows of the same shape \[rows, …\], not \[3\] and \[3\]"),
        (zeros(3, 16), zeros(2, 16), None, "as many rows, or pairs of them be named: not 3 and 2"),
        (zeros(3, 16), zeros(1, 16), None, "as many rows, or pairs of them be named: not 3 and 1"),
        (zeros(3, 16), zeros(1, 16), (ids(3), ids(2)), r"pairs\[1\] must be \[3\], not \[2\]"),
        (zeros(3, 16), zeros(1, 16), (ids(3, 1), ids(3)), r"pairs\[0\] must be \[pairs\], not \[3, 1\]"),
    ],
)
def test_row_sums(impl, a, r, pairs, says):
    with pytest.raises(ValueError, match=says):
        row_sums(a, r, impl=impl, pairs=pairs)


@both
@pytest.mark.parametrize(
    ("a", "r", "following", "pairs", "k", "says"),
    [
        (zeros(3, 16), zeros(3, 7), ids(3), None, 5, r"logits \[rows, V\] of one V, not \[3, 16\] and \[3, 7\]"),
        (zeros(3, 0), zeros(3, 0), ids(3), None, 5, r"logits \[rows, V\] of one V, not \[3, 0\] and \[3, 0\]"),
        (zeros(3, 2, 8), zeros(3, 2, 8), ids(3), None, 5, r"logits \[rows, V\] of one V, not \[3, 2, 8\]"),
        (zeros(3, 16), zeros(1, 16), ids(3), None, 5, "as many rows, or pairs of them be named: not 3 and 1"),
        (zeros(3, 16), zeros(3, 16), ids(2), None, 5, r"following must be \[3\], not \[2\]"),
        (zeros(3, 16), zeros(3, 16), ids(3), (ids(2), ids(2)), 5, r"following must be \[2\], not \[3\]"),
        (zeros(3, 16), zeros(3, 16), ids(3), None, 0, "k must be at least 1, not 0"),
    ],
)
def test_logits_rows(impl, a, r, following, pairs, k, says):
    with pytest.raises(ValueError, match=says):
        logits_rows(a, r, following, k, impl, pairs)


AT = ids(3)
ROWS, ENTRIES = WindowRows(AT, AT, AT, AT, AT), EntryRows(ids(3, 2), AT, AT, AT)
ATTENTION = {
    "q": zeros(3, 2, 16), "window_kv": zeros(5, 16), "rows": ROWS, "window": 2, "global_kv": zeros(4, 16),
    "entries": ENTRIES, "sink": zeros(2),
}  # fmt: skip


@both
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": zeros(3, 16)}, r"q must be \[rows, heads, D\], not \[3, 16\]"),
        ({"window_kv": zeros(5, 8)}, r"window_kv must be \[slots, 16\] torch.float32, not \[5, 8\] torch.float32"),
        ({"window_kv": zeros(5, 16).double()}, r"window_kv must be .* torch.float32, not \[5, 16\] torch.float64"),
        ({"window_kv": zeros(0, 16)}, r"window_kv must have slots for the keys of 3 rows, not \[0, 16\]"),
        ({"window": 0}, "window must be at least 1, the row itself, not 0"),
        ({"global_kv": zeros(16)}, r"global_kv must be \[slots, 16\] torch.float32, not \[16\]"),
        ({"sink": zeros(1)}, r"sink must be \[2\], not \[1\]"),
        ({"rows": replace(ROWS, position=ids(2))}, r"rows.position must be \[3\], not \[2\]"),
        ({"rows": replace(ROWS, floor=ids(1))}, r"rows.floor must be \[3\], not \[1\]"),
        ({"rows": replace(ROWS, below=ids(3, 1))}, r"rows.below must be \[3\], not \[3, 1\]"),
        ({"entries": replace(ENTRIES, picks=ids(1, 2))}, r"entries.picks must be \[3, K\], not \[1, 2\]"),
        ({"entries": replace(ENTRIES, kept=ids(1))}, r"entries.kept must be \[3\], not \[1\]"),
        ({"entries": replace(ENTRIES, own=ids(2))}, r"entries.own must be \[3\], not \[2\]"),
    ],
)
def test_packed_attention(impl, change, says):
    with pytest.raises(ValueError, match=says):
        packed_attention(**ATTENTION | change, impl=impl)


def test_rows_and_entries_that_are_not_there_need_no_slots():
    none = ids(0)
    rows = WindowRows(none, none, none, none, none)
    assert packed_attention(zeros(0, 2, 16), zeros(0, 16), rows, 2, None, None, zeros(2)).shape == (0, 2, 16)
    absent = replace(ENTRIES, picks=ENTRIES.picks - 1)
    assert packed_attention(**ATTENTION | {"global_kv": zeros(0, 16), "entries": absent}).shape == (3, 2, 16)


SCORES = {"q": zeros(3, 2, 16), "weights": zeros(3, 2), "keys": [zeros(6, 16)], "seen": ids(3)}


@both
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": zeros(3, 16)}, r"q must be \[rows, h, di\], not \[3, 16\]"),
        ({"weights": zeros(1, 2)}, r"weights must be \[3, 2\] torch.float32, not \[1, 2\]"),
        ({"weights": zeros(3, 2).double()}, r"weights must be \[3, 2\] torch.float32, not \[3, 2\] torch.float64"),
        ({"weights": zeros(3, 2).bfloat16()}, r"weights must be \[3, 2\] torch.float32, not \[3, 2\] torch.bfloat16"),
        ({"seen": ids(1)}, r"seen must be \[3\], not \[1\]"),
        ({"keys": [zeros(6, 16), zeros(6, 8)]}, r"keys must be \[e, 16\] torch.float32, not \[6, 8\]"),
        ({"keys": [zeros(6, 16).bfloat16()]}, r"keys must be \[e, 16\] torch.float32, not \[6, 16\] torch.bfloat16"),
        ({"q": zeros(3, 2, 16).bfloat16()}, r"keys must be \[e, 16\] torch.bfloat16, not \[6, 16\] torch.float32"),
        ({"blocks": ids(1, 2), "size": 2}, r"blocks must be \[3, count\], not \[1, 2\]"),
        ({"blocks": ids(3, 2)}, "blocks must be of at least 1 entry each, not 0"),
    ],
)
def test_index_scores(impl, change, says):
    with pytest.raises(ValueError, match=says):
        index_scores(**SCORES | change, impl=impl)


@both
def test_topk_entries(impl):
    with pytest.raises(ValueError, match=r"scores must be \[rows, E\], not \[5\]"):
        topk_entries(zeros(5), 2, impl)
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        topk_entries(zeros(2, 5), 0, impl)


@both
@pytest.mark.parametrize(
    ("content", "score", "norm", "says"),
    [
        (zeros(1, 3, 4), zeros(1, 3, 4), zeros(4), r"must be \[n, 2, D\], not \[1, 3, 4\]"),
        (zeros(1, 2, 4), zeros(1, 2, 4), zeros(3), r"norm must be \[4\], not \[3\]"),
        (zeros(1, 2, 4), zeros(1, 2, 4), zeros(1), r"norm must be \[4\], not \[1\]"),
        (zeros(1, 2, 4).bfloat16(), zeros(1, 2, 4).bfloat16(), zeros(4), "float32 or float64, not torch.bfloat16 and"),
        (zeros(1, 2, 4), zeros(1, 2, 4).double(), zeros(4), "not torch.float32 and torch.float64"),
    ],
)
def test_compress_pairs(impl, content, score, norm, says):
    with pytest.raises(ValueError, match=says):
        compress_pairs(content, score, norm, 0.0, torch.float32, impl)


def test_nothing_to_index_is_no_fault():
    """Requests of no row and layers of no entry score nothing and choose nothing."""
    some, none = zeros(6, 16), zeros(0, 16)
    assert index_scores(zeros(0, 2, 16), zeros(0, 2), [some], ids(0)).shape == (0, 6)
    assert index_scores(zeros(0, 2, 16), zeros(0, 2), [], ids(0)).shape == (0, 0)
    for keys in ([], [none], [none, none]):
        scores = index_scores(zeros(3, 2, 16), zeros(3, 2), keys, ids(3), ids(3, 2) - 1, 4)
        assert scores.shape == (3, 0) and scores.dtype == torch.float32
        assert candidate_blocks(scores, 4, 2).tolist() == [[-1, -1]] * 3
        chosen, margin = topk_entries(scores, 2)
        assert chosen.tolist() == [[-1, -1]] * 3 and margin.tolist() == [torch.inf] * 3
    assert candidate_blocks(zeros(0, 9), 4, 2).shape == (0, 2)
