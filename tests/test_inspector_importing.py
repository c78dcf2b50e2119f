"""Dumps of engines as traces: a small model dumped by SGLang's dumper, vLLM's hidden states, folders with a map."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from replayscope.inspector.cli import main
from replayscope.inspector.compare import comparison
from replayscope.inspector.executor import Executor
from replayscope.inspector.semantics import request
from replayscope.traces import TraceReader
from tests import v41
from tests.sglang_dump import by_layout, writers

IDS = v41.ids()
PROMPT = "ids:" + ",".join(map(str, IDS.tolist()))
WHO = ["--engine", "sglang", "--engine-version", "0.5.10", "--engine-commit", "0123abc"]
POINTS = ("hidden", "window_kv", "attn_out", "logits")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The fixture's checkpoint as a folder, and our trace of its arms full and encoder."""
    path = tmp_path_factory.mktemp("model")
    shutil.copy(v41.ROOT / "plain" / "config.json", path)
    shutil.copy(v41.ROOT / "weights" / "model.safetensors", path)
    for arm, more in (("full", []), ("encoder", ["--cuts", "40"])):
        hooks = ",".join("logits" if p == "logits" else f"layers.*.{p}" for p in POINTS)
        words = ["record", "-m", path, "-p", PROMPT, "--arms", arm, "--hooks", hooks, "-q", "-o", path / f"{arm}.h5"]
        assert main([str(word) for word in (*words, *more)]) == 0
    return path


def dumped(arm: str = "full", chunks=((0, 68),), **edits) -> list:
    """What an engine with a dumper in its layers would dump: one step per chunk. edits: hook point -> what is added to
    an element (layer, position, channel, by)."""
    executor = Executor(v41.model(torch.float32))
    asked = request(v41.shape(), arm, 40 if arm == "encoder" else None)
    requests = [asked] if arm == "full" else [request(v41.shape(), "full"), asked]
    states = v41.rows(executor, requests, POINTS)[-1]
    steps = []
    for first, stop in chunks:
        at = slice(first - asked.start, stop - asked.start)
        rows = [("positions", torch.arange(first, stop), {}), ("input_ids", IDS[first:stop], {})]
        for name, values in states.items():
            point = name.rsplit(".", 1)[-1]
            if point not in POINTS:
                continue
            value = values[at].clone()
            layer = int(name.split(".")[1]) if "." in name else None
            for to, position, channel, by in edits.get(point, ()):
                if to == layer and first <= position < stop:
                    value[position - first, channel] += by
            rows.append((point, value, {} if layer is None else {"layer_id": layer}))
        steps.append(rows)
    return steps


def run(capsys, *words) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def imported(capsys, source, out, *more, fmt="sglang-dump", names="v41"):
    words = ("import", source, "--format", fmt, "--map", names, *WHO, "-o", out, *more)
    return run(capsys, *words)


# --- SGLang -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", writers())
def test_a_dump_without_a_fault_equals_our_arm(writer, model, tmp_path, capsys):
    folder = writers()[writer](tmp_path, dumped(chunks=((0, 24), (24, 68))))
    code, out, err = imported(capsys, folder, tmp_path / "t.h5", "-m", model, "-p", PROMPT)
    assert code == 0, err
    assert "of full from sglang 0.5.10" in out
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.complete and not trace.verify()
    assert trace.provenance["engine"] == {"name": "sglang", "version": "0.5.10", "commit": "0123abc"}
    assert trace.state(0, "layers.3.hidden").positions.tolist() == list(range(68))
    code, out, err = run(capsys, "compare", model / "full.h5", tmp_path / "t.h5", "--tol", "*=rel_l2<=1e-4", "--first")
    assert code == 0 and "no cell is over its threshold" in out, out + err


@pytest.mark.parametrize("writer", writers())
def test_a_planted_fault_is_the_first_divergent_cell(writer, model, tmp_path, capsys):
    edits = {"window_kv": [(5, 30, 3, 0.5)], "hidden": [(5, 33, 1, 9.0), (6, 2, 0, 9.0)], "logits": [(None, 1, 1, 5.0)]}
    folder = writers()[writer](tmp_path, dumped(chunks=((0, 24), (24, 68)), **edits))
    assert imported(capsys, folder, tmp_path / "t.h5", "-m", model)[0] == 0
    words = ("compare", model / "full.h5", tmp_path / "t.h5", "--tol", "*=rel_l2<=1e-4", "--first")
    code, out, _ = run(capsys, *words, "--json")
    cell = json.loads(out)["first"]
    assert code == 1 and (cell["name"], cell["position"]) == ("layers.5.window_kv", 30)
    assert cell["worst"]["channel"] == [3]
    assert cell["worst"]["second"] - cell["worst"]["first"] == pytest.approx(0.5, abs=1e-4)


