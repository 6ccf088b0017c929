"""Random batches for the parity tests: padding, tool gaps, an empty row, outliers on both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trl_offpolicy import PolicyBatch

ROWS, LENGTH = 8, 7


@pytest.fixture
def random_batch() -> Callable[..., PolicyBatch]:
    """``random_batch(seed, spread)``: log-ratios old/sampling of width ``spread``, current/old of width 0.2."""

    def make(seed: int, spread: float = 0.3, drift: float = 0.2) -> PolicyBatch:
        generator = torch.Generator().manual_seed(seed)

        def normal(width: float) -> torch.Tensor:
            return width * torch.randn(ROWS, LENGTH, generator=generator)

        lengths = torch.tensor([7, 6, 0, 4, 1, 7, 5, 3])
        mask = torch.arange(LENGTH) < lengths.unsqueeze(1)
        mask[5, 2:4] = False  # tool output
        old = -0.1 - 3 * torch.rand(ROWS, LENGTH, generator=generator)
        mismatch = normal(spread)
        mismatch[0, 3], mismatch[6, 1] = 2.5, -2.2  # outliers
        mismatch[7] *= 0.02  # a row that every rule keeps
        sampling, current = (old - mismatch).clamp(max=-1e-3), (old + normal(drift)).clamp(max=-1e-3)
        padded = (torch.where(mask, values, torch.nan) for values in (current, old, sampling))
        current, old, sampling = padded
        return PolicyBatch(
            per_token_logps=current.requires_grad_(),
            old_per_token_logps=old,
            sampling_per_token_logps=sampling,
            completion_mask=mask,
            advantages=torch.tensor([1.0, -2.0, 0.5, -1.0, 0.7, 1.5, -0.3, -1.2]),
        )

    return make
