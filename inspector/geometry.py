"""What plans, the exact region and the runner ask of a model's config. No torch."""

from collections.abc import Sequence
from typing import Any, Protocol


class Geometry(Protocol):
    """Sizes and layer schedule; `model.config.ModelConfig` and `model.hf_config.HFConfig` are both one.

    sliding_window: W, the query itself included. compress_ratios[l]: tokens per global entry of layer l, 0 where it has
    no global KV. kv_source_layer_ids: layers that write global KV of their own. decoder_start: first layer of the
    decoder half, num_hidden_layers where there is none.
    """

    @property
    def sliding_window(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def layers(self) -> range: ...
    @property
    def compress_ratios(self) -> Sequence[int]: ...
    @property
    def kv_source_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def decoder_start(self) -> int: ...
    @property
    def freezes(self) -> bool:
        """Whether top-k and experts can be taken from full."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...

    def kv_source(self, layer: int) -> int | None:
        """The layer whose global KV ``layer`` reads, or None where it reads none."""
        ...

    def window_source(self, layer: int) -> int | None:
        """The layer whose window KV ``layer`` reads, or None where it has no window."""
        ...

    def has(self, point: str, layer: int) -> bool:
        """Whether a layer has the hook point."""
        ...

    def numbers(self, point: str) -> int:
        """How many numbers a row of the hook point has."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, for the trace."""
        ...


def window_layers(config: Geometry) -> list[int]:
    """The layers that write window KV: each takes W-1 rows of exactness from what passes it."""
    return [l for l in config.layers if config.window_source(l) == l]