def test_an_arm_with_a_cut_is_judged_against_ours_of_the_same_semantics(model, tmp_path, capsys):
    edits = {"attn_out": [(7, 36, 2, 4.0)]}
    folder = by_layout(tmp_path, dumped("encoder", chunks=((34, 68),), **edits))
    arm = ("--arm", "encoder", "--cut", "40")
    code, out, err = imported(capsys, folder, tmp_path / "t.h5", *arm, "--against", model / "encoder.h5", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["run"] in [run.label for run in TraceReader(model / "encoder.h5").runs]
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["layers.7.attn_out"]["metrics"]["max_abs"] == pytest.approx(4.0, abs=1e-3)
    assert rows["layers.6.hidden"]["metrics"]["rel_l2"] < 1e-4 and rows["layers.6.hidden"]["n"] == 34
    assert TraceReader(tmp_path / "t.h5").runs[0].replayed == 6
    # Against another arm it is refused with the field that differs.
    code, _, err = run(capsys, "compare", model / "full.h5", tmp_path / "t.h5")
    assert code == 2 and "arm is full in the first, encoder in the second" in err


def test_steps_are_chosen_and_a_warm_up_is_refused_by_name(model, tmp_path, capsys):
    folder = by_layout(tmp_path, [*dumped(chunks=((0, 10),)), *dumped(chunks=((0, 68),))])
    code, _, err = imported(capsys, folder, tmp_path / "t.h5", "-m", model)
    assert code == 2 and "position 0 twice, in steps 0, 1; choose with --steps" in err
    assert imported(capsys, folder, tmp_path / "t.h5", "-m", model, "--steps", "1")[0] == 0
    code, _, err = imported(capsys, folder, tmp_path / "u.h5", "-m", model, "--steps", "7:")
    assert code == 2 and "no step 7; its steps are 0, 1" in err


# --- tensor parallel ----------------------------------------------------------------------------------------------


def split(steps, rank, of=2):
    """The rows' last dimension cut in parts, as a column-parallel layer leaves it."""
    return [[(n, v if v.ndim == 1 else v.chunk(of, -1)[rank].clone(), tags) for n, v, tags in step] for step in steps]


def test_shards_are_joined_along_the_named_dimension(model, tmp_path, capsys):
    steps = [[row for row in step if row[0] != "logits"] for step in dumped()]
    for rank in (1, 0):
        folder = by_layout(tmp_path, split(steps, rank), rank, 2, dims="t h[tp]")
    code, _, err = imported(capsys, folder, tmp_path / "t.h5", "-m", model)
    assert code == 0, err
    found = comparison(TraceReader(model / "full.h5"), TraceReader(tmp_path / "t.h5"))
    assert max(row.metrics["rel_l2"] for row in found.rows) < 1e-4
    # The same shards in the wrong order are another tensor.
    for path in folder.glob("*.pt"):
        data = torch.load(path, weights_only=True)
        info = data["meta"]["sglang_parallel_info"]
        info["tp_rank"] = 1 - info["tp_rank"]
        torch.save(data, path)
    assert imported(capsys, folder, tmp_path / "t.h5", "-m", model, "--force")[0] == 0
    found = comparison(TraceReader(model / "full.h5"), TraceReader(tmp_path / "t.h5"))
    assert min(row.metrics["rel_l2"] for row in found.rows) > 0.1


def two_ranks(tmp_path, *, second=True, dims=None, same=False, third=None):
    steps = [[row for row in step if row[0] in ("positions", "input_ids", "hidden")] for step in dumped()]
    for rank in (0, 1)[: 1 + second]:
        part = steps if same else split(steps, rank)
        if third is not None and rank == 1:
            part = [[(n, third(v) if v.ndim > 1 else v, tags) for n, v, tags in step] for step in part]
        folder = by_layout(tmp_path, part, rank, 2, dims=dims)
    return folder


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"dims": "t h[tp]", "second": False}, "1 of 2 shards are missing, the first is rank 1"),
        ({}, "differs between ranks; name the dimension that is split in the map: dims 't h[tp]'"),
        ({"second": False}, "1 of 2 ranks are here; if all hold the same, say so in the map"),
        ({"second": False, "dims": "t h"}, "hidden_size is 64; is it a shard of several?"),
        ({"dims": "t h"}, "differs between ranks, though 't h' splits none of its dimensions"),
        ({"dims": "t h[tp:partial]"}, "dimension 'h[tp:partial]' cannot be joined"),
        ({"dims": "t[cp] h"}, "dimension 't[cp]' cannot be joined"),
        ({"dims": "b t h[tp]"}, "has 2 dimensions, and dims names 3"),
        ({"dims": "t h[tp]", "third": lambda v: v[:-1]}, "do not join"),
    ],
)
def test_shards_that_cannot_be_joined_are_refused(made, says, model, tmp_path, capsys):
    folder = two_ranks(tmp_path, **made)
    code, out, err = imported(capsys, folder, tmp_path / "t.h5", "-m", model)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1, err
    assert not list(tmp_path.glob("t.h5*"))


