"""The public fixtures on a GPU, with both forms of the kernels."""

import pytest
import torch

from replayscope.inspector.executor import Executor
from replayscope.inspector.plan import Plan
from tests import v41
from tests.test_model_parity import SCENARIOS, check, plan_of


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("impl", "dtype"), [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)], ids=str
)
@pytest.mark.parametrize("variant", ["plain", "released"])
def test_executor_on_cuda_reproduces_the_fixtures(variant, impl, dtype):
    names, compared = SCENARIOS[variant], 0
    executor = Executor(v41.model(dtype, variant, "cuda"), block=50, impl=impl)
    plan = Plan(tuple(plan_of(name) for name in names))
    for frame in executor.run(plan, {"prompt": v41.ids()}, frozenset({"logits"})):
        for point, spans in frame.spans.items():
            for name, s in zip(names, spans, strict=True):
                if point != "candidates":
                    got = frame.tensors[point][s.rows].cpu()
                    compared += check(name, frame.layer, point, s.first, got, dtype, variant)
    assert executor.prefix_check.changed == [0] * len(names)
    least = sum(v41.arrays(name, variant)["window_kv"].size for name in names)
    assert compared > least, f"only {compared} numbers were compared; window KV alone has {least}"
