"""A made-up trace that holds every kind of part, from seeded noise: for tests of whatever reads traces.

The errors follow the shape of the real thing: zero where an arm must be exact, large just behind the replay start,
healing with distance, and rounding noise everywhere else.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from replayscope.traces import RunInfo, Tokens, TraceWriter
from replayscope.traces.dtypes import encode_bf16
from replayscope.traces.schema import POINTS, SINGLE_POINTS, bucket_names, kind_of
from tests.folding import bucket_masks, fold, pack_rows

WIDTH = 16  # channels of every stored state
TOP_K = 4
VOCABULARY = 64
WORDS = ("The", " cut", " heals", "\n", " 窗口", " of", " 128", "<b>", " keys", "\x00", "\udce9", " ", " naïve", "🙂")
ROW_POINTS = {
    "full": ("window_kv", "attn_out", "hidden", "topk", "router", "logits"),
    "oracle": ("window_kv", "hidden"),
}
BROKEN_FROM = 2  # the layer from which the broken arm forgets the floor


@dataclass(frozen=True)
class Plant:
    """A fault: the row at `position` of run (arm, cut) differs from `reference` by the relative L2 `value` at one point
    and layer, and at no other."""

    arm: str
    cut: int | None
    point: str
    layer: int
    position: int
    value: float
    reference: str = "oracle"

    def hits(self, run: RunInfo, reference: str, point: str, layer: int) -> bool:
        """Whether the fault lies in this table's cell."""
        return (self.arm, self.cut, self.reference, self.point, self.layer) == (
            run.arm, run.cut, reference, point, layer,
        )  # fmt: skip


def synthetic_trace(
    path: str | os.PathLike[str],
    *,
    n_tokens: int = 160,
    window: int = 8,
    layers: int = 6,
    cuts: Sequence[int] = (4, 8, 9, 40, 41, 80, 159),
    plant: Plant | Sequence[Plant] | None = None,
    dtype: str = "float64",
    audit: bool = False,
    seed: int = 0,
) -> list[RunInfo]:
    """Write the trace and return its runs: full, repeat, rechunk, and per cut hit, encoder, oracle:encoder and, where
    the cut lies behind the first window, broken:floor@2, judged against the oracle."""
    runs = make_runs(n_tokens, window, layers, cuts)
    plants = [plant] if isinstance(plant, Plant) else list(plant or ())
    buckets = bucket_names(max(run.stop - 1 - run.start for run in runs))
    model = config(n_tokens, window, layers)
    with TraceWriter(path, force=True) as out:
        out.header(config=model, provenance=provenance(dtype, audit, seed), tokens=tokens(n_tokens))
        out.runs(runs)
        for reference, point, packed in divergence(runs, model["ratios"], plants, dtype, seed):
            out.table(reference, point, fold(packed, runs, point, buckets))
            if point in ROW_POINTS[reference]:
                out.rows(reference, point, *pack_rows(packed))
        write_states(out, runs, layers, seed)
        out.text("greedy", " and so on \udcff")
    return runs


def divergence(
    runs: Sequence[RunInfo], ratios: Sequence[int], plants: Sequence[Plant], dtype: str, seed: int
) -> Iterator[tuple[str, str, list[list[dict[str, np.ndarray]]]]]:
    """(reference, point, per-row sums [run][layer]) of every table."""
    unit = {"float64": 1e-16, "float32": 6e-8, "bfloat16": 4e-3}[dtype]
    layers = len(ratios)
    for reference in ("full", "oracle"):
        for point in POINTS:
            rng = np.random.default_rng([seed, len(reference), POINTS.index(point)])
            packed = []
            for run in runs:
                compared = run.index > 0 if reference == "full" else run.oracle is not None
                position = np.arange(run.start, run.stop) if compared else np.arange(0)
                rows = []
                for layer in range(1 if point in SINGLE_POINTS else layers):
                    here = position[:0] if absent(point, ratios[layer]) else position
                    error = row_error(run, reference, point, layer, layers, here, unit, rng)
                    for p in plants:
                        if p.hits(run, reference, point, layer):
                            error[here == p.position] = p.value
                    rows.append({"position": here, **row_sums(kind_of(point), error, rng)})
                packed.append(rows)
            yield reference, point, packed


