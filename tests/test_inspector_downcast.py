"""Raw states stored in a smaller dtype: what that loses is counted, said and kept; nothing else changes."""

import pytest
import torch

from replayscope.inspector.cli import main
from replayscope.inspector.downcast import Downcast
from replayscope.traces import TraceError, TraceReader
from replayscope.traces.schema import Cast

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("dtype", "values", "lost"),
    [
        # 65504 is the largest fp16, 65520 the first that rounds to infinity; 2^-25 ties to 0, anything above does not.
        (torch.float16, [65504.0, 65519.0, 65520.0, -1e30, INF, -INF, NAN, 1.0], (2, 0, 1)),
        (torch.float16, [2.0**-24, 2.0**-25, -(2.0**-25), 1.1 * 2.0**-25, 0.0, -0.0, 1e-30], (0, 3, 0)),
        # bf16 has the range of float32: only what rounds up from the largest overflows, only subnormals vanish.
        (torch.bfloat16, [3.4028234e38, 3.3e38, 1e-44, 1e-40, NAN, NAN], (1, 1, 2)),
    ],
    ids=["fp16 large", "fp16 small", "bf16"],
)
def test_what_is_lost_is_counted(dtype, values, lost):
    counts = Downcast(dtype)
    stored, cast = counts.take(torch.tensor(values))
    assert stored.dtype == dtype and cast == Cast("float32", *lost)
    assert (counts.overflowed, counts.underflowed, counts.nan, counts.numbers) == (*lost, len(values))
    counts.take(torch.tensor(values, dtype=torch.float64))
    assert counts.lost == 2 * sum(lost)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.float16])
def test_what_is_no_larger_float_stays(dtype):
    values = torch.arange(4).to(dtype)
    assert Downcast(torch.float16).take(values) == (values, None)
    assert Downcast().take(torch.ones(2))[1] is None


def words(out, *more) -> list[str]:
    ids = "ids:" + ",".join(map(str, range(20)))
    return ["record", "-p", ids, "--arms", "full,oracle:full", "--hooks", "layers.1.hidden,layers.1.router,logits",
            "-o", str(out), *more]  # fmt: skip


def test_the_command_line_says_and_keeps_it(tmp_path, capsys, monkeypatch):
    assert main(words(tmp_path / "whole.h5")) == 0
    assert "states stored as" not in capsys.readouterr().err
    take = Downcast.take

    def large(self, values):
        return take(self, values * 1e6 if values.is_floating_point() else values)

    assert main(words(tmp_path / "half.h5", "--store-dtype", "fp16", "-v")) == 0
    assert "overflowed to infinity" in capsys.readouterr().err
    monkeypatch.setattr(Downcast, "take", large)
    assert main(words(tmp_path / "large.h5", "--store-dtype", "fp16", "-q")) == 0
    err = capsys.readouterr().err
    whole, half, over = (TraceReader(tmp_path / f"{name}.h5") for name in ("whole", "half", "large"))
    lost = sum(over.state(*key).cast.overflowed for key in over.states() if over.state(*key).cast)
    assert lost and f"{lost:,} overflowed to infinity" in err and len(err.splitlines()) == 1
    for run, name in whole.states():
        a, b = whole.state(run, name), half.state(run, name)
        if name.endswith("router"):
            assert b.cast is None and a.bits.tobytes() == b.bits.tobytes()
        else:
            assert a.cast is None and b.cast == Cast("float32", 0, b.cast.underflowed, 0)
            assert b.logical_dtype == "float16" and (a.values.astype("float16") == b.values).all()
    for point in whole.points("full"):
        mine, theirs = (t.table("full", point).arrays for t in (whole, over))
        assert all(x.tobytes() == theirs[k].tobytes() for k, x in mine.items()), "divergence is that of the model"
    assert half.verify() == [] and half.path.stat().st_size < whole.path.stat().st_size


def test_a_cast_that_is_told_wrong_is_refused(tmp_path):
    import h5py

    out = tmp_path / "t.h5"
    assert main(words(out, "--store-dtype", "bf16", "-q")) == 0
    with h5py.File(out, "r+") as file:
        file["states/0000/layers.001.hidden"].attrs["nan"] = -1
    with pytest.raises(TraceError, match="what its cast lost"):
        TraceReader(out).state(0, "layers.1.hidden")
