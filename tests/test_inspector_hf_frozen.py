"""Experts taken from full on Hugging Face models: what is left of an arm's divergence, and routers that do not obey."""

import pytest
import torch

from replayscope.inspector.metrics import metric
from replayscope.model.hf_config import UnmappedError
from replayscope.model.hf_families import FAMILIES
from replayscope.model.hf_hooks import find_parts, hooked
from replayscope.model.hf_passes import Pass
from replayscope.traces.reader import TraceReader
from tests import hf
from tests.test_model_hf_hooks import WANT, Routed, Stub

ROUTED = [name for name, tried in FAMILIES.items() if "experts" in tried.has]
ARMS = "full,hit,encoder,oracle:encoder,frozen:encoder,oracle:frozen:encoder"


@pytest.mark.parametrize("family", ROUTED)
def test_a_frozen_arm_takes_fulls_experts_and_agrees_with_its_oracle(family, tmp_path, capsys):
    out = tmp_path / "t.h5"
    words = ("-m", hf.folder(family), "-p", hf.PROMPT, "--arms", ARMS, "--cuts", "20", "--dtype", "fp64", "-o", out)
    code, _, err = hf.run(capsys, "sweep", *words)
    assert code == 0, err
    trace = TraceReader(out)
    at = {r.arm: r.index for r in trace.runs}
    choices, hidden = trace.table("full", "router"), trace.table("full", "hidden")
    changed = choices.arrays["changed"][:, :, choices.bucket("all")].sum(1)
    # Left free, an arm chooses otherwise: these random models are never sure.
    assert changed[at["encoder"]] > 0 and changed[at["frozen:encoder"]] == 0 == changed[at["hit"]]
    assert choices.arrays["n"][at["frozen:encoder"], :, 0].sum() > 0
    moved = metric(hidden, "rel_l2")[:, -1, hidden.bucket("all")]
    assert moved[at["frozen:encoder"]] > 1e-3 and moved[at["frozen:encoder"]] != moved[at["encoder"]]
    judged = trace.table("oracle", "hidden").arrays["rel_max"][at["frozen:encoder"], :, 0]
    assert judged.max() < 1e-12, "two right ways of computing the same: rounding that passes six layers"
    assert trace.runs[at["frozen:encoder"]].oracle == at["oracle:frozen:encoder"]


def test_experts_frozen_freezes_every_arm_and_needs_experts(tmp_path, capsys):
    words = ("-p", hf.PROMPT, "--arms", "full,encoder", "--cuts", "20", "--dtype", "fp64", "--experts", "frozen")
    code, _, err = hf.run(capsys, "sweep", "-m", hf.folder("gpt-oss"), *words, "-o", tmp_path / "a.h5")
    assert code == 0, err
    assert not TraceReader(tmp_path / "a.h5").table("full", "router").arrays["changed"].any()
    code, _, err = hf.run(capsys, "sweep", "-m", hf.folder("mistral"), *words, "-o", tmp_path / "b.h5")
    assert code == 2 and "--experts is not for a Hugging Face model without experts" in err


X = torch.tensor([[[0.0, 5.0, 3.0, 2.5], [9.0, 1.0, 1.5, 4.0]]])


def forced(block, ids: list[list[int]]) -> list[list[int]]:
    model = Stub(layers=1)
    model.layers[0].mlp = block
    one = Pass(lambda: model(X), torch.float32, WANT)
    with hooked(find_parts(model, model)):
        one.step()
        one.forced = torch.tensor(ids)
        return one.step()["router"].tolist()


def test_a_router_answers_with_the_ids_that_are_forced():
    assert forced(Routed(), [[1, 2], [0, 3]]) == [[1, 2], [0, 3]], "its own"
    assert forced(Routed(), [[0, 3], [1, 2]]) == [[0, 3], [1, 2]]


class Groups(Routed):
    """Chooses among groups before it chooses experts, by another top-k."""

    def forward(self, x):
        x[..., :4].unflatten(-1, (2, 2)).topk(2)
        return super().forward(x)


class Sorted(Routed):
    """Chooses without a top-k."""

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen = flat[:, :4].argsort(descending=True)[:, :2]
        return self.experts(flat, chosen, flat.gather(1, chosen)).view(x.shape)


def test_groups_that_were_chosen_before_do_not_matter():
    assert forced(Groups(), [[0, 3], [1, 2]]) == [[0, 3], [1, 2]]


def test_a_router_that_does_not_obey_is_told_by_name():
    with pytest.raises(UnmappedError, match=r"layers\.0\.mlp\.experts takes other experts than it is told to"):
        forced(Sorted(), [[0, 3], [1, 2]])