def make_runs(n_tokens: int, window: int, layers: int, cuts: Sequence[int]) -> list[RunInfo]:
    """Runs of the trace; the exact region follows the law for layers that have no global KV before layer 2."""
    runs: list[RunInfo] = []

    def add(arm: str, cut: int | None, start: int, oracle: int | None = None, replay: int | None = None) -> int:
        def region(first: int, upto: bool) -> list[list[int]]:
            if start == 0 or arm == "hit":
                return [[start, n_tokens]]
            return [[first, n_tokens]] if upto and first < n_tokens else []

        hit = 0 if cut is None else cut
        runs.append(RunInfo(
            index=len(runs), arm=arm, semantics="paper", cut=cut, replay=replay, start=start, stop=n_tokens,
            prompt_end=n_tokens, window=window, replayed=hit - start if cut is not None else 0, cached=hit,
            fresh=n_tokens - hit, decoder_rows=n_tokens - start, cached_checked=2 * hit, oracle=oracle,
            floor=[start] * layers, first_row=[start] * layers,
            exact_in=[region(start + layer * (window - 1), layer <= 2) for layer in range(layers)],
            exact_out=[region(start + (layer + 1) * (window - 1), layer <= 1) for layer in range(layers)],
        ))  # fmt: skip
        return runs[-1].index

    for arm in ("full", "repeat", "rechunk"):
        add(arm, None, 0)
    for cut in cuts:
        start = max(0, cut - window)
        add("hit", cut, cut)
        oracle = add("oracle:encoder", cut, start, replay=window)
        add("encoder", cut, start, oracle, replay=window)
        if start > 0:
            add(f"broken:floor@{BROKEN_FROM}", cut, start, oracle, replay=window)
    return runs


