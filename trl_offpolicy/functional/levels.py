"""Aggregation of a per-token quantity to the level on which a decision is taken."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP

Level = Literal["token", "sequence", "sequence_mean"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""token: each token alone; sequence: the sum (for log-ratios: the product of ratios); sequence_mean: the mean
over trainable tokens (for log-ratios: the geometric mean, which does not scale with length)."""


def aggregate(values: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Aggregate (B, T) ``values`` over the True tokens of ``mask``.

    Args:
        values: (B, T) float32; may hold anything, NaN included, where ``mask`` is False.
        mask: (B, T) bool.
        level: see :data:`LEVELS`.

    Returns:
        (B, T) for ``token`` (0 outside ``mask``), else (B, 1); an empty row gives 0.

    Example:
        >>> aggregate(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]), "sequence_mean")
        tensor([[2.]])
    """
    inside = torch.where(mask, values, 0.0)
    if level == "token":
        return inside
    total = inside.sum(dim=-1, keepdim=True)
    if level == "sequence":
        return total
    return total / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def aggregate_ratio(log_ratios: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Ratio at ``level``: aggregated in log space, clamped to +-20 nats, then exponentiated.

    Args and shapes as :func:`aggregate`; an empty row and a masked token give 1.
    """
    return aggregate(log_ratios, mask, level).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
