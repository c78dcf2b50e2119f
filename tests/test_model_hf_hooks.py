"""Hooks on stub models: calls that go past them, compiled modules, other return types; and that they leave."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from replayscope.model.hf_config import UnmappedError
from replayscope.model.hf_hooks import find_parts, first_tensor, hooked, like_rows
from replayscope.model.hf_passes import Pass, current

WANT = frozenset(("embed", "attn_in", "attn_out", "ffn_out", "router", "router_margin", "hidden", "final", "logits"))


@dataclass
class Output:
    last: torch.Tensor
    rest: object = None


# What a module may wrap its tensor in (B3): name -> (wrap, unwrap).
RETURNS = {
    "tensor": (lambda h: h, lambda out: out),
    "tuple": (lambda h: (h, None), lambda out: out[0]),
    "list": (lambda h: [h], lambda out: out[0]),
    "mapping": (lambda h: OrderedDict(hidden=h), lambda out: out["hidden"]),
    "dataclass": (lambda h: Output(h), lambda out: out.last),
}


class Attention(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, hidden_states, attention_mask=None):
        return self.wrap(hidden_states + 1)


class Layer(nn.Module):
    """straight: calls its parts as .forward(x), past __call__ (B1)."""

    def __init__(self, returns, straight):
        super().__init__()
        self.wrap, self.unwrap = RETURNS[returns]
        self.self_attn, self.mlp, self.straight = Attention(self.wrap), nn.Identity(), straight

    def forward(self, hidden_states, attention_mask=None):
        call = (lambda m, *a, **k: m.forward(*a, **k)) if self.straight else (lambda m, *a, **k: m(*a, **k))
        h = self.unwrap(call(self.self_attn, hidden_states=hidden_states, attention_mask=attention_mask))
        h = call(self.mlp, h)
        # In place: a hook that keeps a reference would see this.
        return self.wrap(h.mul_(2))


class Stub(nn.Module):
    def __init__(self, returns="tensor", straight=False, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(returns, straight) for _ in range(layers))
        self.norm = nn.Identity()

    def forward(self, x):
        for layer in self.layers:
            call = layer.forward if layer.straight else layer
            x = layer.unwrap(call(x, attention_mask=None))
        return self.norm.forward(x) if self.layers[0].straight else self.norm(x)


def captured(model, x):
    """States of every step: what was before layer 0, the layers, and what came behind."""
    one = Pass(lambda: model(x.clone()), torch.float32, WANT)
    with hooked(find_parts(model, model)):
        return [one.step() for _ in range(len(model.layers) + 2)]


@pytest.mark.parametrize("straight", [False, True], ids=["called", "forward"])
@pytest.mark.parametrize("returns", RETURNS)
def test_b1_b3_whatever_is_returned_and_however_it_is_called(returns, straight):
    x = torch.arange(24.0).reshape(1, 3, 8)
    states = captured(Stub(returns, straight), x)
    assert states[0]["embed"].equal(x)
    for layer, before in ((1, x), (2, (x + 1) * 2)):
        assert set(states[layer]) == {"attn_in", "attn_out", "ffn_out", "hidden"}
        assert states[layer]["attn_in"].equal(before)
        # A copy: the tensor itself was doubled afterwards.
        assert states[layer]["attn_out"].equal(before + 1)
        assert states[layer]["hidden"].equal((before + 1) * 2) and states[layer]["hidden"].shape == (1, 3, 8)
    assert states[3]["final"].equal(states[2]["hidden"])


def test_b2_a_compiled_module_is_refused_by_name():
    model = Stub()
    model.layers[1].self_attn = torch.compile(model.layers[1].self_attn, backend="eager")
    with pytest.raises(UnmappedError, match=r"layers\.1\.self_attn is compiled"):
        find_parts(model, model)
    model = Stub()
    model.layers[0].compile(backend="eager")
    with pytest.raises(UnmappedError, match=r"layers\.0 is compiled"):
        find_parts(model, model)


def test_an_output_without_a_tensor_first_is_refused_by_name():
    for value in ((None, torch.ones(1)), (), None, {"a": None}, "text"):
        with pytest.raises(UnmappedError, match=r"layers\.3\.mlp hands out"):
            first_tensor(value, "layers.3.mlp")


def test_rows_that_a_module_flattened_are_told_apart_again():
    given = torch.zeros(2, 3, 8)
    assert like_rows(torch.arange(48.0).reshape(6, 8), given, "m").shape == (2, 3, 8)
    assert like_rows(torch.zeros(2, 3, 5), given, "m").shape == (2, 3, 5)
    with pytest.raises(UnmappedError, match=r"m was given \[2, 3, 8\] and hands out \[5, 8\]"):
        like_rows(torch.zeros(5, 8), given, "m")


def test_hooks_leave_also_when_the_model_raises():
    model = Stub()
    own = model.norm.forward = lambda x: x
    before = [dict(m.__dict__) for m in model.modules()]
    with hooked(find_parts(model, model)):
        pass
    assert [dict(m.__dict__) for m in model.modules()] == before and model.norm.forward is own

    def fail(x):
        raise RuntimeError("in the middle")

    model.layers[1].mlp.forward = fail
    before = [dict(m.__dict__) for m in model.modules()]
    with pytest.raises(RuntimeError, match="in the middle"):
        captured(model, torch.zeros(1, 2, 8))
    assert [dict(m.__dict__) for m in model.modules()] == before and current() is None


def test_nested_hooks_wrap_once():
    model, x = Stub(), torch.zeros(1, 2, 8)
    parts = find_parts(model, model)
    with hooked(parts):
        alone = captured(model, x)
        assert model.norm.forward.wraps
    assert "forward" not in model.norm.__dict__
    assert len(alone) == 4 and set(alone[1]) == {"attn_in", "attn_out", "ffn_out", "hidden"}


def test_outside_of_a_pass_the_model_runs_as_ever():
    model, x = Stub(), torch.ones(1, 2, 8)
    plain = model(x.clone())
    with hooked(find_parts(model, model)):
        assert model(x.clone()).equal(plain)


def test_a_model_that_is_built_otherwise_is_refused():
    with pytest.raises(UnmappedError, match="no list `layers`"):
        find_parts(nn.Identity(), nn.Identity())
    model = Stub()
    del model.layers[1].self_attn
    with pytest.raises(UnmappedError, match=r"layers\.1 has no attention module"):
        find_parts(model, model)


class Experts(nn.Module):
    def forward(self, x, top_k_index, top_k_weights):
        return x


class Routed(nn.Module):
    """Chooses the two largest of four scores."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(flat[:, :4], 2)
        return self.experts(flat, chosen, weights).view(x.shape)


