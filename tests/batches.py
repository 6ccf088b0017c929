"""Small policy batches written down as ratios. Padding holds NaN in every policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trl_offpolicy import Objective, ObjectiveOutput, PolicyBatch, Reduction

LOGP = -4.0
Ratios = Sequence[Sequence[float | None]]


def policy_batch(ratios: Ratios, staleness: Ratios | None = None, **fields: Any) -> PolicyBatch:
    """A batch whose old/sampling is ``ratios`` (None = padding) and current/old ``staleness`` (default 1).

    ``old_per_token_logps`` is -4; advantages are 1 unless ``fields`` says otherwise.
    """
    mismatch = to_tensor(ratios)
    drift = torch.ones_like(mismatch) if staleness is None else to_tensor(staleness)
    mask = ~mismatch.isnan()
    old = torch.where(mask, LOGP, torch.nan)
    values: dict[str, Any] = {
        "per_token_logps": (old + drift.log()).requires_grad_(),
        "old_per_token_logps": old,
        "sampling_per_token_logps": old - mismatch.log(),
        "completion_mask": mask,
        "advantages": torch.ones(len(mask)),
    }
    return PolicyBatch(**{**values, **fields})


def to_tensor(rows: Ratios) -> torch.Tensor:
    """(B, T) float32 with NaN for None."""
    return torch.tensor([[torch.nan if value is None else value for value in row] for row in rows])


def rows_of(batch: PolicyBatch, rows: Any) -> PolicyBatch:
    """Some rows of a batch, as a micro-batch with its own leaf."""
    part = {
        name: None if value is None else value[rows] for name, value in vars(batch).items() if name != "per_token_logps"
    }
    return PolicyBatch(per_token_logps=batch.per_token_logps.detach()[rows].requires_grad_(), **part)


def evaluate(
    batch: PolicyBatch, reduction: Reduction | None = None, **options: Any
) -> tuple[ObjectiveOutput, torch.Tensor]:
    """The output of an objective with these options, and the gradient of its loss."""
    out = Objective(**options)(batch, reduction)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps, allow_unused=True)
    return out, gradient
