"""Which form of an op runs: its meaning in torch, or the Triton kernel that is tested against it."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

IMPLS = ("auto", "torch", "triton")
P = ParamSpec("P")
T = TypeVar("T")


class Choice(NamedTuple):
    """impl: ``torch`` or ``triton``. reason: why, in a few words for a trace's provenance."""

    impl: str
    reason: str


def choose(impl: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """What ``impl`` (auto, torch or triton) means on a device and for a dtype; ``auto`` never changes for a shape.

    Raises ValueError for another name, and for ``triton`` where it cannot run.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl {impl!r} is none of {', '.join(IMPLS)}")
    if impl == "torch":
        return Choice("torch", "as asked")
    hindrance = _hindrance(device, dtype)
    if impl == "triton":
        if hindrance:
            raise ValueError(f"impl triton: {hindrance}; use torch or auto")
        return Choice("triton", "as asked")
    if hindrance is None and interpreted():
        hindrance = "Triton's interpreter is for tests"
    if hindrance:
        return Choice("torch", hindrance)
    return Choice("triton", f"Triton compiles for {device.type} and takes {_short(dtype)}")


def use_triton(impl: str, x: Tensor) -> bool:
    """Whether ``impl`` means the Triton form for tensors like x. Raises ValueError as ``choose`` does."""
    return impl != "torch" and choose(impl, x.device, x.dtype).impl == "triton"


def expect(name: str, x: Tensor, shape: tuple[int | str, ...], dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless x has this shape, where a word stands for any size, and this dtype, if one is given.

    Called before a form is chosen: torch would broadcast what a kernel reads past the end of.
    """
    got = x.shape
    fits = got == shape
    if not fits and len(got) == len(shape):
        fits = all(w == n or isinstance(w, str) for w, n in zip(shape, got, strict=True))
    if not fits or (dtype is not None and x.dtype != dtype):
        words, more = ", ".join(map(str, shape)), "" if dtype is None else f" {dtype}"
        raise ValueError(f"{name} must be [{words}]{more}, not {list(got)}{more and f' {x.dtype}'}")


def interpreted() -> bool:
    """Whether Triton, imported now, would interpret kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def readable(x: Tensor) -> Tensor:
    """x as a kernel may read it: the interpreter does arithmetic on bf16's bit patterns (triton-lang/triton#11584)."""
    return x.float() if x.dtype == torch.bfloat16 and interpreted() else x


def on_its_device(f: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """f with the device of its first tensor as the current one: Triton launches there, wherever the pointers lead."""

    @wraps(f)
    def launch(x: Tensor, *args: P.args, **more: P.kwargs) -> T:
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return f(x, *args, **more)

    return launch


def _hindrance(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return "float64 has no Triton form"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no kernel reads {_short(dtype)}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"Triton has no backend for {device.type}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
