"""The memory that requests write their KV into: taken once, used again, never cleared."""

import torch
from torch import Tensor


class Pool:
    """Named buffers that grow and are handed out dirty.

    Whoever takes a buffer finds in it what an earlier layer or run left there. Reading only what one's own run has
    written is the executor's duty, and tests poison the pool to see that it keeps it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A view of the given shape on the buffer called ``name``, with whatever it holds."""
        count = 1
        for n in shape:
            count *= n
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count].view(shape)

    def poison(self, value: float) -> None:
        """Fill every floating buffer with ``value`` (219.0, NaN, …) and every integer one with -7."""
        for buffer in self._buffers.values():
            buffer.fill_(value if buffer.is_floating_point() else -7)

    @property
    def bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())