def config(n_tokens: int, window: int, layers: int) -> dict:
    """A config of the size the trace claims."""
    ratios = [0 if layer < 2 else 2 if layer < layers // 2 + 1 else 1 for layer in range(layers)]
    return {"layers": layers, "window": window, "ratios": ratios, "hidden": WIDTH, "vocabulary": VOCABULARY,
            "max_context": n_tokens}  # fmt: skip


def provenance(dtype: str, audit: bool, seed: int) -> dict:
    """What a run would say of itself."""
    return {"dtype": dtype, "audit": audit, "device": "cpu", "seed": seed, "model": "synthetic", "semantics": ["paper"],
            "weights_sha256": "0" * 64, "versions": {"replayscope": "0.1.0", "numpy": np.__version__},
            "argv": ["replayscope", "sweep", "-m", "synthetic"]}  # fmt: skip


def tokens(n_tokens: int) -> Tokens:
    """Token ids, and texts that are awkward to store."""
    ids = np.arange(n_tokens) * 7 % VOCABULARY
    return Tokens(ids.astype(np.int64), [WORDS[i % len(WORDS)] for i in range(n_tokens)])


def absent(point: str, ratio: int) -> bool:
    """A layer of ratio 0 has no global KV and chooses nothing from it."""
    return ratio == 0 and point in ("global_kv", "index_k", "topk")


def row_error(
    run: RunInfo, reference: str, point: str, layer: int, layers: int, position: np.ndarray, unit: float,
    rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Relative L2 of each row: [row]."""
    place = POINTS.index(point)
    if point in ("final", "logits"):
        layer = layers - 1
    noise = unit * (1 + layer) * rng.lognormal(0.0, 0.4, len(position))
    untouched = run.arm == "hit" and layer == 0 and place < POINTS.index("attn_out")
    if run.arm == "repeat" or point == "embed" or untouched:
        return np.zeros(len(position))
    if run.arm in ("rechunk", "hit") or run.start == 0:
        return noise
    distance = position - run.start
    exact = bucket_masks(run, point, min(layer, layers - 1), position, ("exact",))[0]
    heal = np.exp(-distance / (run.window * (layer + 1.0)))
    if reference == "full":
        design = 0.25 * heal * rng.lognormal(0.0, 0.3, len(position)) + 1e-5 * (layer > 2)
        error = np.where(exact, noise, design + noise)
    else:
        error = noise.copy()
    leaves = place >= POINTS.index("topk")
    wrong = layer > BROKEN_FROM or (layer == BROKEN_FROM and leaves)
    if run.arm.startswith("broken:") and wrong:
        # The first row sees one key too many at most as strongly as the others; the last of a window sees none.
        seen = (distance < run.window - 1) | (layer > BROKEN_FROM)
        error = error + np.where(seen, 0.08 * heal, 0.0)
    return error


def row_sums(kind: str, error: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Per-row sums that have the given relative L2, named as `state_sums` and `logits_sums` name them."""
    rows = len(error)
    if kind == "discrete":
        changed = (rng.uniform(size=rows) < np.minimum(error * 2, 0.9)).astype(np.int64)
        margin = rng.exponential(0.1, rows) * np.where(changed, error, 1.0)
        return {"changed": changed, "jaccard": np.where(changed, rng.uniform(0.3, 0.8, rows), 1.0),
                "flips": changed * (rng.uniform(size=rows) < 0.05), "margin": margin, "noise": error * 0.1}  # fmt: skip
    ref2 = WIDTH * rng.lognormal(0.0, 0.2, rows)
    diff2 = error**2 * ref2
    arm2 = ref2 * (1 + 0.2 * error) ** 2
    peak = error * np.sqrt(ref2) * rng.uniform(0.4, 0.8, rows)
    sums = {
        "elements": np.full(rows, WIDTH, np.int64), "diff2": diff2, "ref2": ref2, "arm2": arm2,
        "dot": (ref2 + arm2 - diff2) / 2, "max_abs": peak,
        "max_col": np.where(peak == 0, -1, rng.integers(0, WIDTH, rows)),
        "over": np.where(error > 1e-3, rng.integers(1, WIDTH + 1, rows), 0),
        "nonfinite": np.zeros(rows, np.int64), "bad": np.zeros(rows, np.int64),
    }  # fmt: skip
    if kind == "state":
        return sums
    kl = error**2 * rng.uniform(0.5, 2.0, rows)
    flip = (rng.uniform(size=rows) < np.minimum(error, 0.5)).astype(np.int64)
    return {**sums, "kl": kl, "kl_rev": kl * rng.uniform(0.9, 1.1, rows), "js": np.minimum(kl / 8, np.log(2)),
            "flip": flip, "margin": rng.exponential(0.5, rows), "overlap": np.where(kl > 1e-4, 0.8, 1.0),
            "dlogp": error * rng.normal(0.0, 1.0, rows)}  # fmt: skip


def write_states(out: TraceWriter, runs: Sequence[RunInfo], layers: int, seed: int) -> None:
    """Raw states of full, and of hit, encoder and its oracle at the third cut: bf16 window KV, fp32 hidden states,
    top-k indices and logits."""
    cuts = sorted({run.cut for run in runs if run.cut is not None})
    at = cuts[min(3, len(cuts) - 1)] if cuts else None
    for run in runs:
        if run.arm != "full" and (run.cut != at or run.arm.startswith("broken")):
            continue
        position = np.arange(run.start, run.stop)
        for layer in range(layers):
            rng = np.random.default_rng([seed, layer])
            values = rng.normal(size=(run.stop, WIDTH)).astype(np.float32)[position]
            if run.arm in ("encoder", "oracle:encoder") and layer:
                values = values * (1 + 0.1 * np.exp(-(position - run.start) / run.window))[:, None].astype(np.float32)
            out.state(run.index, f"layers.{layer}.window_kv", position, encode_bf16(values), "bfloat16")
            out.state(run.index, f"layers.{layer}.hidden", position, values, "float32")
            if layer >= 2:
                top = (position[:, None] // 2 - np.arange(TOP_K)).astype(np.int32)
                out.state(run.index, f"layers.{layer}.topk", position, np.maximum(top, -1), "int32")
        logits = np.random.default_rng([seed, 99]).normal(size=(run.stop, VOCABULARY)).astype(np.float32)[position]
        out.state(run.index, "logits", position, logits, "float32")
