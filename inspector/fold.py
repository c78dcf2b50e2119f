"""Divergence, folded while a layer is hot: row sums of every run, reduced to regions and distance bins."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from replayscope.inspector.metrics import ENTERING
from replayscope.inspector.semantics import NOISE
from replayscope.kernels.divergence import TOL_ABS, TOL_REL, logits_rows, row_sums
from replayscope.traces.schema import (
    REGIONS,
    SINGLE_POINTS,
    THRESHOLDS,
    RunInfo,
    Table,
    bucket_names,
    distance_bins,
    kind_of,
    relative_l2,
)

Arrays = dict[str, np.ndarray]
TOP_K = 5
# Rows compared at once: bounds the float64 copies.
_ROWS = 4096
# A margin that no noise run moved is still only known to rounding; relative to the layer's largest margin.
_MARGIN_EPS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
_SUMS = ("elements", "diff2", "ref2", "arm2", "dot", "over", "nonfinite")
_ROW_ARRAYS = {"n", "diff2", "ref2", "arm2", "dot", "max_abs", "nonfinite", "changed", "flips", "jaccard",
               "kl_sum", "kl_rev_sum", "js_sum", "dlogp_sum", "overlap"}  # fmt: skip


@dataclass
class Part:
    """One arm's rows at one point and layer. arm, ref [rows, …]; position [rows] absolute; exact [rows] bool.

    runs: the runs of the trace that these rows belong to; a noise run is looked at once for each cut.
    arm_margin, ref_margin [rows] stand beside discrete choices.
    """

    runs: tuple[int, ...]
    arm: Tensor
    ref: Tensor
    position: np.ndarray
    exact: np.ndarray
    arm_margin: Tensor | None = None
    ref_margin: Tensor | None = None


@dataclass
class _Layout:
    """Where each run's rows lie among the packed rows.

    runs [n]; bounds [n, buckets, 2]: first packed row and last + 1 of each bucket, for ``exact`` those of all rows, of
    which a mask then picks. position [packed rows].
    """

    runs: np.ndarray
    bounds: np.ndarray
    position: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """[n, 2]: the rows of each run."""
        return self.bounds[:, REGIONS.index("all")]


@dataclass
class Fold:
    """Collects tables for the given runs. ``keep_rows``: points whose divergence is also kept row by row.

    margin_scale: (point, layer) → largest finite margin of full, of which rounding moves a small share.
    """

    runs: list[RunInfo]
    layers: int
    following: np.ndarray
    dtype: torch.dtype
    keep_rows: frozenset[str] = frozenset()
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)
    rows: dict[tuple[str, str], dict[int, dict[int, tuple[np.ndarray, Arrays]]]] = field(default_factory=dict)
    margin_scale: dict[tuple[str, int], float] = field(default_factory=dict)
    _margin_floor: dict[tuple[str, int], float] = field(default_factory=dict)
    _layouts: dict[tuple, _Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest = max(r.stop - r.start for r in self.runs)
        self.buckets, self._bins = bucket_names(longest), distance_bins(longest)

    def add(self, reference: str, point: str, layer: int, parts: list[Part]) -> None:
        """Fold the rows of all runs that were compared at this point and layer (0 outside the layers)."""
        parts = [p for p in parts if len(p.position)]
        if not parts:
            return
        lay = self._layout(parts)
        exact = np.concatenate([p.exact for p in parts])
        kind = kind_of(point)
        if kind == "state":
            rows = _by_rows(row_sums, *_sides(parts))
            rel = relative_l2(rows["diff2"], rows["ref2"], np.ones(len(exact)), rows["nonfinite"])
            cells = self._state_cells(rows, rel, lay, exact)
        elif kind == "discrete":
            rows = self._choices(reference, point, layer, parts)
            cells = self._discrete_cells(rows, lay, exact)
        else:
            rows = self._logits(parts, lay)
            rel = relative_l2(rows["diff2"], rows["ref2"], np.ones(len(exact)), rows["nonfinite"])
            cells = self._state_cells(rows, rel, lay, exact) | self._logits_cells(rows, lay, exact)
        self._store(reference, point, layer, kind, lay, cells)
        if point in self.keep_rows:
            kept = {k: v for k, v in rows.items() if k in _ROW_ARRAYS} | {"n": np.ones(len(exact), np.uint8)}
            where = self.rows.setdefault((reference, point), {})
            for run, (first, last) in zip(lay.runs, lay.whole, strict=True):
                piece = slice(first, last)
                where.setdefault(int(run), {})[layer] = (lay.position[piece], {k: v[piece] for k, v in kept.items()})

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

    def _layout(self, parts: list[Part]) -> _Layout:
        key = tuple((p.runs, len(p.position), int(p.position[0]), int(p.position[-1])) for p in parts)
        if key not in self._layouts:
            runs, bounds, at = [], [], 0
            for p in parts:
                runs += p.runs
                bounds += [self._bounds(p, run) + at for run in p.runs]
                at += len(p.position)
            position = np.concatenate([p.position for p in parts])
            self._layouts[key] = _Layout(np.array(runs), np.stack(bounds), position)
        return self._layouts[key]

    def _bounds(self, p: Part, run: int) -> np.ndarray:
        """[buckets, 2]: first row and last row + 1 of each bucket; rows are in ascending position."""
        r = self.runs[run]
        cut = r.start if r.cut is None else r.cut
        ranges = {"all": (r.start, r.stop), "window": (max(cut - r.window, 0), cut), "suffix": (cut, r.stop),
                  "last": (r.stop - 1, r.stop), "exact": (r.start, r.stop)}  # fmt: skip
        wanted = [ranges[name] for name in REGIONS] + [(r.start + a, r.start + b + 1) for a, b in self._bins]
        return np.searchsorted(p.position, np.array(wanted))

    def _state_cells(self, rows: Arrays, rel: np.ndarray, lay: _Layout, exact: np.ndarray) -> Arrays:
        cells: Arrays = {"n": _count(lay, exact)}
        cells |= {name: _reduce(np.add, rows[name], lay, exact) for name in _SUMS}
        cells["max_abs"] = _reduce(np.maximum, rows["max_abs"], lay, exact)
        top = _where_max(rows["max_abs"], cells["max_abs"], lay, exact)
        cells["max_row"], cells["max_col"] = _pick(lay.position, top), _pick(rows["max_col"], top)
        cells["rel_max"] = _reduce(np.maximum, rel, lay, exact)
        cells["rel_max_row"] = _pick(lay.position, _where_max(rel, cells["rel_max"], lay, exact))
        cells["first_nonfinite"] = np.full_like(cells["n"], -1)
        if rows["bad"].any():
            bad = (rows["bad"] > 0).astype(np.int64)
            cells["first_nonfinite"] = _pick(
                lay.position, _where_max(bad, _reduce(np.maximum, bad, lay, exact), lay, exact)
            )
        first_at, last_at = (np.full((len(lay.runs), len(THRESHOLDS)), -1, np.int64) for _ in range(2))
        for i, (at, end) in enumerate(lay.whole):
            over = rel[at:end, None] > THRESHOLDS
            hit = over.any(0) if end > at else np.zeros(len(THRESHOLDS), bool)
            if hit.any():
                first_at[i, hit] = lay.position[at + over.argmax(0)[hit]]
                last_at[i, hit] = lay.position[end - 1 - over[::-1].argmax(0)[hit]]
        return cells | {"first_at": first_at, "last_at": last_at}

    def _choices(self, reference: str, point: str, layer: int, parts: list[Part]) -> Arrays:
        """Per row: changed, jaccard, margin of the reference, change of the margin, flips."""
        rows = _by_rows(_sets, *_sides(parts), *_sides(parts, margins=True))
        key = (point, layer)
        noisy = np.concatenate([np.full(len(p.position), self.runs[p.runs[0]].arm in NOISE) for p in parts])
        if reference == "full" and noisy.any():
            self._margin_floor[key] = float(rows["noise"][noisy].max(initial=0.0))
        scale = self.margin_scale.get(key, 0.0)
        bound = max(10 * self._margin_floor.get(key, 0.0), _MARGIN_EPS[self.dtype] * scale)
        # A row without a finite score chose nothing that could be wrong.
        rows["flips"] = rows["changed"] * ((rows["margin"] <= bound) | np.isnan(rows["margin"]))
        return rows

    def _discrete_cells(self, rows: Arrays, lay: _Layout, exact: np.ndarray) -> Arrays:
        cells: Arrays = {"n": _count(lay, exact)}
        cells |= {name: _reduce(np.add, rows[name], lay, exact) for name in ("changed", "jaccard", "flips")}
        cells["margin_noise"] = _reduce(np.maximum, rows["noise"], lay, exact)
        margin = np.where(rows["changed"] > 0, rows["margin"], np.inf)
        smallest = _reduce(np.minimum, margin, lay, exact, empty=np.inf)
        return cells | {"min_margin": np.where(cells["changed"] > 0, smallest, np.nan)}

    def _logits(self, parts: list[Part], lay: _Layout) -> Arrays:
        following = torch.as_tensor(self.following[lay.position])

        def sums(a: Tensor, r: Tensor, token: Tensor) -> dict[str, Tensor]:
            return row_sums(a, r) | logits_rows(a, r, token.to(a.device), TOP_K)

        return _by_rows(sums, *_sides(parts), following)

    def _logits_cells(self, rows: Arrays, lay: _Layout, exact: np.ndarray) -> Arrays:
        cells: Arrays = {"n": _count(lay, exact)}
        known = np.isfinite(rows["dlogp"]) | np.isinf(rows["dlogp"])
        values = rows | {"dlogp": np.where(known, rows["dlogp"], 0.0)}
        cells["n_next"] = _reduce(np.add, known.astype(np.int64), lay, exact)
        for name in ("kl", "kl_rev", "js", "dlogp"):
            cells[f"{name}_sum"] = _reduce(np.add, values[name], lay, exact)
            cells[f"{name}_max"] = _reduce(np.maximum, np.abs(values[name]), lay, exact)
            rows[f"{name}_sum"] = values[name]
        cells["max_row"] = _pick(lay.position, _where_max(rows["kl"], cells["kl_max"], lay, exact))
        cells["flips"] = _reduce(np.add, rows["flip"], lay, exact)
        rows["flips"] = rows["flip"]
        cells["overlap"] = _reduce(np.add, rows["overlap"], lay, exact)
        smallest = _reduce(np.minimum, np.where(rows["flip"] > 0, rows["margin"], np.inf), lay, exact, empty=np.inf)
        return cells | {"min_flip_margin": np.where(cells["flips"] > 0, smallest, np.nan)}

    def _store(self, reference: str, point: str, layer: int, kind: str, lay: _Layout, cells: Arrays) -> None:
        depth = 1 if point in SINGLE_POINTS else self.layers
        attrs = {"state": {"tol_abs": TOL_ABS, "tol_rel": TOL_REL}, "logits": {"top_k": TOP_K}}.get(kind, {})
        table = self.tables.setdefault((reference, point), Table(kind, self.buckets, {}, attrs))
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
            table.arrays[name][lay.runs, layer] = values


def exact_mask(point: str, enters: np.ndarray, leaves: np.ndarray, layer: int) -> np.ndarray:
    """The exact rows [rows] for a point of a layer, from exact_rows' [layers, rows]; embed is exact everywhere."""
    if point == "embed":
        return np.ones_like(enters[0])
    if point in ("final", "logits"):
        return leaves[-1]
    return enters[layer] if point in ENTERING else leaves[layer]


