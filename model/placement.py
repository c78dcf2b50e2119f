"""Which device each layer lies on: contiguous blocks of layers, as even in stored bytes as they can be."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

Where = torch.device | str | Sequence[torch.device]


def place(sizes: Sequence[int], where: Where) -> tuple[torch.device, ...]:
    """The device of each layer. sizes: bytes of each layer; where: a device, or several, each of which gets a layer.

    The largest block is as small as it can be. Raises ValueError with one line for more devices than layers.
    """
    devices = [torch.device(where)] if isinstance(where, torch.device | str) else list(where)
    if len(devices) > len(sizes):
        raise ValueError(f"{len(devices)} devices for {len(sizes)} layers; name no more devices than layers")
    upto = (0, *accumulate(sizes))

    @cache
    def split(stop: int, blocks: int) -> tuple[int, tuple[int, ...]]:
        """(bytes of the largest block, where each block ends) of the first ``stop`` layers."""
        if blocks == 1:
            return upto[stop], (stop,)
        options = (
            (max(split(at, blocks - 1)[0], upto[stop] - upto[at]), (*split(at, blocks - 1)[1], stop))
            for at in range(blocks - 1, stop)
        )
        return min(options)

    _, ends = split(len(sizes), len(devices))
    starts = (0, *ends[:-1])
    return tuple(d for d, a, b in zip(devices, starts, ends, strict=True) for _ in range(a, b))