def test_ranks_that_hold_the_same_are_one(model, tmp_path, capsys):
    folder = two_ranks(tmp_path, same=True)
    assert imported(capsys, folder, tmp_path / "t.h5", "-m", model)[0] == 0


def test_stages_of_a_pipeline_hold_layers_of_their_own(model, tmp_path, capsys):
    def stage(row) -> int | None:
        return 1 if row[0] == "logits" else row[2]["layer_id"] // 6 if "layer_id" in row[2] else None

    for rank in (0, 1):
        steps = [[row for row in step if stage(row) in (None, rank)] for step in dumped()]
        folder = by_layout(tmp_path, steps, rank, 2, pipeline=True)
    code, _, err = imported(capsys, folder, tmp_path / "t.h5", "-m", model)
    assert code == 0, err
    found = comparison(TraceReader(model / "full.h5"), TraceReader(tmp_path / "t.h5"))
    assert {row.name.split(".")[1] for row in found.rows if "." in row.name} == set(map(str, range(12)))
    assert max(row.metrics["rel_l2"] for row in found.rows) < 1e-4
    # Shards of the tensor-parallel ranks of one stage are not taken for stages.
    other = by_layout(tmp_path / "tp", split(dumped(), 0), 0, 2)
    assert imported(capsys, other, tmp_path / "u.h5", "-m", model)[0] == 2


# --- vLLM and folders ---------------------------------------------------------------------------------------------


def write_map(path, **changes):
    path.write_text(json.dumps(changes))
    return path


def test_hidden_states_of_vllm_are_what_enters_a_layer(model, tmp_path, capsys):
    """hidden_states [token, layer id, d]: id k is what layer k-1 leaves, 0 the embeddings."""
    states = {int(tags["layer_id"]): value for name, value, tags in dumped()[0] if name == "hidden"}
    stack = torch.stack([states[0], states[3], states[7]], 1).bfloat16()
    save_file({"hidden_states": stack, "token_ids": IDS.clone()}, tmp_path / "req-1.safetensors")
    names = write_map(tmp_path / "map.json", layers=[1, 4, 8])
    code, _, err = imported(capsys, tmp_path, tmp_path / "t.h5", "-m", model, fmt="vllm-hidden", names=names)
    assert code == 0, err
    trace = TraceReader(tmp_path / "t.h5")
    assert [name for _, name in trace.states()] == ["layers.0.hidden", "layers.3.hidden", "layers.7.hidden"]
    assert trace.state(0, "layers.3.hidden").logical_dtype == "bfloat16"
    found = comparison(TraceReader(model / "full.h5"), trace)
    assert max(row.metrics["rel_l2"] for row in found.rows) < 2**-8
    # With ids that are off by one the states are those of other layers.
    wrong = write_map(tmp_path / "wrong.json", layers=[2, 5, 7])
    assert imported(capsys, tmp_path, tmp_path / "u.h5", "-m", model, fmt="vllm-hidden", names=wrong)[0] == 0
    found = comparison(TraceReader(model / "full.h5"), TraceReader(tmp_path / "u.h5"))
    assert min(row.metrics["rel_l2"] for row in found.rows) > 0.01
    short = write_map(tmp_path / "short.json", layers=[1, 4])
    code, _, err = imported(capsys, tmp_path, tmp_path / "v.h5", "-m", model, fmt="vllm-hidden", names=short)
    assert code == 2 and "want [token, 2 layer ids of the map, d]" in err