def _sides(parts: list[Part], margins: bool = False) -> tuple[Tensor, Tensor]:
    """The rows of all parts one after another: arms, references [rows, …]."""
    if margins:
        pairs = [(p.arm_margin, p.ref_margin) for p in parts if p.arm_margin is not None and p.ref_margin is not None]
    else:
        pairs = [(p.arm, p.ref) for p in parts]
    arms, refs = zip(*pairs, strict=True)
    return torch.cat(arms), torch.cat(refs)


def _by_rows(f, *tensors: Tensor) -> Arrays:
    pieces = [f(*(t[i : i + _ROWS] for t in tensors)) for i in range(0, len(tensors[0]), _ROWS)]
    return {k: torch.cat([p[k] for p in pieces]).cpu().numpy() for k in pieces[0]}


def _sets(a: Tensor, r: Tensor, arm_margin: Tensor, ref_margin: Tensor) -> dict[str, Tensor]:
    """Per row of ids [rows, k] (ascending, -1 last): whether the sets differ, their Jaccard index, the margins."""
    changed = (a != r).any(-1)
    jaccard = torch.ones(len(a), dtype=torch.float64, device=a.device)
    for rows in changed.nonzero()[:, 0].split(256):
        x, y = a[rows], r[rows]
        shared = ((x[:, :, None] == y[:, None]) & (x >= 0)[:, :, None]).any(-1).sum(-1)
        total = (x >= 0).sum(-1) + (y >= 0).sum(-1) - shared
        jaccard[rows] = torch.where(total == 0, 1.0, shared.double() / total.clamp(min=1))
    gap = (arm_margin - ref_margin).abs().double()
    both = torch.isfinite(arm_margin) & torch.isfinite(ref_margin)
    return {
        "changed": changed.long(),
        "jaccard": jaccard,
        "margin": ref_margin.double(),
        "noise": torch.where(both, gap, 0.0),
    }


