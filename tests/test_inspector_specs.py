"""What users type, read as values: by example and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayscope.inspector import specs
from replayscope.inspector.errors import ReplayScopeError, UsageError
from replayscope.inspector.points import expand_points, point_names, split_globs

N, W = 300, 128
lengths = st.integers(1, 400)
windows = st.integers(1, 200)


def cuts(spec: str, length: int = N, window: int = W, **rest) -> tuple[int, ...]:
    return specs.parse_cuts(spec, length=length, window=window, **rest).values


def even(cut: int) -> bool:
    return cut % 2 == 0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("0", (0,)),
        ("129,128,129", (128, 129)),
        ("W, 2W ,W+1", (128, 129, 256)),
        ("2W-1", (255,)),
        ("100:110:4", (100, 104, 108)),
        ("100:103", (100, 101, 102)),
        ("296:", (296, 297, 298, 299)),
        (":3", (0, 1, 2)),
        ("W:2W:W", (128,)),
        ("around:W", (127, 128, 129)),
        ("around:0", (0, 1)),
        ("grid", (0, 1, 127, 128, 129, 149, 150, 151, 298, 299)),
        ("around:W,5", (5, 127, 128, 129)),
    ],
)
def test_cuts_by_example(spec, expected):
    assert cuts(spec) == expected


def test_all_is_every_cut_and_the_whole_prompt_becomes_the_last_one():
    assert cuts("all", 5) == (0, 1, 2, 3, 4)
    whole = specs.parse_cuts("300", length=N, window=W)
    assert whole.values == (299,) and "299 is used" in whole.notes[0]
    assert cuts("300", admits=even) == (298,)


def test_a_range_past_the_end_is_shortened_and_says_so():
    found = specs.parse_cuts("290:100000000000:5", length=N, window=W)
    assert found.values == (290, 295) and "299" in found.notes[0]


def test_cuts_of_the_tool_are_snapped_and_counted():
    found = specs.parse_cuts("around:W", length=N, window=W, admits=even)
    assert (found.values, found.snapped) == ((126, 128), 2)
    found = specs.parse_cuts("0:3", length=N, window=W, admits=lambda cut: cut >= 128 and cut % 128 == 0)
    assert (found.values, found.snapped) == ((128,), 3)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("301", "out of range: this prompt has cuts 0..299"),
        ("W-200", "out of range"),
        ("9" * 5000, "too large"),
        ("twelve", "is not a number"),
        ("-1", "is not a number"),
        ("1.5", "is not a number"),
        ("", "empty cut"),
        ("128,,129", "empty cut"),
        ("1:2:3:4", "is not a number"),
        ("1:10:0", "step is at least 1"),
        ("10:5", "name no position"),
        ("around:W+400", "name no position"),
        ("around:", "is not a number"),
        ("exact", "is not a number"),
        ("١٢", "is not a number"),
    ],
)
def test_bad_cuts_are_refused_in_one_line(spec, says):
    with pytest.raises(UsageError, match=says) as caught:
        cuts(spec)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_cut_by_hand_that_is_not_admitted_is_refused_with_its_neighbour():
    with pytest.raises(UsageError, match=r"cut 129 is not admitted by sglang.*: 128"):
        cuts("129", admits=even, rule="sglang")
    with pytest.raises(UsageError, match="admits no cut"):
        cuts("all", admits=lambda cut: False)
    with pytest.raises(UsageError, match="prompt is empty"):
        cuts("0", length=0)


@given(lengths, windows, st.sampled_from(["grid", "all", "around:W", "::3", "W:"]), st.integers(1, 9))
def test_cuts_of_the_tool_lie_in_range_are_admitted_ascending_and_distinct(length, window, spec, block):
    def admits(cut: int) -> bool:
        return cut % block == 0

    try:
        found = specs.parse_cuts(spec, length=length, window=window, admits=admits)
    except UsageError as error:
        assert "name no position" in str(error)
        return
    assert all(0 <= cut < length and admits(cut) for cut in found.values)
    assert list(found.values) == sorted(set(found.values))
    free = specs.parse_cuts(spec, length=length, window=window)
    assert found.snapped == sum(not admits(cut) for cut in free.values)


@given(st.lists(st.integers(0, N - 1), min_size=1))
def test_numbers_typed_by_hand_are_taken_as_they_are(numbers):
    assert cuts(",".join(map(str, numbers))) == tuple(sorted(set(numbers)))


@given(st.text(max_size=40) | st.text("0123456789W:,+-around gridexact", max_size=30))
def test_any_text_is_read_or_refused_with_the_projects_own_error(text):
    for read in (
        cuts,
        lambda t: specs.parse_replay(t, window=W, layers=8),
        specs.parse_suffix,
        specs.parse_bytes,
        specs.parse_device,
        specs.parse_dtype,
        lambda t: specs.parse_tolerance(t, ("rel_l2",)),
        lambda t: expand_points([t], point_names(3)),
    ):
        try:
            read(text)
        except ReplayScopeError as error:
            assert str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("W", (128,)),
        ("64,W,2W,128", (64, 128, 256)),
        ("exact", (8 * 127 + 1,)),
        ("1:200:100", (1, 101)),
        ("around:W", (127, 128, 129)),
    ],
)
def test_replay_lengths(spec, expected):
    assert specs.parse_replay(spec, window=W, layers=8) == expected


@pytest.mark.parametrize("spec", ["0", "grid", "all", "1:", "0:10", "x", "", "1:1000000000:1"])
def test_bad_replay_lengths(spec):
    with pytest.raises(UsageError):
        specs.parse_replay(spec, window=W, layers=8)


def test_reading_without_a_prompt_finds_the_same_faults_of_form():
    assert specs.check_cuts("grid,100000") == "grid,100000"
    assert specs.check_replay("W,exact") == "W,exact"
    for check in (specs.check_cuts, specs.check_replay):
        with pytest.raises(UsageError):
            check("nope")


def test_suffix_and_counts():
    assert specs.parse_suffix("all") is None
    assert specs.parse_suffix(" 64 ") == 64
    for bad in ("0", "-1", "1e3", "", "99999999999999999999999"):
        with pytest.raises(UsageError, match="suffix"):
            specs.parse_suffix(bad)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1k", 1024), ("512M", 512 * 2**20), ("1.5GiB", 3 * 2**29), ("4GB", 4 * 10**9), ("2 TiB", 2**41)],
)  # fmt: skip
def test_sizes(text, size):
    assert specs.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1e9", "4X", "1.M", "inf"])
def test_bad_sizes(text):
    with pytest.raises(UsageError, match="size"):
        specs.parse_bytes(text)


def test_devices_and_dtypes():
    assert [specs.parse_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == ["auto", "cpu", "cuda", "cuda:1"]
    assert [specs.parse_dtype(name) for name in ("fp64", "float32", "bfloat16")] == ["fp64", "fp32", "bf16"]
    for bad in ("gpu", "cuda:", "cuda:-1", "CPU"):
        with pytest.raises(UsageError, match="device"):
            specs.parse_device(bad)
    with pytest.raises(UsageError, match="dtype"):
        specs.parse_dtype("fp16")


def test_tolerances():
    read = specs.parse_tolerance("layers.*.window_kv=rel_l2<=1e-3", ("rel_l2", "cosine"))
    assert read == specs.Tolerance("layers.*.window_kv", "rel_l2", 1e-3)
    with pytest.raises(UsageError, match="did you mean 'rel_l2'"):
        specs.parse_tolerance("*=rell2<=1", ("rel_l2", "cosine"))
    for bad in ("*=rel_l2<1", "*=rel_l2<=x", "*=rel_l2<=-1", "*=rel_l2<=nan", "*=rel_l2<=inf", "rel_l2<=1"):
        with pytest.raises(UsageError, match="tolerance"):
            specs.parse_tolerance(bad, ("rel_l2",))


def test_hook_points_have_the_names_of_the_data_flow():
    names = point_names(2)
    assert names[0] == "embed" and names[-2:] == ("final", "logits") and len(names) == 3 + 2 * 11
    assert names[1] == "layers.0.attn_in"


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (["layers.*.window_kv"], [f"layers.{i}.window_kv" for i in range(12)]),
        (["layers.{0,11}.hidden"], ["layers.0.hidden", "layers.11.hidden"]),
        (["layers.{9..11}.hidden,logits"], ["layers.9.hidden", "layers.10.hidden", "layers.11.hidden", "logits"]),
        (["logits", "embed"], ["embed", "logits"]),
        (["layers.[0-1].{topk,router}"], [f"layers.{i}.{p}" for i in (0, 1) for p in ("topk", "router")]),
        (["layers.1?.mix"], ["layers.10.mix", "layers.11.mix"]),
        (["layers.{{0,1},2}.mix"], ["layers.0.mix", "layers.1.mix", "layers.2.mix"]),
    ],
)
def test_globs(globs, expected):
    assert list(expand_points(globs, point_names(12))) == expected


def test_a_star_takes_everything_and_commas_in_braces_do_not_split():
    assert expand_points(["*"], point_names(3)) == point_names(3)
    assert split_globs("a.{b,c}.d, e") == ("a.{b,c}.d", "e")


@pytest.mark.parametrize(
    ("glob", "says"),
    [
        ("layers.*.window", r"unknown hook point 'layers.\*.window'; .*layers.\{0..3\}.\{attn_in,"),
        ("layers.{0,99}.hidden", r"'layers.99.hidden'"),
        ("logit", "did you mean 'logits'"),
        ("hidden", r"hook point 'hidden' belongs to a layer; write 'layers.\*.hidden'"),
        ("layers.{0.hidden", "brace"),
        ("", "unknown hook point ''"),
        ("{0..999999}{0..9}", "more than"),
    ],
)
def test_bad_globs(glob, says):
    with pytest.raises(UsageError, match=says):
        expand_points([glob], point_names(4))


@given(st.integers(1, 30), st.sets(st.integers(0, 29), min_size=1))
def test_braces_name_exactly_their_layers(layers, wanted):
    glob = f"layers.{{{','.join(map(str, wanted))}}}.hidden"
    valid = point_names(layers)
    if max(wanted) < layers:
        assert expand_points([glob], valid) == tuple(f"layers.{i}.hidden" for i in sorted(wanted))
    else:
        with pytest.raises(UsageError):
            expand_points([glob], valid)


def test_a_threshold_is_a_positive_number():
    assert specs.parse_threshold("1e-3") == 1e-3
    for text in ("nan", "inf", "0", "-1", "1e99", "x"):
        with pytest.raises(UsageError, match="threshold"):
            specs.parse_threshold(text)
