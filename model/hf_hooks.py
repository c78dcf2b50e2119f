"""Hook points of a Hugging Face model: the ``forward`` of its parts, wrapped while a run lasts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from replayscope.model.hf_config import UnmappedError
from replayscope.model.hf_passes import Pass, current

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn")
_COMPILED = "is compiled: hooks inside it would never run; load the model without torch.compile"


@dataclass(frozen=True)
class LayerParts:
    """The modules of one decoder layer that are captured."""

    layer: nn.Module
    attention: nn.Module
    feed_forward: nn.Module | None
    experts: nn.Module | None


@dataclass(frozen=True)
class Parts:
    """The modules of a model that are captured, and their names for messages."""

    layers: tuple[LayerParts, ...]
    norm: nn.Module
    names: Mapping[nn.Module, str]


def find_parts(model: nn.Module, decoder: nn.Module) -> Parts:
    """The parts of a decoder's layers. Raises UnmappedError for a model that is built otherwise, or compiled."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            raise UnmappedError(f"{name} {_COMPILED}")
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise UnmappedError(f"{type(decoder).__name__} has no list `layers` and final `norm`, where hooks are placed")
    return Parts(tuple(_layer_parts(layer, names[layer]) for layer in layers), norm, names)


def _layer_parts(layer: nn.Module, name: str) -> LayerParts:
    attention = next((m for n in _ATTENTION if isinstance(m := getattr(layer, n, None), nn.Module)), None)
    if attention is None:
        raise UnmappedError(f"{name} has no attention module that is called one of {', '.join(_ATTENTION)}")
    experts = [m for m in layer.modules() if type(m).__name__.endswith("Experts")]
    return LayerParts(
        layer=layer,
        attention=attention,
        feed_forward=next((m for n in _FEED_FORWARD if isinstance(m := getattr(layer, n, None), nn.Module)), None),
        experts=experts[0] if experts else None,
    )


@contextmanager
def hooked(parts: Parts) -> Iterator[None]:
    """Wrap the forwards; they are put back whatever happens. Outside of a pass the wraps do nothing.

    ``module.forward`` is replaced, not a hook registered: that also catches a caller that bypasses ``module(…)``.
    Inside another ``hooked`` of the same parts nothing is wrapped twice.
    """
    if getattr(parts.norm.forward, "wraps", False):
        yield
        return
    undo: list[tuple[nn.Module, Any]] = []

    def wrap(module: nn.Module, around: Callable[..., Any]) -> None:
        original = module.forward
        undo.append((module, module.__dict__.get("forward")))

        def forward(*args: Any, **kwargs: Any) -> Any:
            one = current()
            return original(*args, **kwargs) if one is None else around(one, original, *args, **kwargs)

        forward.wraps = True  # type: ignore[attr-defined]
        module.forward = forward

    try:
        for l, part in enumerate(parts.layers):
            wrap(part.layer, _Layer(l, parts.names[part.layer], part.experts is not None))
            wrap(part.attention, _Around(parts.names[part.attention], "attn_in", "attn_out"))
            if part.feed_forward is not None:
                wrap(part.feed_forward, _Around(parts.names[part.feed_forward], None, "ffn_out"))
            if part.experts is not None:
                wrap(part.experts, _Experts(parts.names[part.experts]))
        wrap(parts.norm, _Around(parts.names[parts.norm], None, "final"))
        yield
    finally:
        for module, before in reversed(undo):
            if before is None:
                del module.forward
            else:
                module.forward = before


