"""Several devices on a machine with one: tensors that say where they lie and refuse to meet others elsewhere.

``cpu:0``, ``cpu:1``, … stand for devices of their own. A tensor there computes as on the CPU, but an operation whose
tensors lie on two devices raises, as CUDA does; only ``.to`` carries one over. CUDA lets an index on the host meet a
tensor of its own, and copies one tensor into another across devices: here that raises too, so that every transfer is
one that the code asks for.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

HOST = torch.device("cpu")


class Elsewhere(RuntimeError):
    """Tensors of two devices met in one operation."""


class Placed(Tensor):
    """``inner``, an ordinary tensor, that says it lies on another device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "Placed":
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, None)


class Devices(TorchDispatchMode):
    """transfers: (from, to) → how many tensors with rows were carried; ops: device → operations that ran there."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, self)


class _Lists(TorchFunctionMode):
    """``torch.tensor`` and ``tolist`` fill what they make without a dispatch, so they are helped here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **kwargs | {"device": None}).to(kwargs["device"])
        if func is Tensor.tolist:
            return func(args[0].cpu())
        return func(*args, **kwargs)


@contextmanager
def devices() -> Iterator[Devices]:
    """Inside, tensors made on ``cpu:N`` are ``Placed``."""
    with Devices() as mode, _Lists():
        yield mode


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any], mode: Devices | None) -> Any:
    # A number on the host meets any tensor, as everywhere.
    met = {t.device for t in _tensors(args, kwargs) if t.dim() or t.device != HOST}
    carried = func is torch.ops.aten._to_copy.default
    if len(met) > 1 and not carried:
        raise Elsewhere(f"{func} of tensors on {', '.join(sorted(map(str, met)))}")
    here = next(iter(met), HOST)
    there = kwargs.get("device") or here
    if mode is not None:
        mode.ops[str(there)] += 1
        if carried and there != here:
            mode.transfers[str(here), str(there)] += 1
    inside = kwargs | ({"device": HOST} if kwargs.get("device") else {})
    out = func(*tree_map(_inner, args), **tree_map(_inner, inside))
    # What was changed in place is handed back as it was given, not as another that shares its memory.
    given = {id(t.inner): t for t in _tensors(args, kwargs) if isinstance(t, Placed)}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or there == HOST:
            return x
        return given[id(x)] if id(x) in given else Placed(x, there)

    return tree_map(wrap, out)


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    return [t for t in chain(tree_iter(args), tree_iter(kwargs)) if isinstance(t, Tensor)]


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Placed) else x
