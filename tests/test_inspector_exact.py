"""Arms against their oracles and the exact region against numbers, for every semantics, on tiny models in fp64."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from replayscope.inspector import semantics as rules
from replayscope.inspector.cli import main
from replayscope.inspector.engines import ENGINES
from replayscope.inspector.errors import UsageError
from replayscope.inspector.exact import exact_rows
from replayscope.inspector.executor import Executor
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.plan import Request
from replayscope.inspector.runner import run
from replayscope.inspector.semantics import Shape, request
from replayscope.model.weights import Model, build, expected_shapes
from replayscope.traces.reader import TraceReader
from tests import v41
from tests.test_inspector_plan import config

NAMES = tuple(ENGINES)
EQUAL = 1e-12
POINTS = ("window_kv", "global_kv", "attn_out", "hidden", "logits")
ARMS = ("encoder", "decoder", "both")
# tokenspeed admits multiples of 128 only, so its prompt is longer than the fixtures' own.
LONG = 150


def long_ids() -> torch.Tensor:
    return torch.randint(0, v41.config().vocab_size, (LONG,), generator=torch.Generator().manual_seed(5))


def errors(semantics: str, chunks=None) -> dict[str, float]:
    """Arm → largest relative L2 of a row against the arm's own oracle, in an audit of the fixture's model."""
    model, far = v41.model(), semantics == "tokenspeed"
    shape = Shape(v41.config(), LONG if far else v41.TOKENS, 12, chunks, None if far else 4)
    cut = 128 if far else 24
    job = Job(shape, ARMS, (cut,), (6,), None, (semantics,), oracles=True, audit=True, points=POINTS)
    line, notes = line_up(job)
    assert not notes
    fold, runs = run(model, long_ids() if far else v41.ids(), job, line, Executor(model, frozen=True))
    found = {}
    for r in runs:
        if r.arm in ARMS:
            found[r.arm] = max(fold.tables["oracle", p].arrays["rel_max"][r.index, :, 0].max() for p in POINTS)
            assert r.semantics == semantics and r.cached_changed == 0
            assert (fold.tables["oracle", "hidden"].arrays["n"][r.index, :, 0] >= r.decoder_rows).all()
    assert set(found) == set(ARMS)
    return found


# The window is 6: last chunks of 8, 6, 4 and 2 rows behind the replay start 18, and two short ones in a row.
CHUNKS = (None, 10, 16, 17, 12, (40, 50, 53))


@pytest.mark.parametrize(
    ("semantics", "chunks"),
    [(n, c) for n in NAMES for c in CHUNKS if not isinstance(c, tuple) or ENGINES[n].trims != "last"],
)
def test_every_semantics_equals_its_oracle(semantics, chunks):
    found = errors(semantics, chunks)
    assert max(found.values()) <= EQUAL, found


def test_a_dropped_hit_equals_its_oracle_and_full():
    shape = Shape(v41.config(), LONG, 12, block=2)
    job = Job(shape, ("encoder",), (4,), (6,), None, ("vllm-0.33",), oracles=True, audit=True, points=POINTS)
    line, _ = line_up(job)
    fold, runs = run(v41.model(), long_ids(), job, line, Executor(v41.model(), frozen=True))
    (at,) = (r for r in runs if r.arm == "encoder")
    assert (at.replayed, at.cached, at.fresh, at.cached_checked) == (0, 0, LONG, 0)
    for reference in ("oracle", "full"):
        assert fold.tables[reference, "hidden"].arrays["rel_max"][at.index].max() <= EQUAL


@pytest.mark.parametrize(
    ("semantics", "change", "chunks"),
    [
        ("vllm-0.33", {"source": "nothing"}, None),
        ("vllm-0.33", {"trims": "each"}, (40, 50, 53)),
        ("sglang-0.5.23", {"source": "window"}, None),
        ("sglang-0.5.23", {"trims": "long"}, (40, 50, 53)),
        ("sglang-day0", {"source": "nothing"}, None),
        ("sglang-day0", {"trims": "last"}, 17),
        ("tokenspeed", {"source": "rows"}, None),
        ("paper", {"source": "window"}, None),
    ],
)
def test_twin_a_plan_by_other_rules_differs_from_the_oracle(monkeypatch, semantics, change, chunks):
    """The oracle reads no plan and no rule of the presets, so a preset changed in one rule is found out."""
    monkeypatch.setitem(ENGINES, semantics, replace(ENGINES[semantics], **change))
    found = errors(semantics, chunks)
    assert found["encoder"] <= EQUAL and min(found["decoder"], found["both"]) > 1e-6, found


@pytest.mark.parametrize("semantics", NAMES)
def test_exact_decoder_rows_in_numbers(semantics):
    """Window KV rows among the last W that equal full's: counted on the fixture's weights, unrounded, in fp64."""
    full, tail = v41.rows(
        Executor(v41.model()), [request(v41.shape(), "full"), request(v41.shape(), "decoder", semantics=semantics)]
    )
    D, W = v41.config().decoder_start, 6
    gaps = [
        [v41.relative(tail[name][i : i + 1], full[name][i : i + 1]) for i in range(-W, -1)]
        + [v41.relative(tail[name][-1:], full[name][-1:])]
        for name in (f"layers.{D + k}.window_kv" for k in range(4))
    ]
    wide = semantics in ("vllm-0.33", "sglang-day0")
    assert [sum(g <= EQUAL for g in row) for row in gaps] == ([6, 6, 1, 0] if wide else [6, 1, 0, 0]), gaps


@cache
def tiny(ratios: tuple[int, ...], sources: tuple[int, ...], indexers: tuple[int, ...], W: int, seed: int) -> Model:
    """A random model of that schedule. Every visible entry is attended, so that only smooth error is left."""
    c = replace(
        config(W, len(ratios), (0,) * len(ratios)),
        compress_ratios=ratios,
        kv_source_layer_ids=sources,
        index_source_layer_ids=indexers,
        index_topk=160,
    )
    g = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=g, dtype=torch.float64)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        return noise * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)

    return build(c, {name: draw(name, shape) for name, shape in expected_shapes(c).items()})


@st.composite
def schedules(draw) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Window-only layers, then pairs, then single entries; a source at each change of ratio and anywhere behind."""
    ratios = (0,) * draw(st.integers(0, 3)) + (2,) * draw(st.integers(0, 3)) + (1,) * draw(st.integers(0, 4))
    assume(len(ratios) >= 2)
    forced = {i for i, r in enumerate(ratios) if r and (i == 0 or ratios[i - 1] != r)}
    compressed = [i for i, r in enumerate(ratios) if r]
    some = st.sets(st.sampled_from(compressed)) if compressed else st.just(set())
    sources = forced | draw(some)
    return ratios, tuple(sorted(sources)), tuple(sorted(sources | draw(some)))


