"""The fold of hot layers against the slow one that says what a table means."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from replayscope.inspector.fold import Fold, Group, Piece, Side
from replayscope.inspector.metrics import state_sums
from replayscope.traces.schema import THRESHOLDS, RunInfo
from tests import folding
from tests.folding import fold as slow_fold


def runs() -> list[RunInfo]:
    base = RunInfo(0, "full", "paper", None, None, 0, 40, 40, 6)
    made = [base, replace(base, index=1, arm="rechunk")]
    for i, (arm, cut, start) in enumerate(
        (("hit", 17, 17), ("encoder", 17, 11), ("encoder", 4, 0), ("encoder", 39, 33))
    ):
        made.append(replace(base, index=i + 2, arm=arm, cut=cut, replay=6, start=start))
    regions = [[[r.start + 9, 40]] if r.start + 9 < 40 else [] for r in made]
    return [replace(r, exact_in=[x, x], exact_out=[x, x]) for r, x in zip(made, regions, strict=True)]


@dataclass
class Part:
    """An arm's rows of one point and layer, and those of the reference."""

    runs: tuple[int, ...]
    arm: torch.Tensor
    ref: torch.Tensor
    position: np.ndarray
    exact: np.ndarray
    arm_margin: torch.Tensor | None = None
    ref_margin: torch.Tensor | None = None


def add(made: Fold, point: str, layer: int, some: list[Part], reference: str = "full") -> None:
    """Fold parts against a reference, as a frame would hold them: the rows of all arms in one tensor."""
    starts = np.cumsum([0, *(len(p.position) for p in some)]).tolist()
    pairs = made.pairs([Piece(p.runs, at, at, p.position) for p, at in zip(some, starts, strict=False)])
    sides = []
    for name in ("arm", "ref"):
        margins = [m for p in some if (m := getattr(p, f"{name}_margin")) is not None]
        sides.append(Side(torch.cat([getattr(p, name) for p in some]), torch.cat(margins) if margins else None))
    exact = np.concatenate([p.exact for p in some])
    made.add(layer, [Group(reference, pairs, exact, {point: (sides[0], sides[1])})])


def parts(layer: int, seed: int = 0) -> list[Part]:
    torch.manual_seed(seed + layer)
    full = torch.randn(40, 5, dtype=torch.float64)
    out = []
    for r in runs()[1:]:
        noise = torch.randn(40 - r.start, 5, dtype=torch.float64) * 10.0 ** torch.randint(-9, 1, (40 - r.start, 1))
        noise[::7] = 0
        position = np.arange(r.start, 40)
        out.append(Part((r.index,), full[r.start :] + noise, full[r.start :], position, position >= r.start + 9))
    out[0].arm[3] = float("nan")
    return out


def test_tables_equal_the_slow_fold():
    made = Fold(runs(), 2, np.full(40, -1), torch.float64, frozenset({"hidden"}))
    packed: list[list[dict]] = [[{} for _ in range(2)] for _ in runs()]
    empty = {k: v[:0] for k, v in state_sums(np.zeros((1, 5)), np.zeros((1, 5))).items()} | {
        "position": np.zeros(0, np.int64)
    }
    for layer in range(2):
        add(made, "hidden", layer, parts(layer))
        packed[0][layer] = empty
        for p in parts(layer):
            packed[p.runs[0]][layer] = {"position": p.position, **state_sums(p.arm.numpy(), p.ref.numpy())}
    got, want = made.tables["full", "hidden"], slow_fold(packed, runs(), "hidden", made.buckets)
    assert set(want.arrays) == set(got.arrays)
    for name, value in want.arrays.items():
        np.testing.assert_allclose(got.arrays[name], value, rtol=1e-12, err_msg=name)
    assert got.arrays["n"][0].sum() == 0 and got.arrays["first_nonfinite"][1, 0, 0] == 3
    offsets, position, rows = made.packed_rows("full", "hidden")
    want_offsets, want_position, want_rows = folding.pack_rows(packed)
    assert (offsets == want_offsets).all() and (position == want_position).all()
    for name in ("n", "diff2", "ref2", "max_abs"):
        np.testing.assert_allclose(rows[name], want_rows[name], rtol=1e-12)


