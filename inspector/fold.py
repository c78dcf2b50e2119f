"""Divergence, folded while a layer is hot: row sums of every run, reduced to regions and distance bins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from replayscope.inspector.cores import each
from replayscope.inspector.segments import Segments, pick
from replayscope.inspector.semantics import NOISE
from replayscope.kernels.divergence import TOL_ABS, TOL_REL, logits_rows, row_sums
from replayscope.kernels.impl import choose
from replayscope.traces.schema import SINGLE_POINTS, RunInfo, Table, bucket_names, distance_bins, kind_of, relative_l2

Arrays = dict[str, np.ndarray]
Job = Callable[[], dict[str, Tensor]]
TOP_K = 5
# Numbers of each side compared at once: few enough that their float64 copies stay in the cache, and so many that
# threads spend their time on them and not on waiting for Python's lock. Blocks of a fourth took longer, as did larger.
_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24
# A margin that no noise run moved is still only known to rounding; relative to the layer's largest margin.
_MARGIN_EPS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
# Two codes for the same scores were seen to move margins by 30 such shares. Where full and its oracle differ by more
# than a hundred, that is no rounding: a fault that full has too must not excuse what it changes.
_SHARED = 100
_SUMS = ("diff2", "ref2", "arm2", "dot", "over", "nonfinite")
_COUNTS = ("over", "nonfinite")
_ROW_ARRAYS = {"n", "diff2", "ref2", "arm2", "dot", "max_abs", "nonfinite", "changed", "flips", "jaccard",
               "kl_sum", "kl_rev_sum", "js_sum", "dlogp_sum", "overlap"}  # fmt: skip


class Piece(NamedTuple):
    """Consecutive rows of an arm beside those of a reference: from row ``arm`` and row ``ref`` of their tensors on.

    runs: the runs of the trace that they belong to; a noise run is looked at once for each cut. position [rows].
    """

    runs: tuple[int, ...]
    arm: int
    ref: int
    position: np.ndarray


@dataclass(frozen=True)
class Pairs:
    """Pieces laid one after another. arm, ref [rows] int64: rows of the two tensors; noisy [rows]: of full or of a
    noise run, which should equal the reference."""

    segments: Segments
    arm: Tensor
    ref: Tensor
    noisy: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.noisy)

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """arm and ref on a device."""
        return self.arm.to(device), self.ref.to(device)


class Side(NamedTuple):
    """values [rows, …] of a hook point, whole as they were computed; margin [rows] beside discrete choices."""

    values: Tensor
    margin: Tensor | None = None


class Group(NamedTuple):
    """Hook points of one kind, in one layer, that are compared at the same rows with one reference.

    exact [rows] bool. points: name → arm and reference, at least one.
    """

    reference: str
    pairs: Pairs
    exact: np.ndarray
    points: Mapping[str, tuple[Side, Side]]

    @property
    def kind(self) -> str:
        return kind_of(next(iter(self.points)))


@dataclass
class Fold:
    """Collects tables for the given runs. ``keep_rows``: points whose divergence is also kept row by row.
    ``impl``: auto, torch or triton, which reads the rows where they lie; auto goes by the device that they lie on.

    margin_scale: (point, layer) → largest finite margin of full, of which rounding moves a small share. margin_floor:
    (reference, point, layer) → the largest change that full or a noise run has made to a margin there so far. checks:
    run → cached entries whose bytes were compared, and those that differed.
    """

    runs: list[RunInfo]
    layers: int
    following: np.ndarray
    dtype: torch.dtype
    keep_rows: frozenset[str] = frozenset()
    impl: str = "torch"
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)
    rows: dict[tuple[str, str], dict[int, dict[int, tuple[np.ndarray, Arrays]]]] = field(default_factory=dict)
    margin_scale: dict[tuple[str, int], float] = field(default_factory=dict)
    margin_floor: dict[tuple[str, str, int], float] = field(default_factory=dict)
    checks: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest = max(r.stop - r.start for r in self.runs)
        self.buckets, self._bins = bucket_names(longest), distance_bins(longest)

    def pairs(self, pieces: Sequence[Piece]) -> Pairs:
        """What ``add`` needs to know of some pieces, made once for all points and layers that share them."""
        views = [([self.runs[i] for i in p.runs], p.position) for p in pieces]
        arm, ref = (
            torch.cat([torch.arange(at, at + len(p.position)) for at, p in zip(starts, pieces, strict=True)])
            for starts in ([p.arm for p in pieces], [p.ref for p in pieces])
        )
        noisy = np.concatenate([np.full(len(p.position), self.runs[p.runs[0]].arm in ("full", *NOISE)) for p in pieces])
        return Pairs(Segments.of(views, self._bins), arm, ref, noisy)

    def add(self, layer: int, groups: Sequence[Group]) -> None:
        """Fold arm and reference of some groups, in their order, in one layer (0 outside the layers)."""
        jobs = [[self._jobs(g, *sides) for sides in g.points.values()] for g in groups]
        device = next((side.values.device for g in groups for side, _ in g.points.values()), torch.device("cpu"))
        # The blocks of all points side by side: a point has too few of them to keep the cores busy to its end. Each on
        # one torch thread, for none has so many numbers that another would help.
        flat = [job for points in jobs for blocks in points for job in blocks]
        done = iter(each(lambda job: job(), flat, device, alone=True))
        for g, points in zip(groups, jobs, strict=True):
            self._fold(layer, g, [_joined([next(done) for _ in blocks]) for blocks in points])

    def _fold(self, layer: int, g: Group, by_point: list[Arrays]) -> None:
        """A group's rows into its cells; by_point: of each point, by name [rows]."""
        if g.kind == "discrete":
            by_point = [self._flips(g, p, layer, r) for p, r in zip(g.points, by_point, strict=True)]
        rows = {name: np.stack([one[name] for one in by_point]) for name in by_point[0]}
        cells = {"state": _state_cells, "discrete": _discrete_cells, "logits": _logits_cells}[g.kind](
            rows, g.pairs.segments, g.exact
        )
        for i, point in enumerate(g.points):
            self._store(g, point, layer, {k: v[i] for k, v in cells.items()})
            if point in self.keep_rows:
                self._keep(g, point, layer, {k: v[i] for k, v in rows.items()})

    def packed_rows(self, reference: str, point: str) -> tuple[np.ndarray, np.ndarray, Arrays]:
        """offsets [run+1], position [row], arrays [layer, row] of a point whose rows were kept; n = 0 where absent."""
        by_run = self.rows[reference, point]
        positions = [
            max((p for p, _ in by_run[r.index].values()), key=len) if r.index in by_run else np.zeros(0, np.int64)
            for r in self.runs
        ]
        offsets = np.cumsum([0, *map(len, positions)])
        depth = 1 if point in SINGLE_POINTS else self.layers
        out: Arrays = {"n": np.zeros((depth, offsets[-1]), np.uint8)}
        for run, by_layer in by_run.items():
            for layer, (position, arrays) in by_layer.items():
                where = offsets[run] + np.searchsorted(positions[run], position)
                for name, values in arrays.items():
                    out.setdefault(name, np.zeros((depth, offsets[-1]), values.dtype))[layer, where] = values
        return offsets, np.concatenate(positions), out

    def _jobs(self, g: Group, arm: Side, ref: Side) -> list[Job]:
        """What computes the numbers of the rows, by name [rows], block by block."""
        kind, pairs, device = g.kind, g.pairs, arm.values.device
        at, impl = pairs.to(device), choose(self.impl, device, self.dtype).impl
        values = (arm.values, at[0]), (ref.values, at[1])
        if kind == "state":
            if impl == "triton":
                return [lambda: row_sums(arm.values, ref.values, impl=impl, pairs=at)]
            return _blocks(row_sums, *values)
        if kind == "logits":
            following = torch.as_tensor(self.following[pairs.segments.position], device=device)
            if impl == "triton":
                return [
                    lambda: (
                        row_sums(arm.values, ref.values, impl=impl, pairs=at)
                        | logits_rows(arm.values, ref.values, following, TOP_K, impl, at)
                    )
                ]
            rows = torch.arange(pairs.rows, device=device)
            return _blocks(_logits, *values, (following, rows))
        assert arm.margin is not None and ref.margin is not None
        return _blocks(_sets, *values, (arm.margin, at[0]), (ref.margin, at[1]))

    def _flips(self, g: Group, point: str, layer: int, rows: Arrays) -> Arrays:
        """The rows with those that are flips among the changed ones."""
        bound = self._margin_bound(g.reference, point, layer, rows["noise"][g.pairs.noisy])
        # A row without a finite score chose nothing that could be wrong.
        return rows | {"flips": rows["changed"] * ((rows["margin"] <= bound) | np.isnan(rows["margin"]))}

    def _margin_bound(self, reference: str, point: str, layer: int, moved: np.ndarray) -> float:
        """Largest margin that rounding can turn; moved: by how much margins moved in rows that should be equal.

        An arm and its oracle are two codes, whose products differ more than those of two runs of one: what that moves
        is measured by full against its own oracle.
        """
        eps = _MARGIN_EPS[self.dtype] * self.margin_scale.get((point, layer), 0.0)
        if len(moved):
            most = float(moved.max()) if reference == "full" else min(float(moved.max()), _SHARED * eps)
            key = (reference, point, layer)
            self.margin_floor[key] = max(most, self.margin_floor.get(key, 0.0))
        floors = (self.margin_floor.get((name, point, layer), 0.0) for name in {"full", reference})
        return max(10 * max(floors), eps)

    def _keep(self, g: Group, point: str, layer: int, rows: Arrays) -> None:
        where = g.pairs.segments
        kept = {k: v for k, v in rows.items() if k in _ROW_ARRAYS}
        kept["n"] = np.ones(len(where.position), np.uint8)
        by_run = self.rows.setdefault((g.reference, point), {})
        for run, (first, last) in zip(where.runs, where.whole, strict=True):
            piece = slice(first, last)
            by_run.setdefault(int(run), {})[layer] = where.position[piece], {k: v[piece] for k, v in kept.items()}

    def _store(self, g: Group, point: str, layer: int, cells: Arrays) -> None:
        depth = 1 if point in SINGLE_POINTS else self.layers
        attrs = {"state": {"tol_abs": TOL_ABS, "tol_rel": TOL_REL}, "logits": {"top_k": TOP_K}}.get(g.kind, {})
        table = self.tables.setdefault((g.reference, point), Table(g.kind, self.buckets, {}, attrs))
        for name, values in cells.items():
            if name not in table.arrays:
                empty = (
                    np.nan
                    if name.startswith("min_")
                    else -1
                    if name.endswith(("_row", "_col", "_at")) or name == "first_nonfinite"
                    else 0
                )
                table.arrays[name] = np.full((len(self.runs), depth, values.shape[1]), empty, values.dtype)
            table.arrays[name][g.pairs.segments.runs, layer] = values


