"""Importance weights from ratios. All are pure functions of detached ratios; none carries gradient."""

from __future__ import annotations

import torch
from torch import Tensor

NORMALIZER_FLOOR = 1e-8
"""A mean weight at or below this is not divided by (everything was rejected or underflowed)."""


def truncate_weight(ratio: Tensor, *, max_weight: float | None, min_weight: float | None = None) -> Tensor:
    """Truncated importance sampling: ``min(ratio, max_weight)``, with an optional floor.

    Biased towards the sampler where it truncates, bounded variance.

    Args:
        ratio: any shape, float32.
        max_weight: the cap C; None = no cap.
        min_weight: the floor; None = no floor.

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).

    Example:
        >>> truncate_weight(torch.tensor([0.5, 3.0]), max_weight=2.0)
        tensor([0.5000, 2.0000])
    """
    if max_weight is None and min_weight is None:
        return ratio
    return ratio.clamp(min=min_weight, max=max_weight)


def band_weight(ratio: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Masked importance sampling: the raw ratio inside [low, high] (inclusive), 0 outside.

    Args:
        ratio: any shape, float32.
        low: lower bound; None = open.
        high: upper bound; None = open.

    Reference: Ling team 2025, IcePop (token level); Liu, Li et al. 2025, "When speed kills stability" (MIS).

    Example:
        >>> band_weight(torch.tensor([0.4, 1.5, 3.0]), low=0.5, high=2.0)
        tensor([0.0000, 1.5000, 0.0000])
    """
    return torch.where(inside_band(ratio, low=low, high=high), ratio, 0.0)


def inside_band(values: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """True where ``low <= values <= high``; None = open on that side. NaN is outside.

    Raises:
        ValueError: both sides are open.
    """
    if low is not None and high is not None:
        return (values >= low) & (values <= high)
    if low is not None:
        return values >= low
    if high is not None:
        return values <= high
    raise ValueError("low and high must not both be None, but got two open sides.")