def test_a_folder_of_npy_and_safetensors_with_a_map(model, tmp_path, capsys):
    states = {(name, tags.get("layer_id")): value for name, value, tags in dumped()[0]}
    folder = tmp_path / "dump"
    folder.mkdir()
    np.save(folder / "out.3.npy", states["hidden", 3].numpy())
    np.save(folder / "kv.2.npy", states["window_kv", 2].bfloat16().view(torch.uint16).numpy())
    residual = torch.randn_like(states["hidden", 4])
    save_file(
        {"a.4": states["hidden", 4] - residual, "b.4": residual, "ids": IDS[None].clone()}, folder / "x.safetensors"
    )
    points = [
        {"from": "out.{layer}", "to": "layers.{layer}.hidden"},
        {"sum": ["a.{layer}", "b.{layer}"], "to": "layers.{layer}.hidden"},
        {"from": "kv.{layer}", "to": "layers.{layer}.window_kv", "dtype": "bfloat16"},
    ]
    names = write_map(tmp_path / "map.json", tokens="ids", points=points)
    code, _, err = imported(capsys, folder, tmp_path / "t.h5", "-m", model, fmt="folder", names=names)
    assert code == 0, err
    found = comparison(TraceReader(model / "full.h5"), TraceReader(tmp_path / "t.h5"))
    assert [row.name for row in found.rows] == ["layers.2.window_kv", "layers.3.hidden", "layers.4.hidden"]
    assert max(row.metrics["rel_l2"] for row in found.rows) < 2**-8
    assert max(row.metrics["rel_l2"] for row in found.rows[1:]) < 1e-4


def test_ranks_in_names_and_hugging_face_names(model, tmp_path, capsys):
    hidden = next(value for name, value, tags in dumped()[0] if name == "hidden" and tags["layer_id"] == 3)
    folder = tmp_path / "dump"
    folder.mkdir()
    for rank, part in enumerate(hidden.chunk(4, 1)):
        np.save(folder / f"h.3.tp{rank}.npy", part.numpy())
    points = [{"from": "h.{layer}.tp{rank}", "to": "layers.{layer}.hidden", "dims": "t h[tp]"}]
    names = write_map(tmp_path / "map.json", points=points)
    words = ("-m", model, "-p", PROMPT)
    assert imported(capsys, folder, tmp_path / "t.h5", *words, fmt="folder", names=names)[0] == 0
    row = comparison(TraceReader(model / "full.h5"), TraceReader(tmp_path / "t.h5")).rows[0]
    assert row.metrics["rel_l2"] < 1e-4
    (folder / "h.3.tp2.npy").unlink()
    code, _, err = imported(capsys, folder, tmp_path / "u.h5", *words, fmt="folder", names=names)
    assert code == 2 and "1 of 4 shards are missing, the first is rank 2" in err
    for path in folder.iterdir():
        path.unlink()
    np.save(folder / "hidden_states.4.npy", hidden[None].numpy())
    assert imported(capsys, folder, tmp_path / "v.h5", *words, fmt="folder", names="huggingface")[0] == 0
    assert TraceReader(tmp_path / "v.h5").states() == [(0, "layers.3.hidden")]


def test_an_import_of_other_positions_than_ours_does_not_pass(model, tmp_path, capsys):
    """The word for the table and the word for the first cell are one key, and neither hides the other."""
    points = [{"from": "rows.{layer}", "to": "layers.{layer}.hidden", "first": 0}]
    (tmp_path / "map.json").write_text(json.dumps({"points": points}))
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "rows.0.npy", np.zeros((8, 64), np.float32))
    how = {"fmt": "folder", "names": tmp_path / "map.json"}
    arm = ("--arm", "encoder", "--cut", "40", "--against", model / "encoder.h5", "--json")
    code, out, err = imported(capsys, tmp_path / "dump", tmp_path / "t.h5", *arm, **how)
    assert code == 0, err
    told = json.loads(out)
    assert told["passed"] is False and told["compared"] == [0, 0] and told["rows"][0]["n"] == 0
