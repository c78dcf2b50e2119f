"""How far an arm's states are from full's at the end of a prefill: relative L2 by layer, in few regions."""

from collections.abc import Sequence

import torch

from replayscope.inspector.frame import Frame
from replayscope.inspector.packing import Span
from replayscope.inspector.plan import Request

# point → regions: the replayed window [H-W, H), what is computed from the cut on, and the row that is decoded from.
WANT = frozenset({"hidden", "window_kv"})


class States:
    """Sees every frame of a prefill. requests: of one plan; reference: for each the one that is full for it.

    values[request]: 'window_kv.window', 'hidden.suffix', 'hidden.last' → one number per layer, None where the arm
    computed no such row.
    """

    def __init__(self, requests: Sequence[Request], reference: Sequence[int], window: int) -> None:
        self.requests, self.reference, self.window = requests, reference, window
        self.values: list[dict[str, list[float | None]]] = [{} for _ in requests]

    def watch(self, frame: Frame) -> None:
        """Fold the rows of one layer."""
        if frame.layer is None:
            return
        for point, region in (("window_kv", "window"), ("hidden", "suffix"), ("hidden", "last")):
            for values in self.values:
                values.setdefault(f"{point}.{region}", []).append(None)
            # A layer may have no window.
            if point in frame.tensors:
                self._fold(frame, point, region)

    def _rows(self, r: Request, region: str) -> tuple[int, int]:
        if region == "last":
            return r.prompt_end - 1, r.prompt_end
        cut = r.prompt_end - self.window if r.cut is None else r.cut
        return (cut, r.prompt_end) if region == "suffix" else (max(cut - self.window, 0), cut)

    def _fold(self, frame: Frame, point: str, region: str) -> None:
        spans, tensor = frame.spans[point], frame.tensors[point]
        mine, theirs, owner, which = [], [], [], []
        for i, r in enumerate(self.requests):
            own: Span = spans[i]
            ref: Span = spans[self.reference[i]]
            first, stop = self._rows(r, region)
            first, stop = max(first, own.first, ref.first), min(stop, own.first + own.count, ref.first + ref.count)
            missing = i == self.reference[i] or stop <= first or (region == "window" and r.cut is None)
            if missing:
                continue
            mine.append(torch.arange(first, stop) - own.first + own.at)
            theirs.append(torch.arange(first, stop) - ref.first + ref.at)
            owner.append(torch.full((stop - first,), len(which)))
            which.append(i)
        if not which:
            return
        device = tensor.device
        a, b = (tensor[torch.cat(rows).to(device)].double().flatten(1) for rows in (mine, theirs))
        at = torch.cat(owner).to(device)
        sums = a.new_zeros(2, len(which)).index_add_(1, at, torch.stack((((a - b) ** 2).sum(-1), (b**2).sum(-1))))
        for i, value in zip(which, (sums[0] / sums[1]).sqrt().tolist(), strict=True):
            self.values[i][f"{point}.{region}"][-1] = float(f"{value:.3g}")
