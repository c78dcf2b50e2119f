"""What packed rows may read, and where it lies: the window rule, and descriptors of a row's window and entries.

Window W means that query i sees keys i-W+1 … i: W keys, the query itself included. ``window_keys`` is the one place
where the running code says so; the Triton form says it once more, in ``lowest_key``, and is tested against this one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def window_keys(position: Tensor, window: int, floor: Tensor) -> Tensor:
    """Key positions [rows, W] that each row may see, oldest first, -1 where there is none.

    position, floor [rows] int64: absolute position of the row, and the lowest key that it may see.
    """
    keys = position[:, None] - torch.arange(window - 1, -1, -1, device=position.device)
    return torch.where(keys >= floor.clamp(min=0)[:, None], keys, -1)


@dataclass(frozen=True)
class WindowRows:
    """Which window keys each packed row may see and in which slots they lie, all int64 [rows].

    position: of the row; floor: the lowest key it may see; start: first key that lies with its own request, at slot
    key + own. A key below start lies at key + below, with the owner.
    """

    position: Tensor
    floor: Tensor
    start: Tensor
    own: Tensor
    below: Tensor

    def slots(self, window: int) -> Tensor:
        """[rows, W], oldest first, -1 where there is no key."""
        keys = window_keys(self.position, window, self.floor)
        shift = torch.where(keys >= self.start[:, None], self.own[:, None], self.below[:, None])
        return torch.where(keys < 0, -1, keys + shift)


@dataclass(frozen=True)
class EntryRows:
    """Which global entries each packed row attends and in which slots they lie.

    picks [rows, K] int64: entry numbers, -1 = absent. kept, other, own int64 [rows]: an entry below kept lies at slot
    entry + other, with the owner of the prefix; the rest at entry + own.
    """

    picks: Tensor
    kept: Tensor
    other: Tensor
    own: Tensor

    def slots(self) -> Tensor:
        """[rows, K], -1 where there is no entry."""
        shift = torch.where(self.picks < self.kept[:, None], self.other[:, None], self.own[:, None])
        return torch.where(self.picks < 0, -1, self.picks + shift)
