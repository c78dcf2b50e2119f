"""The table of what is timed, and against what. Each case checks that its variants agree before any is timed."""

import torch
from harness import Case, Contest

from replayscope.kernels.divergence import row_sums


def divergence(device: torch.device) -> Contest:
    """4096 rows of 1024 fp32 numbers (what one layer hands over), reference and arm."""
    torch.manual_seed(0)
    reference = torch.randn(4096, 1024, device=device)
    arm = reference + 1e-3 * torch.randn_like(reference)
    spare = torch.empty_like(arm)

    def plain() -> torch.Tensor:
        r, a = reference.double(), arm.double()
        return torch.stack(((a - r).square().sum(1), r.square().sum(1), a.square().sum(1), (a * r).sum(1)))

    def check() -> None:
        sums = row_sums(arm, reference)
        found = torch.stack([sums[name] for name in ("diff2", "ref2", "arm2", "dot")]).to(torch.float64)
        torch.testing.assert_close(found, plain(), rtol=1e-12, atol=0.0)

    read = 2 * arm.numel() * arm.element_size()
    variants = {"copy": lambda: spare.copy_(arm), "plain": plain, "row_sums": lambda: row_sums(arm, reference)}
    return Contest(variants, check, work=read, unit="bytes read")


CASES = (
    Case("divergence", "all sums of a state table, against the four plain ones in float64", "plain", divergence),
)  # fmt: skip