def test_the_experts_that_were_chosen_and_by_what_margin():
    model = Stub(layers=1)
    model.layers[0].mlp = Routed()
    x = torch.tensor([[[0.0, 5.0, 3.0, 2.5], [9.0, 1.0, 1.0, 4.0]]])
    states = captured(model, x)
    assert states[1]["router"].tolist() == [[1, 2], [0, 3]]
    assert states[1]["router_margin"].tolist() == [0.5, 3.0]


def test_a_layer_without_a_mask_by_name_is_refused():
    class Masked(Pass):
        def mask(self, layer, device):
            return torch.zeros(1)

    model = Stub()
    for layer in model.layers:
        layer.forward = lambda h: h
    model.forward = lambda x: model.layers[0](x)
    one = Masked(lambda: model(torch.zeros(1, 2, 8)), torch.float32, WANT)
    with hooked(find_parts(model, model)):
        one.step()
        with pytest.raises(UnmappedError, match=r"layers\.0 is given no attention_mask by name"):
            one.step()


def test_a_pass_that_is_left_leaves_nothing():
    model = Stub()
    one = Pass(lambda: model(torch.zeros(1, 2, 8)), torch.float32, WANT)
    with hooked(find_parts(model, model)):
        one.step()
        one.close()
        assert one.dead and SimpleNamespace(now=current()).now is None
    Pass(lambda: model(torch.zeros(1, 2, 8)), torch.float32, WANT).close()
