"""record and sweep from the command line on a real model: what is written, what is refused, what is left behind."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from replayscope.inspector.cli import main
from replayscope.inspector.verdict import verdict
from replayscope.traces.reader import TraceReader
from tests import v41

IDS = "ids:" + ",".join(map(str, v41.ids().tolist()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The fixture's checkpoint as a user would have it: a folder with config.json and safetensors."""
    path = tmp_path_factory.mktemp("model")
    shutil.copy(v41.ROOT / "plain" / "config.json", path)
    shutil.copy(v41.ROOT / "weights" / "model.safetensors", path)
    return path


def run(capsys, *words) -> tuple[int, str, str]:
    code = main([str(w) for w in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_record_writes_states_and_divergence_that_can_be_run_again(folder, tmp_path, capsys):
    out = tmp_path / "t.h5"
    words = ["record", "-m", folder, "-p", IDS, "--arms", "full,repeat,rechunk,hit,encoder,oracle:encoder"]
    hooks = "layers.{0,5}.window_kv,layers.4.global_kv"
    code, text, _ = run(capsys, *words, "--cuts", "40", "--hooks", hooks, "-o", out)
    assert code == 0 and "right arms: no bug" in text and str(out) in text
    trace = TraceReader(out)
    assert trace.complete and not trace.verify() and not out.with_name("t.h5.partial").exists()
    encoder = next(r for r in trace.runs if r.arm == "encoder")
    assert (encoder.replayed, encoder.cached, encoder.fresh, encoder.start) == (6, 40, 28, 34)
    kept = trace.state(encoder.index, "layers.5.window_kv")
    assert kept.positions.tolist() == list(range(34, 68)) and kept.logical_dtype == "float32"
    assert kept.values.shape == (34, v41.config().head_dim)
    full = trace.state(0, "layers.5.window_kv")
    assert np.abs(full.values - v41.arrays("full")["window_kv"][5]).max() < 5e-5
    table = trace.table("full", "window_kv")
    gap = (kept.values[:6] - full.values[34:40]).astype(np.float64)
    at = (encoder.index, 5, table.bucket("window"))
    assert table.arrays["diff2"][at] == pytest.approx((gap**2).sum(), rel=1e-6)
    about = trace.provenance
    assert about["tokens_sha256"] and about["weights_sha256"] and about["dtype"] == "float32"
    assert about["argv"][0] == "replayscope" and about["options"]["cuts"] == "40"
    assert trace.tokens.ids.tolist() == v41.ids().tolist()


def test_bf16_states_are_stored_bit_exactly(folder, tmp_path, capsys):
    out = tmp_path / "b.h5"
    words = ["record", "-m", folder, "-p", IDS, "--arms", "full,encoder", "--cuts", "40", "--dtype", "bf16"]
    assert run(capsys, *words, "--hooks", "layers.3.window_kv", "-o", out)[0] == 0
    state = TraceReader(out).state(0, "layers.3.window_kv")
    assert state.logical_dtype == "bfloat16" and state.bits.dtype == np.uint16
    again = torch.tensor(state.values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (again == state.bits).all()
    # bf16 keeps 8 bits: a state of order 1 lies within a few hundredths of the fp64 one after four layers.
    assert np.abs(state.values - v41.arrays("full")["window_kv"][3]).mean() < 0.05


def test_audit_finds_the_planted_fault_and_exits_0(folder, tmp_path, capsys):
    out = tmp_path / "a.h5"
    words = ["sweep", "-m", folder, "-p", IDS, "--arms", "full,repeat,rechunk,hit,encoder,broken:floor@11"]
    code, text, _ = run(capsys, *words, "--cuts", "40,41", "--audit", "--dtype", "fp64", "-o", out)
    assert code == 0 and "planted faults: 2 of 2 found" in text
    found = verdict(TraceReader(out)).bugs
    assert {(b.arm, b.point, b.layer) for b in found} == {("broken:floor@11", "attn_out", 11)}
    assert sorted(b.position for b in found) == [34, 35]


def test_the_json_document_is_strict_and_holds_the_table(folder, tmp_path, capsys):
    words = ["sweep", "-m", folder, "-p", IDS, "--cuts", "W+1", "-o", tmp_path / "j.h5", "--json", "-q"]
    code, text, err = run(capsys, *words)
    data = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert code == 0 and err == "" and {row["arm"] for row in data["arms"]} >= {"rechunk", "hit", "encoder"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cuts", "69"], "cut 69 is out of range: this prompt has cuts 0..67"),
        (["--arms", "encoder,broken:stale", "--cuts", "6"], "changes nothing at cut 6"),
        (["--arms", "encoder,broken:floor@12"], "unknown arm 'broken:floor@12'"),
        (["--hooks", "layers.99.window_kv"], "unknown hook point 'layers.99.window_kv'"),
        (["--hooks", "layers.0.topk"], "unknown hook point 'layers.0.topk'"),
        (["--forced", "68"], "--forced 68 leaves no prompt"),
        (["--max-bytes", "1000"], "--max-bytes allows 1,000"),
        (["-p", "some text"], "comes without a tokenizer"),
        (["-p", "ids:1,160"], "token id 160 is outside the vocabulary"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(folder, tmp_path, capsys, words, says):
    out = tmp_path / "t.h5"
    base = ["sweep", "-m", folder, "-o", out] + (["-p", IDS] if "-p" not in words else [])
    code, text, err = run(capsys, *base, *words)
    last = err.strip().splitlines()[-1]
    assert code == 2 and text == "" and says in last and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["nan", "missing", "shape", "garbage", "no config", "bad config", "engram"])
def test_a_broken_checkpoint_is_one_line(folder, tmp_path, capsys, fault):
    broken = tmp_path / "m"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    if fault in ("nan", "missing", "shape"):
        tensors = load_file(weights)
        name = "layers.3.attn_norm.weight"
        if fault == "nan":
            tensors[name][5] = float("nan")
        elif fault == "shape":
            tensors[name] = tensors[name][:5].clone()
        else:
            del tensors[name]
        save_file(tensors, weights)
    elif fault == "garbage":
        weights.write_bytes(b"\x00" * 100)
    elif fault == "no config":
        (broken / "config.json").unlink()
    elif fault == "bad config":
        (broken / "config.json").write_text('{"text_config": {"hidden_size": "wide"}}')
    else:
        shutil.copy(v41.ROOT / "released" / "config.json", broken)
    code, text, err = run(capsys, "record", "-m", broken, "-p", IDS, "--arms", "full", "-o", tmp_path / "t.h5")
    assert code == 2 and text == "" and len(err.strip().splitlines()) == 1, err
    says = {"nan": "NaN", "missing": "missing layers.3", "shape": "misshapen", "garbage": "cannot read weights",
            "no config": "no config.json", "bad config": "config lacks", "engram": "engram_token_map.json"}  # fmt: skip
    assert says[fault] in err
    assert not (tmp_path / "t.h5").exists()


def test_an_existing_trace_is_not_touched_without_force(folder, tmp_path, capsys):
    out = tmp_path / "t.h5"
    out.write_bytes(b"precious")
    words = ["record", "-m", folder, "-p", IDS, "--arms", "full", "-o", out]
    code, _, err = run(capsys, *words)
    assert code == 2 and "--force" in err and out.read_bytes() == b"precious"
    assert run(capsys, *words, "--force")[0] == 0 and TraceReader(out).complete


def test_interrupted_leaves_the_old_trace_and_says_where_the_rest_is(folder, tmp_path, capsys, monkeypatch):
    from replayscope.inspector import usecases

    out = tmp_path / "t.h5"
    out.write_bytes(b"precious")

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(usecases, "run", stop)
    code, _, err = run(capsys, "record", "-m", folder, "-p", IDS, "--arms", "full", "-o", out, "--force")
    assert code == 130 and out.read_bytes() == b"precious" and "interrupted" in err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([], "not a JSON object"),
        ({"text_config": "x"}, "not a JSON object"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"sliding_window": True}, "sliding_window must be a whole number"),
        ({"sliding_window": 2**33}, "sliding_window"),
        ({"rms_norm_eps": "NaN"}, "rms_norm_eps must be a finite number"),
        ({"swiglu_limit": None}, "swiglu_limit must be a finite number"),
        ({"rope_theta": 0}, "rope_theta must be larger than 1"),
        ({"scoring_func": "nope"}, "scoring_func 'nope' is not modelled"),
        ({"rope_scaling": {"rope_type": "nope"}}, "rope_scaling.rope_type 'nope' is not modelled"),
        ({"compress_ratios": 3}, "compress_ratios is not a list"),
    ],
)
def test_a_config_that_says_something_else_is_refused_by_key(folder, tmp_path, capsys, change, says):
    broken = tmp_path / "m"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    if isinstance(change, dict) and "text_config" not in change:
        config["text_config"] |= change
    else:
        config = change
    (broken / "config.json").write_text(json.dumps(config))
    code, text, err = run(capsys, "record", "-m", broken, "-p", IDS, "--arms", "full", "-o", tmp_path / "t.h5")
    assert code == 2 and text == "" and len(err.strip().splitlines()) == 1 and says in err, err


def test_a_config_of_another_family_or_nested_without_end_is_one_line(folder, tmp_path, capsys):
    broken = tmp_path / "m"
    shutil.copytree(folder, broken)
    for text, says in (
        (json.dumps(json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}), "model_type 'llama'"),
        ("[" * 100_000, "nested too deeply"),
    ):
        (broken / "config.json").write_text(text)
        code, _, err = run(capsys, "record", "-m", broken, "-p", IDS, "--arms", "full", "-o", tmp_path / "t.h5")
        assert code == 2 and len(err.strip().splitlines()) == 1 and says in err, err


def test_the_estimate_is_no_smaller_than_the_file(folder, tmp_path, capsys):
    for i, more in enumerate((["--rows"], ["--audit", "--dtype", "fp64", "--rows"], ["--suffix", "4"])):
        out = tmp_path / f"{i}.h5"
        words = ["sweep", "-m", folder, "-p", IDS, "--arms", "full,repeat,rechunk,hit,encoder,oracle:encoder", *more]
        code, _, err = run(capsys, *words, "--cuts", "7,40,41", "--hooks", "layers.3.hidden", "-o", out)
        said = float(re.search(r"and ([0-9.]+) MB", err)[1]) * 1e6
        size = out.stat().st_size
        # Bytes follow from shapes; HDF5 adds a few per cent, and whoever plans a disk needs no more than that.
        assert code == 0 and size <= said * 1.001 + 5e4 and said < 1.5 * size + 1e6, (said, size)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--block", "16"], "paper has no blocks"),
        (["--chunks", "10,999"], "no chunk can end at 999"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder, tmp_path, capsys, words, says):
    code, _, err = run(capsys, "sweep", "-m", folder, "-p", IDS, "--cuts", "32", *words, "-o", tmp_path / "t.h5")
    assert code == 2 and says in err and not list(tmp_path.iterdir())
