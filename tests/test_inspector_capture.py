"""Captures: what is asked and nothing else, copies, removed in every case (cases A7, B1, B6, B8, B10)."""

import gc

import pytest
import torch

from replayscope.inspector import cli, usecases
from replayscope.inspector.capture import Capture, HookError, points_of
from replayscope.inspector.errors import UsageError
from replayscope.inspector.executor import Executor
from replayscope.inspector.plan import Plan
from replayscope.inspector.semantics import request
from replayscope.model.mini import CONFIG
from replayscope.model.reference import logits
from replayscope.traces import TraceReader
from tests import v41


def run(executor, globs, tokens=None, arms=(("full", None), ("encoder", 40))):
    plan = Plan(tuple(request(v41.shape(), a, c) for a, c in arms))
    with Capture(executor, globs) as captured:
        for _ in executor.run(plan, {"prompt": tokens if tokens is not None else v41.ids()}, captured.want):
            pass
    return captured.states


def test_b8_only_what_is_asked_is_kept():
    states = run(Executor(v41.model()), ["layers.3.window_kv"])
    assert set(states) == {(0, "layers.3.window_kv"), (1, "layers.3.window_kv")}
    for bad in ("layers.99.window_kv", "layers.3.windowkv", "nothing"):
        with pytest.raises(UsageError, match="unknown hook point"):
            Capture(Executor(v41.model()), [bad])
    # A point that this layer does not have is no valid name either.
    with pytest.raises(UsageError, match=r"layers\.0\.topk"):
        Capture(Executor(v41.model()), ["layers.0.topk"])


def test_a7_rows_carry_their_absolute_positions_in_order():
    states = run(Executor(v41.model()), ["layers.{0,5}.window_kv"])
    kept = states[1, "layers.5.window_kv"]
    assert kept.positions.tolist() == list(range(34, 68)) and len(kept.values) == 34
    window = kept.positions < 40
    assert kept.positions[window].tolist() == list(range(34, 40))


def test_b10_every_hook_point_fires_and_names_what_it_says():
    c, model = v41.config(), v41.model()
    states = run(Executor(model), ["*"])
    names = {name for request_, name in states if request_ == 0}
    assert names == set(points_of(c))
    assert sum(n.endswith(".hidden") for n in names) == c.num_hidden_layers
    final, last = states[0, "final"].values, states[0, "layers.11.hidden"].values
    assert not torch.allclose(final, last)
    assert torch.allclose(logits(final, model.head), states[0, "logits"].values, atol=1e-12)


def test_b6_captures_are_copies_and_leave_nothing_behind():
    executor = Executor(v41.model())
    first = run(executor, ["layers.*.hidden"])
    before = {k: v.values.clone() for k, v in first.items()}
    run(executor, ["layers.*.hidden"], v41.ids().flip(0))
    assert all(torch.equal(first[k].values, before[k]) for k in before)
    assert executor.taps == []
    with pytest.raises(RuntimeError, match="planted"), Capture(executor, ["logits"]):
        raise RuntimeError("planted")
    assert executor.taps == []


def test_b1_a_point_that_never_fires_is_an_error():
    executor = Executor(v41.model())
    with pytest.raises(HookError, match="never fired"), Capture(executor, ["layers.5.hidden"]):
        pass
    assert executor.taps == []


def test_b6_twenty_runs_do_not_grow():
    assert grown(keep=False) < 1


def test_states_that_are_kept_do_grow():
    """The twin: what twenty runs leave behind is seen."""
    assert grown(keep=True) > 15


def grown(keep):
    """By how many times one run's states the tensors that are alive grow over twenty runs. Not the memory of the
    process: its peak is that of the tests before, and the allocator keeps what is free."""
    executor, kept = Executor(v41.model()), []
    states = run(executor, ["*"])
    size = sum(v.values.nbytes for v in states.values())
    del states
    before = alive()
    for _ in range(20):
        states = run(executor, ["*"])
        if keep:
            kept.append(states)
        del states
    return (alive() - before) / size


