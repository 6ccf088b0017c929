"""Made-up log-probs of four responses, packed after one another, for the loss code of other frameworks."""

import torch

LENGTHS = (6, 4, 1, 5)


def flat_tensors():
    """Four responses of different length, ratios out of every band, tool output, both signs of the advantage."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    old = -0.1 - 2.5 * torch.rand(total, generator=generator)
    mismatch = 0.3 * torch.randn(total, generator=generator)
    mismatch[2], mismatch[12] = 1.6, -1.5
    mismatch[6:10] *= 0.01
    current = (old + 0.2 * torch.randn(total, generator=generator)).clamp(max=-1e-3)
    mask = torch.ones(total)
    mask[3] = mask[13] = 0
    advantages = torch.cat([torch.full((n,), a) for n, a in zip(LENGTHS, (1.0, -0.7, 0.4, -1.3), strict=True)])
    rows = {"current": current, "old": old, "sampling": (old - mismatch).clamp(max=-1e-3)}
    return {**rows, "mask": mask, "advantages": advantages}
