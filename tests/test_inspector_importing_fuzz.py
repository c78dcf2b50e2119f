"""Damaged dumps: bytes flipped and tails cut, always a trace or one line, and never half a trace."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from replayscope.inspector import cli
from replayscope.traces import TraceReader
from tests.sglang_dump import by_layout

N, WIDTH = 12, 8
TRIES = 120


def sglang(folder):
    rows = [("positions", torch.arange(N), {}), ("input_ids", torch.arange(N), {})]
    return by_layout(folder, [[*rows, ("hidden", torch.ones(N, WIDTH), {"layer_id": 0})]])


def vllm(folder):
    save_file({"hidden_states": torch.ones(N, 2, WIDTH), "token_ids": torch.arange(N)}, folder / "r.safetensors")
    return folder


def arrays(folder):
    np.save(folder / "h.0.npy", np.ones((N, WIDTH), np.float32))
    return folder


@pytest.mark.parametrize(
    ("make", "format", "names"),
    [(sglang, "sglang-dump", "v41"), (vllm, "vllm-hidden", "own"), (arrays, "folder", "own")],
)
def test_a_damaged_dump_is_read_or_refused(make, format, names, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    config = {"num_hidden_layers": 3, "hidden_size": WIDTH, "vocab_size": 20}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    own = tmp_path / "map.json"
    points = [{"from": "h.{layer}", "to": "layers.{layer}.hidden", "dims": "t h"}]
    own.write_text(json.dumps({"tokens": "ids", "layers": [1, 2], "points": points}))
    (tmp_path / "dump").mkdir()
    source, out = make(tmp_path / "dump"), tmp_path / "t.h5"
    files = [path for path in source.iterdir() if path.is_file()] + ([own] if names == "own" else [])
    words = ["import", source, "--format", format, "--map", own if names == "own" else names, "-m", tmp_path / "model"]
    words += ["--engine", "e", "--engine-version", "1", "--engine-commit", "c", "-o", out]
    words += ["-p", "ids:" + ",".join(map(str, range(N)))]
    words = [str(word) for word in words]
    drawn, codes = random.Random(0), set()
    for _ in range(TRIES):
        path = drawn.choice(files)
        whole = path.read_bytes()
        data = bytearray(whole)
        for _ in range(drawn.choice((1, 1, 3))):
            data[drawn.randrange(min(len(data), drawn.choice((200, 1 << 20))))] = drawn.randrange(256)
        if drawn.random() < 0.2:
            del data[drawn.randrange(len(data)) :]
        path.write_bytes(data)
        code = cli.main([*words, "-q"])
        told = capsys.readouterr()
        if code == 0:
            assert not TraceReader(out).verify()
            out.unlink()
        else:
            assert code == 2 and told.err.count("\n") == 1 and "internal error" not in told.err, told.err
        assert not list(tmp_path.glob("t.h5*"))
        path.write_bytes(whole)
        codes.add(code)
    assert codes == {0, 2}, "no file was damaged, or none was read"