def violation(model: Model, ids: torch.Tensor, r: Request, region: tuple[np.ndarray, np.ndarray]) -> float:
    """Largest relative L2 against full of a row that the region calls exact."""
    full, arm = v41.rows(Executor(model), [request(Shape(model.config, len(ids)), "full"), r], tokens={"prompt": ids})
    worst = 0.0
    for l in model.config.layers:
        for point, mask in zip(
            ("attn_in", "window_kv", "attn_out", "hidden"), (region[0], region[0], region[1], region[1]), strict=True
        ):
            name = f"layers.{l}.{point}"
            rows = np.flatnonzero(mask[l]) + r.start
            first = r.stop - len(arm[name])
            assert (rows >= first).all(), f"{name}: rows are called exact that the arm did not run"
            worst = max(worst, v41.relative(arm[name][rows - first], full[name][rows]))
    return worst


@given(st.data())
def test_every_numerically_different_cell_lies_outside_the_exact_region(data):
    W, semantics = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(NAMES))
    model = tiny(*data.draw(schedules()), W, data.draw(st.integers(0, 2)))
    far = semantics == "tokenspeed"
    N = data.draw(st.integers(130, 150) if far else st.integers(2, 40))
    chunks = data.draw(
        st.none() | st.integers(1, 40) | st.lists(st.integers(1, N), unique=True).map(lambda x: (*sorted(x),))
    )
    shape = Shape(model.config, N, data.draw(st.integers(0, N // 3)), chunks, None if far else 2)
    cut = 128 if far else data.draw(st.integers(0, N - 1).map(lambda n: n if semantics == "paper" else n // 2 * 2))
    arm, R = data.draw(st.sampled_from(ARMS)), data.draw(st.integers(1, 12))
    suffix = data.draw(st.none() | st.integers(1, N))
    try:
        r = request(shape, arm, cut, R, suffix, semantics)
    except UsageError:
        assume(False)
        raise
    r.check(model.config)
    ids = torch.randint(0, model.config.vocab_size, (N,), generator=torch.Generator().manual_seed(N))
    assert violation(model, ids, r, exact_rows(model.config, r)) <= 1e-11


SCHEDULES = (
    ((0, 0, 0, 0), (), ()),
    ((0, 0, 2, 2, 1, 1), (2, 4), (2, 4, 5)),
    ((0, 2, 1, 1, 1), (1, 2), (1, 2)),
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("semantics", ["paper", "vllm-0.33", "sglang-0.5.23", "sglang-day0"])
@pytest.mark.parametrize("mutant", ["plan W+1", "plan W-1", "region W-1", "floor+1"])
def test_twin_another_window_breaks_the_exact_region(schedule, semantics, mutant):
    model, N, cut, W = tiny(*schedule, 4, 0), 40, 20, 4
    ids = torch.randint(0, model.config.vocab_size, (N,), generator=torch.Generator().manual_seed(N))
    r = request(Shape(model.config, N, block=2), "encoder", cut, semantics=semantics)
    region = exact_rows(model.config, r)
    assert violation(model, ids, r, region) <= 1e-11
    if mutant.startswith("plan"):
        r = replace(r, window=W + (1 if mutant.endswith("+1") else -1))
    elif mutant == "region W-1":
        region = exact_rows(replace(model.config, sliding_window=W - 1), r)
    else:
        r = replace(r, floor=tuple(f + 1 for f in r.floor))
    assert violation(model, ids, r, region) > 1e-6


def test_twin_a_tail_cut_too_high_breaks_the_exact_region(monkeypatch):
    """The decoder's floor one row too high, under the region of the right one."""
    model = tiny(*SCHEDULES[1], 4, 0)
    ids = torch.arange(30) % model.config.vocab_size
    shape = Shape(model.config, 30)
    right = request(shape, "decoder", semantics="vllm-0.33")
    real = rules.decoder_tail
    monkeypatch.setattr(rules, "decoder_tail", lambda *a: replace(real(*a), floor=real(*a).floor + 1))
    wrong = request(shape, "decoder", semantics="vllm-0.33")
    assert violation(model, ids, right, exact_rows(model.config, right)) <= 1e-11
    assert violation(model, ids, wrong, exact_rows(model.config, right)) > 1e-6


def words(folder, *more) -> list[str]:
    numbers = ",".join(map(str, v41.ids().tolist()))
    return ["sweep", "-m", str(folder), "-p", f"ids:{numbers}", "-o", str(folder / "t.h5"), "-q", *more]


@pytest.fixture
def folder(tmp_path):
    for file in (v41.ROOT / "plain" / "config.json", v41.ROOT / "weights" / "model.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--semantics", "paper,sglang-day0", "--cuts", "41"], "cut 41 is not admitted by sglang-day0; the nearest"),
        (["--semantics", "vllm-0.33", "--cuts", "40"], "cut 40 is not admitted by vllm-0.33; the nearest that is: 0"),
        (["--semantics", "tokenspeed", "--block", "64"], "block size 64 does not suit tokenspeed"),
        (["--semantics", "tokenspeed", "--chunks", "60,64", "--arms", "decoder"], "last chunk of at least W = 6 rows"),
        (["--chunks", "9,4"], "--chunks 9,4 must name ascending positions, or one size"),
        (["--chunks", "0"], "--chunks '0' must be a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_a_semantics_refuses_is_one_line(folder, capsys, more, says):
    assert main(words(folder, *more)) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and says in err
    assert not (folder / "t.h5").exists()


def test_a_sweep_overlays_semantics(folder, capsys):
    names = "paper,vllm-0.33,sglang-day0"
    more = ["--semantics", names, "--block", "4", "--cuts", "24,28", "--forced", "8", "--chunks", "30", "--audit"]
    arms = "full,repeat,hit,encoder,decoder,both"
    assert main(words(folder, *more, "--arms", arms, "--dtype", "fp64")) == 0
    assert "right arms: no bug" in capsys.readouterr().out
    trace = TraceReader(folder / "t.h5")
    seen = [(r.arm, r.semantics, r.cut) for r in trace.runs]
    assert len(set(seen)) == len(seen)
    assert [(arm, s) for arm, s, _ in seen].count(("hit", "paper")) == 2 and {s for a, s, _ in seen if a == "hit"} == {
        "paper"
    }
    for arm in ("encoder", "decoder", "both"):
        assert {s for a, s, _ in seen if a == arm} == set(names.split(","))
    assert trace.provenance["options"]["chunks"] == 30 and trace.provenance["options"]["block"] == 4


def test_cuts_made_by_the_tool_suit_every_semantics(folder):
    more = [
        "--semantics",
        "sglang-day0,vllm-0.33",
        "--block",
        "6",
        "--cuts",
        "grid",
        "--arms",
        "full,encoder",
        "--dtype",
        "fp64",
    ]
    assert main(words(folder, *more)) == 0
    cuts = {r.cut for r in TraceReader(folder / "t.h5").runs if r.arm == "encoder"}
    assert len(cuts) > 3 and all(cut % 6 == 0 for cut in cuts)
