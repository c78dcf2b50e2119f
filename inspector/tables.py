"""From torch to the trace: the folded tables, and the raw states that were asked for."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from replayscope.inspector.capture import Captured, is_entry_point
from replayscope.inspector.downcast import Downcast
from replayscope.inspector.fold import Fold
from replayscope.inspector.lineup import Lineup
from replayscope.inspector.waves import Wave
from replayscope.model.reference import Frame
from replayscope.traces.queued import QueuedWriter
from replayscope.traces.writer import TraceWriter

_BITS = {torch.bfloat16: torch.uint16} | dict.fromkeys(
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bool), torch.uint8
)


def write_fold(out: TraceWriter | QueuedWriter, fold: Fold) -> None:
    """Every table, then the rows of those points that were kept row by row."""
    for (reference, point), table in sorted(fold.tables.items()):
        out.table(reference, point, table)
    for reference, point in sorted(fold.rows):
        out.rows(reference, point, *fold.packed_rows(reference, point))


@dataclass
class StateSink:
    """Hands the asked hook points to the writer as the layers go by."""

    out: TraceWriter | QueuedWriter
    line: Lineup
    names: frozenset[str]
    downcast: Downcast = field(default_factory=Downcast)
    _of: tuple[tuple[int, ...], ...] = ()

    def begin(self, wave: Wave) -> None:
        """The requests that are captured from here on are those of the wave."""
        self._of = wave.of

    def captured(self, request: int, name: str, kept: Captured) -> None:
        """Rows of a request, under its first run; one that runs again, or the foreign one, has none."""
        for run in self._of[request][:1]:
            values, cast = self.downcast.take(kept.values)
            self.out.state(run, name, kept.positions.numpy(), *stored(values), cast)

    def oracle(self, run: int, frame: Frame) -> None:
        """The rows of a layer's oracle pass that belong to the run."""
        info = self.line.runs[run]
        for point, tensor in frame.tensors.items():
            name = point if frame.layer is None else f"layers.{frame.layer}.{point}"
            if name in self.names:
                first = 0 if is_entry_point(name) else info.start
                values, cast = self.downcast.take(tensor[0, first:].detach().to("cpu", copy=True))
                self.out.state(run, name, np.arange(first, first + len(values)), *stored(values), cast)


def stored(values: Tensor) -> tuple[np.ndarray, str]:
    """The array to store, and the logical dtype: bf16 and fp8 as unsigned views of their bits, choices as int32."""
    if values.dtype == torch.int64:
        values = values.int()
    logical = str(values.dtype).removeprefix("torch.")
    view = _BITS.get(values.dtype)
    return (values.view(view) if view else values).contiguous().numpy(), logical
