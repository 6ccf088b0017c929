"""Importance weights from ratios. All are pure functions of detached ratios; none carries gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_offpolicy.checks import check_proper_fraction
from trl_offpolicy.functional._shapes import check_mask, check_tokens

NORMALIZER_FLOOR = 1e-8
"""Weights are not divided by a mean at or below this: everything was rejected or underflowed."""


def truncate_weight(ratio: Tensor, *, max_weight: float | None, min_weight: float | None = None) -> Tensor:
    """Truncated importance sampling (TIS), with an optional floor.

        w = max(min(rho, C), floor)

    where rho is the ratio and C the cap. Where it truncates it is biased towards the sampler. The variance is bounded.

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
    """Masked importance sampling (MIS, IcePop).

        w = rho where low <= rho <= high, else 0

    where rho is the ratio.

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
    """MinPRO: the token's ratio times the smallest ratio strictly before it.

        log w_t = l_t + min_{s < t} l_s

    where l is the log-ratio of a trainable token. The first trainable token has an empty prefix, whose factor is 1. The
    smallest ratio replaces the product over the prefix. It is biased, but does not grow exponentially.

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
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    smallest = torch.where(mask, log_ratios, torch.inf).cummin(-1).values
    # One place to the right: the minimum strictly before t. Infinite where no trainable token comes before.
    before = torch.nn.functional.pad(smallest[:, :-1], (1, 0), value=torch.inf)
    return torch.where(mask, log_ratios + torch.where(before < torch.inf, before, 0.0), 0.0)


def prefix_bounds(mask: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """CTPO's bounds of the cumulative log-ratio.

        log(low) sqrt(t) and log(high) sqrt(t)

    where t counts the trainable tokens up to and with the position, so a walk of independent log-ratios of mean 0 stays
    inside with the same probability at every length.

    Args:
        mask: (B, T) bool.
        low: bound of the first token's ratio, below 1.
        high: bound of the first token's ratio, above 1.

    Returns:
        Two (B, T) float32 tensors, nats.

    Reference: Zhang et al. 2026, CTPO (arXiv:2605.07331).
    """
    check_mask(mask=mask)
    growth = mask.cumsum(-1).float().sqrt()
    return math.log(low) * growth, math.log(high) * growth


def shaped_weight(ratio: Tensor, *, gamma: float) -> Tensor:
    """The shaped ratio: in (0, 1], steep where the trainer finds the token unlikely.

        w = r / (r + gamma)

    where r is the ratio. On-policy it is 1 / (1 + gamma), not 1. The study that introduced it for fused rollouts found
    it unstable.

    Args:
        ratio: any shape, float32, positive.
        gamma: where half of the weight is reached.

    Reference: Zhang et al. 2026, "Logit fusion", shaped ratio.

    Example:
        >>> shaped_weight(torch.tensor([1.0, 3.0]), gamma=1.0)
        tensor([0.5000, 0.7500])
    """
    return ratio / (ratio + gamma)


def ess_fraction(total: Tensor, squares: Tensor, count: Tensor | float) -> Tensor:
    """Effective sample size of n weights, as a share of n.

        ESS = (sum w)^2 / (n sum w^2)

    Args:
        total: sum w, float64; of any shape, one number for each sample.
        squares: sum w^2.
        count: n, weights of 0 included.

    Returns:
        In [0, 1]; 0 if every weight is 0.

    Reference: Kong 1992, "A note on importance sampling using standardized weights".

    Example:
        >>> ess_fraction(torch.tensor(4.0), torch.tensor(10.0), 2)  # of the weights 1 and 3
        tensor(0.8000)
    """
    usable = squares > 0
    share = total.square() / torch.where(usable, count * squares, 1.0)
    return torch.where(usable, share.clamp(max=1.0), 0.0)  # float32 row sums can round an exact 1 up


def ess_fraction_of_logs(log_weights: Tensor) -> Tensor:
    """:func:`ess_fraction` of weights given by their logs; products of many ratios do not overflow.

    Args:
        log_weights: (N,) float64, N >= 1, nats; e.g. log(current / sampling) of tokens, or of whole responses.

    Returns:
        0-d.

    Example:
        >>> ess_fraction_of_logs(torch.tensor([1000.0, 1000.0]))
        tensor(1.)
    """
    weights = (log_weights - log_weights.amax()).exp()  # a common factor leaves the ESS as it is
    return ess_fraction(weights.sum(), weights.square().sum(), len(weights))


def ess_cap(ratios: Tensor, *, target: float) -> Tensor:
    """The largest cap C for which ``min(ratio, C)`` has an effective sample size of at least ``target``.

        (S + m C)^2 = target n (Q + m C^2)

    where n is the number of ratios, m of which are above C, and S and Q are the sum and the sum of squares of the
    others. This is :func:`ess_fraction` = ``target``, and the ESS falls as C grows. So find the pair of neighbouring
    ratios between which the cap lies; there S, Q and m are constant and C is a root of the quadratic.

    Args:
        ratios: (N,) positive ratios of all units of the batch; entries that are not finite are padding.
        target: ESS to reach, a fraction in (0, 1).

    Returns:
        0-d float32; infinity where no cap is needed (and for no ratios at all).

    Example:
        >>> cap = ess_cap(torch.tensor([1.0, 1.0, 1.0, 9.0]), target=0.8)
        >>> capped = torch.tensor([1.0, 1.0, 1.0, 9.0]).clamp(max=cap)
        >>> round(float(ess_fraction(capped.sum(), capped.square().sum(), 4)), 4)
        0.8
    """
    if ratios.dim() != 1:
        raise ValueError(f"ratios must have shape (N,), but got {tuple(ratios.shape)}.")
    check_proper_fraction(target=target)
    # Sorted, with the padding last. One more padding entry, so that there is something to take the first of.
    ordered = torch.nn.functional.pad(ratios.double(), (0, 1), value=torch.inf)
    ordered = torch.where(ordered < torch.inf, ordered, torch.inf).sort().values
    real = ordered < torch.inf
    ordered = torch.where(real, ordered, 0.0)
    # At each ratio: m above it, S and Q of those up to and with it. n includes no padding.
    count = real.sum().double()
    larger = count - real.cumsum(0)
    total, squares = ordered.cumsum(0), ordered.square().cumsum(0)
    # Does the ESS reach the target if this ratio is itself the cap? True for a first part of the sorted ratios. Written
    # without a division, so that it is exact at equality.
    reached = (total + larger * ordered).square() >= target * count * (squares + larger * ordered.square())
    fits = (real & reached).sum()
    # The last that fits is the left neighbour of the cap. All on the device: gather, not an index.
    best = (fits - 1).clamp(min=0).view(1)
    m, s, q, low = (column.gather(0, best).squeeze(0) for column in (larger, total, squares, ordered))
    # m (target n - m) C^2 - 2 m S C + (target n Q - S^2) = 0, divided by m; the larger root is the cap. The factor of
    # C^2 is positive, because otherwise the next ratio would fit as well.
    spare = target * count - m
    root = (s.square() - spare * (target * count * q - s.square()) / m).clamp(min=0.0).sqrt()
    cap = torch.maximum((s + root) / spare, low)  # rounding must not put it below its neighbour
    return torch.where(fits >= count, torch.inf, cap).float()  # all fit: no cap is needed