def _count(lay: _Layout, exact: np.ndarray) -> np.ndarray:
    n = lay.bounds[..., 1] - lay.bounds[..., 0]
    n[:, REGIONS.index("exact")] = _between(np.add, exact.astype(np.int64), lay.whole, 0)
    return n


def _between(how: np.ufunc, x: np.ndarray, bounds: np.ndarray, empty: float) -> np.ndarray:
    """x [rows] reduced over each [first, last+1) of bounds [..., 2]; ``empty`` where there is no row."""
    tail = np.concatenate((x, [empty])).astype(x.dtype)
    out = how.reduceat(tail, bounds.reshape(-1))[::2].reshape(bounds.shape[:-1])
    return np.where(bounds[..., 0] == bounds[..., 1], np.asarray(empty, x.dtype), out)


def _reduce(how: np.ufunc, x: np.ndarray, lay: _Layout, exact: np.ndarray, empty: float = 0.0) -> np.ndarray:
    """x [rows] reduced to [runs, buckets]; ``empty`` is the value of a bucket without rows."""
    out = _between(how, x, lay.bounds, empty)
    only_exact = np.where(exact, x, np.asarray(empty, x.dtype))
    out[:, REGIONS.index("exact")] = _between(how, only_exact, lay.whole, empty)
    return out


def _where_max(x: np.ndarray, top: np.ndarray, lay: _Layout, exact: np.ndarray) -> np.ndarray:
    """Packed row of each cell's largest value, -1 where that is 0; top [runs, buckets] from _reduce."""
    out = np.full(top.shape, -1, np.int64)
    only_exact = np.where(exact, x, np.asarray(0, x.dtype))
    for run, bucket in zip(*np.nonzero((top > 0) | np.isnan(top)), strict=True):
        first, last = lay.bounds[run, bucket]
        of = only_exact if bucket == REGIONS.index("exact") else x
        out[run, bucket] = first + of[first:last].argmax()
    return out


def _pick(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where >= 0, values[np.maximum(where, 0)], -1)