def alive():
    """Bytes of all tensors that Python still holds, each memory once; those of other kinds, which other tests may have
    left, have no memory that can be asked for."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))
    held = (x.untyped_storage() for x in tensors if x.layout == torch.strided and x.device.type == "cpu")
    return sum({s.data_ptr(): s.nbytes() for s in held}.values())


def test_capture_changes_no_bit_of_the_run():
    plain = v41.rows(Executor(v41.model()), [request(v41.shape(), "full")])
    states = run(Executor(v41.model()), ["*"], arms=(("full", None),))
    assert torch.equal(plain[0]["logits"], states[0, "logits"].values)


def test_states_reach_the_file_layer_by_layer(tmp_path, monkeypatch):
    """An interrupted run keeps the states of the layers that were done (case C2)."""
    out = tmp_path / "t.h5"
    model = tmp_path / "m"
    model.mkdir()
    for name in ("plain/config.json", "weights/model.safetensors"):
        (model / name.split("/")[1]).symlink_to(v41.ROOT / name)

    def stop(self, done, total, what):
        # Said before the layer runs: five are done.
        if what == "layer 5":
            raise KeyboardInterrupt

    words = ["record", "-m", str(model), "-p", "ids:" + ",".join(map(str, v41.ids().tolist())), "--arms", "full"]
    words += ["--hooks", "layers.*.hidden", "-o", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(usecases._Progress, "__call__", stop)
        assert cli.main(words) == 130
    partial = TraceReader(tmp_path / "t.h5.partial")
    assert not partial.complete and not out.exists()
    assert [name for _, name in partial.states()] == [f"layers.{layer}.hidden" for layer in range(5)]
    # What a stopped run kept is replaced only when asked to.
    assert cli.main([*words, "--force"]) == 0
    assert len(TraceReader(out).states()) == v41.config().num_hidden_layers
    assert not partial.path.exists()


@pytest.mark.parametrize("more", [[], ["--compression", "gzip"], ["--store-dtype", "bf16"]], ids="".join)
def test_a_layer_without_a_whole_entry_has_an_empty_state(tmp_path, capsys, more):
    """One token is no entry of ratio 2, in any arm, and neither is the last of three behind a cut of two. What is empty
    is read back, shown and compared as such."""
    one, three = tmp_path / "one.h5", tmp_path / "three.h5"
    arms = ["--arms", "full,hit,encoder,oracle:encoder", "--hooks", "layers.*.{global_kv,index_k}", "-q", *more]
    assert cli.main(["record", "-m", "mini", "-p", "a", *arms, "-o", str(one)]) == 0
    assert cli.main(["record", "-m", "mini", "-p", "abc", "--cuts", "2", *arms, "-o", str(three)]) == 0
    for path, empty in (
        (one, ["full", "hit", "encoder", "oracle:full", "oracle:encoder"]),
        (three, ["hit", "encoder"]),
    ):
        trace = TraceReader(path)
        assert trace.verify() == [] and {"full", "encoder"} <= {run.arm for run in trace.runs}
        for run, name in trace.states():
            state, ratio = trace.state(run, name), CONFIG.compress_ratios[int(name.split(".")[1])]
            none = ratio == 2 and trace.runs[run].arm in empty
            assert (len(state.positions) == 0) == none, (name, trace.runs[run].label)
            width = CONFIG.head_dim if name.endswith("global_kv") else CONFIG.index_head_dim
            assert state.values.shape == (len(state.positions), width)
        assert {(run.index, "layers.2.global_kv") for run in trace.runs} <= set(trace.states())
        assert cli.main(["show", str(path), "--verify"]) == 0
        capsys.readouterr()
        for how in ([], ["--first"]):
            # Nothing is missing where neither side has a row.
            assert cli.main(["compare", str(path), str(path), "--tol", "layers.*=rel_l2<=0", *how]) == 0
        assert "no row on either side" in capsys.readouterr().out
