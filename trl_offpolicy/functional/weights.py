"""Importance weights from ratios. All are pure functions of detached ratios; none carries gradient."""

from __future__ import annotations

import math

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


def prefix_min_weight(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """MinPRO: the token's ratio times the smallest ratio strictly before it, ``rho_t * min_{s<t} rho_s``.

    The first trainable token has an empty prefix, whose factor is 1. A non-cumulative stand-in for the product of
    the prefix: biased, free of its exponential growth.

    Args:
        log_ratios: (B, T) float32, nats.
        mask: (B, T) bool.

    Returns:
        (B, T) log-weights in nats, 0 outside ``mask``.

    Reference: Lei et al. 2026, MinPRO (arXiv:2601.22718).

    Example:
        >>> prefix_min_weight(torch.tensor([[2.0, -1.0, 3.0]]), torch.ones(1, 3).bool())
        tensor([[2., 1., 2.]])
    """
    smallest = torch.where(mask, log_ratios, torch.inf).cummin(-1).values
    before = torch.nn.functional.pad(smallest[:, :-1], (1, 0), value=torch.inf)
    return torch.where(mask, log_ratios + torch.where(before < torch.inf, before, 0.0), 0.0)


def prefix_bounds(mask: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """CTPO's bounds of the cumulative log-ratio: ``log(low) * sqrt(t)`` and ``log(high) * sqrt(t)``.

    ``t`` counts the trainable tokens up to and with the position, so a walk of independent log-ratios of mean 0
    stays inside with the same probability at every length.

    Args:
        mask: (B, T) bool.
        low: bound of the first token's ratio, below 1.
        high: bound of the first token's ratio, above 1.

    Returns:
        Two (B, T) float32 tensors, nats.

    Reference: Zhang et al. 2026, CTPO (arXiv:2605.07331).
    """
    growth = mask.cumsum(-1).float().sqrt()
    return math.log(low) * growth, math.log(high) * growth


def shaped_weight(ratio: Tensor, *, gamma: float) -> Tensor:
    """``r / (r + gamma)``: in (0, 1], steep where the trainer finds the token unlikely.

    1 / (1 + gamma) on-policy, not 1. The study that introduced it for fused rollouts found it unstable.

    Args:
        ratio: any shape, float32, positive.
        gamma: where half of the weight is reached.

    Reference: Zhang et al. 2026, "Logit fusion", shaped ratio.

    Example:
        >>> shaped_weight(torch.tensor([1.0, 3.0]), gamma=1.0)
        tensor([0.5000, 0.7500])
    """
    return ratio / (ratio + gamma)


def ess_cap(ratios: Tensor, *, target: float) -> Tensor:
    """The largest cap C for which ``min(ratio, C)`` has an effective sample size of at least ``target``.

    ESS = (sum w)^2 / (n sum w^2) falls as C grows. Between two neighbouring ratios, with sum S and sum of squares Q of
    the smaller ones and m larger ones, ESS = target is (S + m C)^2 = target n (Q + m C^2), a quadratic in C.

    Args:
        ratios: (N,) positive ratios of all units of the batch; entries that are not finite are padding.
        target: ESS to reach, a fraction in (0, 1).

    Returns:
        0-d float32; infinity where no cap is needed (and for no ratios at all).

    Example:
        >>> cap = ess_cap(torch.tensor([1.0, 1.0, 1.0, 9.0]), target=0.8)
        >>> capped = torch.tensor([1.0, 1.0, 1.0, 9.0]).clamp(max=cap)
        >>> round(float(capped.sum() ** 2 / (4 * capped.square().sum())), 4)
        0.8
    """
    ordered = torch.nn.functional.pad(ratios.double(), (0, 1), value=torch.inf)  # at least one entry
    ordered = torch.where(ordered < torch.inf, ordered, torch.inf).sort().values
    real = ordered < torch.inf
    ordered = torch.where(real, ordered, 0.0)
    count = real.sum().double()
    larger = count - real.cumsum(0)
    total, squares = ordered.cumsum(0), ordered.square().cumsum(0)
    reached = (total + larger * ordered).square() >= target * count * (squares + larger * ordered.square())
    fits = (real & reached).sum()
    best = (fits - 1).clamp(min=0).view(1)  # the largest ratio that may itself be the cap
    m, s, q, low = (column.gather(0, best).squeeze(0) for column in (larger, total, squares, ordered))
    spare = target * count - m  # positive where the next ratio may not be the cap
    root = (s.square() - spare * (target * count * q - s.square()) / m).clamp(min=0.0).sqrt()
    return torch.where(fits >= count, torch.inf, torch.maximum((s + root) / spare, low)).float()
