"""A sweep that was stopped and taken up equals one that was not, bit by bit, wherever it was stopped."""

import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from replayscope.inspector import snapshot
from replayscope.inspector.cli import main
from replayscope.inspector.executor import Executor
from replayscope.traces.reader import TraceReader
from tests import checkpoints
from tests.test_model_streaming import differences

# The schedule of layers is what matters here, not how many experts they have.
CONFIG = replace(checkpoints.CONFIG, n_routed_experts=3, num_experts_per_tok=2, hc_sinkhorn_iters=2)
IDS = "ids:" + ",".join(str(i * 7 % 200) for i in range(16))
ARMS = "full,both,frozen:encoder,broken:overwrite,oracle:both"


class Stopped(BaseException):
    """As a kill: nothing catches it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("official"), CONFIG, checkpoints.pack(CONFIG)[0])


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(snapshot, "EVERY", 0.0)


def words(folder, out, *more) -> list[str]:
    base = ("sweep", "-q", "-m", folder, "-p", IDS, "--cuts", "13", "--arms", ARMS, "--rows", "--hooks",
            "layers.*.hidden,embed,logits", "--dtype", "fp64", "-o", out, "--device", "cpu")  # fmt: skip
    return [str(w) for w in (*base, *more)]


def same(a: TraceReader, b: TraceReader) -> None:
    assert not differences(a, b) and a.states() == b.states() and a.verify() == b.verify() == []
    assert [r.to_json() for r in a.runs] == [r.to_json() for r in b.runs]
    for run, name in a.states():
        assert a.state(run, name).bits.tobytes() == b.state(run, name).bits.tobytes()
    for reference in a.references():
        for point in a.row_points(reference):
            for run in a.runs:
                mine, theirs = (t.rows(reference, point, run.index) for t in (a, b))
                assert mine.position.tolist() == theirs.position.tolist()
                assert all(x.tobytes() == theirs.arrays[k].tobytes() for k, x in mine.arrays.items())


def stopped(monkeypatch, frames: int, typed: list[str]) -> None:
    """A run that is stopped when so many frames have been handed out."""
    left = [frames]
    hand_out = Executor._hand_out

    def counted(self, frame):
        # The estimate runs a prefill of its own: only runs of several requests count.
        if len(self.plan.requests) > 1:
            left[0] -= 1
            if left[0] < 0:
                raise Stopped
        return hand_out(self, frame)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Executor, "_hand_out", counted)
        main(typed)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "t.h5"
    assert main(words(folder, out)) in (0, 1)
    return TraceReader(out)


@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
def test_it_goes_on_where_it_stopped(folder, tmp_path, monkeypatch, capsys, whole, stream):
    out, ran = tmp_path / "t.h5", []
    more = ["--stream"] * stream
    for frames in (3, 4, 5):
        stopped(monkeypatch, frames, words(folder, out, *more, *["--resume"] * (frames > 3)))
    layer = Executor.advance

    def noting(self, stops, want=frozenset(), take_up=None):
        for frame in layer(self, stops, want, take_up):
            if take_up:
                ran.append(frame.layer)
            yield frame

    monkeypatch.setattr(Executor, "advance", noting)
    assert main(words(folder, out, *more, "--resume")) in (0, 1)
    # Embed and layers 0, 1 ran first; then 2 to 5; then 6 to 10.
    assert ran == [11, None]
    same(whole, TraceReader(out))
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]


def test_a_run_of_several_parts_goes_on_in_the_part_where_it_stopped(folder, tmp_path, monkeypatch, capsys):
    """The first part is not run again, and what it folded is in the result."""
    typed = ["--budget", "64"]
    assert main(words(folder, tmp_path / "whole.h5", *typed)) in (0, 1)
    out, plans, run = tmp_path / "t.h5", [], Executor.run
    frames = CONFIG.num_hidden_layers + 2

    def noting(self, plan, *more):
        if len(plan.requests) > 1:
            plans.append([r.arm for r in plan.requests])
        return run(self, plan, *more)

    monkeypatch.setattr(Executor, "run", noting)
    stopped(monkeypatch, frames + 4, words(folder, out, *typed))
    first, second = plans
    assert set(first) != set(second), "stopped in the second of two parts"
    stopped(monkeypatch, 3, words(folder, out, *typed, "--resume"))
    assert main(words(folder, out, *typed, "--resume")) in (0, 1)
    assert plans == [first, second, second, second]
    same(TraceReader(tmp_path / "whole.h5"), TraceReader(out))


def test_what_an_earlier_part_folded_must_be_in_the_snapshot(folder, tmp_path, monkeypatch, capsys):
    """The twin: without it the runs of the first part have no numbers."""
    typed = ["--budget", "64"]
    assert main(words(folder, tmp_path / "whole.h5", *typed)) in (0, 1)
    out = tmp_path / "t.h5"
    stopped(monkeypatch, CONFIG.num_hidden_layers + 6, words(folder, out, *typed))
    unfold = snapshot._unfold

    def forgetful(fold, tensors, values) -> None:
        unfold(fold, tensors, values)
        for table in fold.tables.values():
            for array in table.arrays.values():
                array[1] = 0

    monkeypatch.setattr(snapshot, "_unfold", forgetful)
    assert main(words(folder, out, *typed, "--resume")) in (0, 1)
    with pytest.raises(AssertionError):
        same(TraceReader(tmp_path / "whole.h5"), TraceReader(out))


@pytest.mark.parametrize("lost", ["step streams", "candidates", "global_kv 6", "oracle 1 chosen", "rows"])
def test_what_a_snapshot_lacks_is_seen(folder, tmp_path, monkeypatch, capsys, whole, lost):
    """The twin: whatever is not put back shows in the result, or stops the run."""
    out = tmp_path / "t.h5"
    stopped(monkeypatch, 8, words(folder, out))
    load = snapshot.Snapshots._load

    def forgetful(self) -> None:
        load(self)
        tensors = [tensor for name, tensor in self._kept[0].items() if lost in name]
        assert tensors
        for tensor in tensors:
            tensor.zero_()

    monkeypatch.setattr(snapshot.Snapshots, "_load", forgetful)
    code = main(words(folder, out, "--resume"))
    with pytest.raises(AssertionError):
        assert code < 2
        same(whole, TraceReader(out))


def test_what_is_taken_up_lies_as_what_was_computed_did(folder, tmp_path, monkeypatch, capsys, whole):
    """A product of the same numbers is the same bits only where they lie alike, so it must not matter where in the
    snapshot they are."""
    out, load, lie = tmp_path / "t.h5", snapshot.Snapshots._load, []
    stopped(monkeypatch, 8, words(folder, out))
    snap = tmp_path / "t.h5.resume"
    raw = snap.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    pad = -length % 64 or 64  # then the first tensor begins 8 bytes behind a multiple of 64
    snap.write_bytes((length + pad).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * pad + raw[8 + length :])

    def noting(self) -> None:
        load(self)
        lie.extend(tensor.data_ptr() % 64 for tensor in self._kept[0].values() if tensor.numel())

    monkeypatch.setattr(snapshot.Snapshots, "_load", noting)
    assert main(words(folder, out, "--resume")) in (0, 1)
    assert len(lie) > 20 and set(lie) == {0}
    same(whole, TraceReader(out))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--seed", "1"], "its options.seed is 0, here 1"),
        (["--cuts", "12"], "its options.cuts is 13, here 12"),
        (["--dtype", "fp32"], "its options.dtype is fp64, here fp32"),
        (["-p", IDS + ",3"], "its options.prompt.value is "),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_another_run_is_not_taken_up(folder, tmp_path, monkeypatch, capsys, more, says):
    out = tmp_path / "t.h5"
    stopped(monkeypatch, 3, words(folder, out))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    capsys.readouterr()
    assert main([*words(folder, out), *more, "--resume"]) == 2
    printed, err = capsys.readouterr()
    assert printed == "" and len(err.splitlines()) == 1
    assert f"t.h5.partial is of another run: {says}" in err and "--force in place of --resume" in err
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


@pytest.mark.parametrize("left", ["nothing", "empty", "no snapshot", "torn"])
def test_resume_without_much_to_go_on(folder, tmp_path, monkeypatch, capsys, whole, left):
    out = tmp_path / "t.h5"
    snap = tmp_path / "t.h5.resume"
    if left == "empty":
        (tmp_path / "t.h5.partial").touch()
    if left in ("no snapshot", "torn"):
        stopped(monkeypatch, 4, words(folder, out))
        snap.write_bytes(snap.read_bytes()[:100])
    if left == "torn":
        assert main(words(folder, out, "--resume")) == 2
        assert "t.h5.resume cannot be read" in capsys.readouterr().err
        return
    if left == "no snapshot":
        snap.unlink()
    assert main(words(folder, out, "--resume")) in (0, 1)
    same(whole, TraceReader(out))


def test_a_run_from_the_start_forgets_what_another_kept_only_if_it_is_told_to(folder, tmp_path, monkeypatch, capsys):
    """And then all of it: otherwise a later --resume would put two runs together."""
    out = tmp_path / "t.h5"
    stopped(monkeypatch, 6, words(folder, out))
    monkeypatch.setattr(snapshot, "EVERY", 60.0)
    for left, says in (("t.h5.resume", "add --resume to go on with it, or --force"), ("", "add --force to replace it")):
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        capsys.readouterr()
        assert main(words(folder, out)) == 2
        printed, err = capsys.readouterr()
        assert printed == "" and len(err.splitlines()) == 1 and "t.h5.partial" in err and says in err
        assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        if left:
            (tmp_path / left).rename(tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / "t.h5.resume")
    stopped(monkeypatch, 3, words(folder, out, "--force"))
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5.partial"]


SCRIPT = """
import sys
from replayscope.inspector import snapshot
from replayscope.inspector.cli import main

snapshot.EVERY = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_sigkill_at_random_moments(folder, tmp_path, capsys, whole):
    out, draw = tmp_path / "t.h5", random.Random(0)
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    kept = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, *words(folder, out, "--resume")], env=env)
        snap = tmp_path / "t.h5.resume"
        before = snap.stat().st_mtime_ns if snap.exists() else 0
        while process.poll() is None and (not snap.exists() or snap.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        process.wait()
        kept.append(snap.exists())
    assert any(kept), "a kill falls behind the first layer"
    assert main(words(folder, out, "--resume")) in (0, 1)
    same(whole, TraceReader(out))
