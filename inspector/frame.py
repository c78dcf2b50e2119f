"""What one layer hands out while it is hot."""

from dataclasses import dataclass, field

from torch import Tensor

from replayscope.inspector.packing import Block, Span

ENTRY_POINTS = ("global_kv", "index_k", "latent")


@dataclass
class Frame:
    """What one layer (None: outside the layers) left: point → tensor over packed rows or entries, and whose they are.

    spans[point] holds one span per request; its ``first`` is a position, or an entry number for ENTRY_POINTS.
    The tensors are the executor's own buffers: whoever keeps one copies it.
    """

    layer: int | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)

    def name(self, point: str) -> str:
        return point if self.layer is None else f"layers.{self.layer}.{point}"


@dataclass(frozen=True)
class Attended:
    """A block between attention and experts.

    h [rows, d]: the experts' input; experts [rows, k]: the chosen ids; scores [rows, E]; post, comb of the mHC site.
    """

    block: Block
    h: Tensor
    experts: Tensor
    scores: Tensor
    post: Tensor
    comb: Tensor