def _state_cells(rows: Arrays, where: Segments, exact: np.ndarray) -> Arrays:
    """Arrays [points, runs, buckets] (or thresholds) from rows' arrays [points, rows]."""
    points = len(rows["diff2"])
    rel = relative_l2(rows["diff2"], rows["ref2"], 1, rows["nonfinite"])
    # Counts stay below 2^53: float64 holds them exactly, so that one pass sums them all.
    parts = np.zeros((points, len(_SUMS), rel.shape[1] + 1))
    for i, name in enumerate(_SUMS):
        parts[:, i, :-1] = rows[name]
    sums = where.reduce(np.add, parts, exact)
    cells: Arrays = {"n": np.repeat(where.count(exact)[None], points, 0)}
    # All rows of a point are as wide.
    cells["elements"] = cells["n"] * rows["elements"][:, :1, None]
    for i, name in enumerate(_SUMS):
        cells[name] = sums[:, i].astype(np.int64) if name in _COUNTS else sums[:, i]
    cells["max_abs"], top = where.largest(rows["max_abs"], exact)
    cells["max_row"], cells["max_col"] = pick(where.position, top), pick(rows["max_col"], top)
    cells["rel_max"], top = where.largest(rel, exact)
    cells["rel_max_row"] = pick(where.position, top)
    cells["first_nonfinite"] = np.full_like(cells["n"], -1)
    if rows["bad"].any():
        bad = (rows["bad"] > 0).astype(np.float64)
        cells["first_nonfinite"] = pick(where.position, where.largest(bad, exact)[1])
    cells["first_at"], cells["last_at"] = where.crossings(rel)
    return cells


