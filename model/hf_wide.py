"""fp64 that is fp64 throughout: the casts to fp32 inside a model's code are widened while it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _Widened(TorchFunctionMode):
    """Every dtype that is asked for below fp64 becomes fp64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        args = tuple(torch.float64 if _is_narrow(a) else a for a in args)
        kwargs = {k: torch.float64 if _is_narrow(v) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


def widened(dtype: torch.dtype) -> AbstractContextManager:
    """For a model in fp64 the mode in which its norms, softmax, RoPE and routers run in fp64 as well; else nothing."""
    return _Widened() if dtype == torch.float64 else nullcontext()