def test_one_planted_row_lights_up_its_cells_and_no_other():
    made = Fold(runs(), 2, np.full(40, -1), torch.float64)
    for layer in range(2):
        clean = parts(layer)
        for p in clean:
            p.arm = p.ref.clone()
            if p.runs == (3,) and layer == 1:
                p.arm[20 - 11, 2] += 0.5
        add(made, "hidden", layer, clean)
    a, buckets = made.tables["full", "hidden"].arrays, made.buckets
    lit = {(r, l, buckets[b]) for r, l, b in zip(*np.nonzero(a["diff2"]), strict=True)}
    # Position 20 of the run with cut 17 and start 11: suffix, exact from 20 on, distance 9.
    assert lit == {(3, 1, b) for b in ("all", "suffix", "exact", "d:8-15")}
    assert a["max_row"][3, 1, 0] == 20 and a["max_col"][3, 1, 0] == 2 and a["rel_max_row"][3, 1, 0] == 20
    above = np.array(THRESHOLDS) < a["rel_max"][3, 1, 0]
    assert (a["first_at"][3, 1] == np.where(above, 20, -1)).all() and (
        a["last_at"][3, 1] == np.where(above, 20, -1)
    ).all()


@pytest.mark.parametrize("bound", ["inside", "outside"])
def test_a_changed_choice_is_a_flip_only_inside_the_margin_floor(bound):
    made = Fold(runs(), 2, np.full(40, -1), torch.float64)
    position, exact = np.arange(40), np.zeros(40, bool)
    ids = torch.arange(120).view(40, 3)
    other = ids.clone()
    other[5, 2] += 1000
    margin = torch.full((40,), 1e-3 if bound == "inside" else 1.0, dtype=torch.float64)
    noisy = Part((1,), ids, ids, position, exact, margin + 1e-3, margin)
    arm = Part((4,), other, ids, position, exact, margin, margin)
    made.margin_scale["topk", 1] = float(margin.max())
    add(made, "topk", 1, [noisy, arm])
    a = made.tables["full", "topk"].arrays
    assert a["changed"][4, 1, 0] == 1 and a["flips"][4, 1, 0] == (1 if bound == "inside" else 0)
    assert a["jaccard"][4, 1, 0] == pytest.approx(39 + 2 / 4) and a["min_margin"][4, 1, 0] == float(margin[5])
    assert np.isnan(a["min_margin"][1, 1, 0]) and a["margin_noise"][1, 1, 0] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("moved", "margin", "flips"),
    [(3e-5, 2e-4, 1), (3e-5, 1e-3, 0), (0.0, 2e-4, 0), (0.5, 5e-4, 1), (0.5, 2e-3, 0)],
    ids=["noise", "above the noise", "no noise", "near tie beside a fault of full", "fault of full"],
)
def test_against_an_oracle_the_noise_of_a_margin_is_what_full_and_its_own_oracle_differ_by(moved, margin, flips):
    """Runs of one code may be equal to the last bit, so that they measure nothing of what two codes differ by."""
    made = Fold(runs(), 2, np.full(40, -1), torch.float32)
    position, exact, ids = np.arange(40), np.zeros(40, bool), torch.arange(120).view(40, 3)
    other = ids.clone()
    other[5, 2] += 1000
    margins = torch.full((40,), margin, dtype=torch.float64)
    made.margin_scale["topk", 1] = 1.0
    same = Part((1,), ids, ids, position, exact, margins, margins)
    add(made, "topk", 1, [same, Part((4,), other, ids, position, exact, margins, margins)])
    full = Part((0,), ids, ids, position, exact, margins + moved, margins)
    add(made, "topk", 1, [full, Part((4,), other, ids, position, exact, margins, margins)], "oracle")
    by_oracle, by_full = (made.tables[name, "topk"].arrays["flips"][4, 1, 0] for name in ("oracle", "full"))
    assert (by_oracle, by_full) == (flips, 0)