def _discrete_cells(rows: Arrays, where: Segments, exact: np.ndarray) -> Arrays:
    cells: Arrays = {"n": np.repeat(where.count(exact)[None], len(rows["changed"]), 0)}
    cells |= {name: where.reduce(np.add, rows[name], exact) for name in ("changed", "jaccard", "flips")}
    cells["margin_noise"] = where.reduce(np.maximum, rows["noise"], exact)
    margin = np.where(rows["changed"] > 0, rows["margin"], np.inf)
    smallest = where.reduce(np.minimum, margin, exact, np.inf)
    return cells | {"min_margin": np.where(cells["changed"] > 0, smallest, np.nan)}


def _logits_cells(rows: Arrays, where: Segments, exact: np.ndarray) -> Arrays:
    cells = _state_cells(rows, where, exact)
    known = np.isfinite(rows["dlogp"]) | np.isinf(rows["dlogp"])
    values = rows | {"dlogp": np.where(known, rows["dlogp"], 0.0)}
    cells["n_next"] = where.reduce(np.add, known.astype(np.int64), exact)
    for name in ("kl", "kl_rev", "js", "dlogp"):
        cells[f"{name}_sum"] = where.reduce(np.add, values[name], exact)
        cells[f"{name}_max"] = where.reduce(np.maximum, np.abs(values[name]), exact)
        rows[f"{name}_sum"] = values[name]
    cells["max_row"] = pick(where.position, where.largest(rows["kl"], exact)[1])
    rows["flips"] = rows["flip"]
    cells["flips"] = where.reduce(np.add, rows["flip"], exact)
    cells["overlap"] = where.reduce(np.add, rows["overlap"], exact)
    smallest = where.reduce(np.minimum, np.where(rows["flip"] > 0, rows["margin"], np.inf), exact, np.inf)
    return cells | {"min_flip_margin": np.where(cells["flips"] > 0, smallest, np.nan)}


