"""Capturing hook points: copies of what passes, taken in a context manager that always removes itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from replayscope.inspector.backend import Engine
from replayscope.inspector.errors import ReplayScopeError
from replayscope.inspector.frame import ENTRY_POINTS, Frame
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.points import expand_points, point_names


class HookError(ReplayScopeError):
    """A requested hook point that never fired."""


def points_of(config: Geometry) -> tuple[str, ...]:
    """The hook points that a model of this config has."""
    names = [name.split(".") for name in point_names(config.num_hidden_layers)]
    return tuple(".".join(name) for name in names if len(name) == 1 or config.has(name[2], int(name[1])))


@dataclass(frozen=True)
class Captured:
    """Rows of one hook point in one request. positions [rows]: absolute, or entry numbers; values [rows, …], CPU."""

    positions: Tensor
    values: Tensor


class Capture:
    """Copies the hook points that match ``globs`` while the ``with`` block runs.

    states: (request index, hook point) → Captured; rows of later steps are appended. Entries may be none, rows [0, …];
    a request without rows of another point in a layer does not run there and has no state. With a sink they go there
    instead, as soon as they are copied, and nothing is kept: for plans that run in one step. kept: points that an
    earlier part of the run has kept, and that need not fire. Raises UsageError for a glob that matches nothing, and
    HookError at the end of the block for a point that never fired.
    """

    def __init__(
        self,
        executor: Engine,
        globs: Iterable[str],
        sink: Callable[[int, str, Captured], None] | None = None,
        kept: Iterable[str] = (),
    ) -> None:
        self._executor = executor
        self.names = frozenset(expand_points(globs, points_of(executor.model.config)))
        self.want = frozenset(name.rsplit(".", 1)[-1] for name in self.names)
        self.states: dict[tuple[int, str], Captured] = {}
        self._sink, self._fired = sink, set(kept)

    def __enter__(self) -> "Capture":
        self._executor.taps.append(self._tap)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.taps.remove(self._tap)
        silent = self.names - self._fired
        if error is None and silent:
            raise HookError(f"hook point {sorted(silent)[0]} never fired; run the plan to its end inside the block")

    def _tap(self, frame: Frame) -> None:
        for point, tensor in frame.tensors.items():
            name = frame.name(point)
            if name not in self.names:
                continue
            for s in frame.spans[point]:
                # A layer that writes entries may have none to write: two tokens make one, and a prompt may have fewer.
                if s.count or is_entry_point(name):
                    self._add(s.request, name, torch.arange(s.first, s.first + s.count), tensor[s.rows])

    def _add(self, request: int, name: str, positions: Tensor, values: Tensor) -> None:
        # A copy even on the CPU: the executor's buffers are written again by the next layer.
        copy = values.detach().to("cpu", copy=True)
        self._fired.add(name)
        if self._sink is not None:
            self._sink(request, name, Captured(positions, copy))
            return
        before = self.states.get((request, name))
        if before is not None:
            positions, copy = torch.cat((before.positions, positions)), torch.cat((before.values, copy))
        self.states[request, name] = Captured(positions, copy)


def is_entry_point(name: str) -> bool:
    """Whether the rows of a hook point are entries rather than positions."""
    return name.rsplit(".", 1)[-1] in ENTRY_POINTS