@dataclass(frozen=True)
class _Around:
    """Captures what enters and what leaves a module."""

    name: str
    enters: str | None
    leaves: str

    def __call__(self, one: Pass, original: Callable, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states")
        if self.enters:
            one.keep(self.enters, first_tensor(given, self.name))
        out = original(*args, **kwargs)
        if self.leaves in one.want:
            one.keep(self.leaves, like_rows(first_tensor(out, self.name), given, self.name))
        return out


@dataclass(frozen=True)
class _Layer:
    """Gives a layer the mask of its pass, and hands over when it is done."""

    index: int
    name: str
    routes: bool

    def __call__(self, one: Pass, original: Callable, *args: Any, **kwargs: Any) -> Any:
        given = first_tensor(args[0] if args else kwargs.get("hidden_states"), self.name)
        if given.ndim != 3:
            raise UnmappedError(f"{self.name} is given {list(given.shape)} instead of [batch, rows, hidden]")
        if self.index == 0:
            one.keep("embed", given)
            one.hand_over()
        one.layer, one.scores = self.index, None
        mask = one.mask(self.index, given.device)
        if mask is not None:
            if "attention_mask" not in kwargs:
                raise UnmappedError(f"{self.name} is given no attention_mask by name; its mask cannot be replaced")
            kwargs["attention_mask"] = mask
        if self.routes and ("router" in one.want or one.forced is not None):
            with _Choices(one):
                out = original(*args, **kwargs)
        else:
            out = original(*args, **kwargs)
        one.keep("hidden", first_tensor(out, self.name))
        one.hand_over()
        return out


class _Choices(TorchFunctionMode):
    """Remembers the scores of the last top-k, which is the router's choice when its experts are called.

    Where the choice is forced, top-k answers with the forced ids and their own scores. A top-k of groups that came
    before does not matter then; whether it was the router's that was answered is checked by what its experts are given.
    """

    def __init__(self, one: Pass) -> None:
        super().__init__()
        self.one = one

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "k"), args, strict=False)) | (kwargs or {})
        self.one.scores = scores = given["input"]
        forced = self.one.forced
        if forced is None or given["k"] != forced.shape[-1] or scores.shape[:-1].numel() != len(forced):
            return func(*args, **(kwargs or {}))
        if scores.shape[-1] <= int(forced.max()):
            return func(*args, **(kwargs or {}))
        ids = forced.to(scores.device).reshape(*scores.shape[:-1], -1)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


@dataclass(frozen=True)
class _Experts:
    """Captures the experts that were chosen, as ascending ids [B, rows, k], and by what margin [B, rows]."""

    name: str

    def __call__(self, one: Pass, original: Callable, *args: Any, **kwargs: Any) -> Any:
        chosen = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point()]
        ids = chosen[0].flatten(0, -2).sort(-1).values if chosen else None
        if one.forced is not None and (ids is None or not torch.equal(ids, one.forced.to(ids.device))):
            raise UnmappedError(f"{self.name} takes other experts than it is told to: its choice cannot be frozen")
        if ids is not None and "router" in one.want:
            one.states["router"] = ids
            one.states["router_margin"] = _margin(one.scores, ids)
        return original(*args, **kwargs)


def _margin(scores: Tensor | None, ids: Tensor) -> Tensor:
    """Smallest chosen minus largest other score [rows]; NaN where the scores are not known."""
    unknown = torch.full((len(ids),), torch.nan, dtype=torch.float64, device=ids.device)
    if scores is None or scores.shape[:-1].numel() != len(ids):
        return unknown
    flat = scores.reshape(len(ids), -1).double()
    taken = torch.zeros_like(flat, dtype=torch.bool).scatter(1, ids.clamp(max=flat.shape[1] - 1), True)
    if bool(taken.all()):
        return unknown
    chosen = flat.masked_fill(~taken, torch.inf).amin(-1)
    return chosen - flat.masked_fill(taken, -torch.inf).amax(-1)


def first_tensor(value: Any, name: str) -> Tensor:
    """The tensor of a module's output: itself, the first of a tuple, or the first of a mapping or dataclass."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = tuple(getattr(value, field) for field in value.__dataclass_fields__)
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise UnmappedError(f"{name} hands out {kind} first where a tensor was expected; it cannot be captured")
    return value


def like_rows(value: Tensor, given: Any, name: str) -> Tensor:
    """The output [B, rows, …] of a module that was given [B, rows, …], also where it flattened its rows."""
    if not isinstance(given, Tensor) or value.shape[:2] == given.shape[:2]:
        return value
    if given.ndim == 3 and value.shape[0] == given.shape[0] * given.shape[1]:
        return value.unflatten(0, given.shape[:2])
    raise UnmappedError(f"{name} was given {list(given.shape)} and hands out {list(value.shape)}: no rows to capture")