def _blocks(f: Callable[..., dict[str, Tensor]], *gathered: tuple[Tensor, Tensor]) -> list[Job]:
    """f on blocks of rows of each (tensor, rows to take)."""
    first, at = gathered[0]
    numbers = _BLOCK if first.device.type == "cpu" else _GPU_BLOCK
    step = max(numbers // max(first[:1].numel(), 1), 1)

    def block(i: int) -> dict[str, Tensor]:
        return f(*(_rows(x, rows[i : i + step]) for x, rows in gathered))

    return [partial(block, i) for i in range(0, len(at), step)]


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """x[at], only to be read: rows that lie one after another are not copied, which the arm's do mostly."""
    if x.device.type == "cpu":
        first, last = int(at[0]), int(at[-1])
        if last - first == len(at) - 1 and bool((at.diff() == 1).all()):
            return x[first : last + 1]
    return x.index_select(0, at)


def _joined(blocks: Sequence[dict[str, Tensor]]) -> Arrays:
    return {k: torch.cat([b[k] for b in blocks]).cpu().numpy() for k in blocks[0]}


def _logits(a: Tensor, r: Tensor, following: Tensor) -> dict[str, Tensor]:
    return row_sums(a, r) | logits_rows(a, r, following, TOP_K)


def _sets(a: Tensor, r: Tensor, arm_margin: Tensor, ref_margin: Tensor) -> dict[str, Tensor]:
    """Per row of ids [rows, k] (ascending, -1 last): whether the sets differ, their Jaccard index, the margins."""
    changed, known = (a != r).any(-1), a >= 0
    ordered = r.masked_fill(r < 0, torch.iinfo(r.dtype).max)
    # Rows may be views of any layout, of which torch warns.
    at = torch.searchsorted(ordered.contiguous(), a.contiguous()).clamp_(max=max(r.shape[1] - 1, 0))
    shared = ((ordered.gather(1, at) == a) & known).sum(-1)
    total = known.sum(-1) + (r >= 0).sum(-1) - shared
    jaccard = torch.where(total == 0, 1.0, shared.double() / total.clamp(min=1))
    gap = (arm_margin - ref_margin).abs().double()
    both = torch.isfinite(arm_margin) & torch.isfinite(ref_margin)
    return {
        "changed": changed.long(),
        "jaccard": jaccard,
        "margin": ref_margin.double(),
        "noise": torch.where(both, gap, 0.0),
    }
