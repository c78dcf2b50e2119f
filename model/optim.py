"""Muon for matrices and AdamW for the rest, small enough to read.

Muon (K. Jordan, 2024, https://kellerjordan.github.io/posts/muon/) steps along the momentum with its singular values
brought to about one by a Newton-Schulz iteration. Equal shapes are iterated as one batch.
"""

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalised(g: Tensor, steps: int = 5) -> Tensor:
    """g [M, rows, cols] with every matrix's singular values near 1."""
    turned = g.shape[-2] > g.shape[-1]
    x = g.mT if turned else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if turned else x


class Muon:
    """Nesterov momentum, orthogonalised; the step of a [rows, cols] matrix is scaled by max(1, rows/cols)^½."""

    def __init__(self, params: list[Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for p in params:
            groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.groups = list(groups.values())
        self.buffers = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update at learning rate ``lr``; parameters without a gradient stay, and their momentum with them."""
        for group, buffers in zip(self.groups, self.buffers, strict=True):
            live = [(p, p.grad, m) for p, m in zip(group, buffers, strict=True) if p.grad is not None]
            if not live:
                continue
            rows, cols = live[0][0].shape[-2:]
            for _, g, m in live:
                m.lerp_(g, 1 - self.momentum)
            along = torch.cat([g.lerp(m, self.momentum).reshape(-1, rows, cols) for _, g, m in live])
            sizes = [p.numel() // (rows * cols) for p, _, _ in live]
            for (p, _, _), u in zip(live, orthogonalised(along).split(sizes), strict=True):
                p.sub_(u.view_as(p), alpha=lr * max(1.0, rows / cols) ** 0.5)
