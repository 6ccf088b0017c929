"""Distances between log-probs: KL k3, one that large differences do not dominate, and ranks."""

from __future__ import annotations

import numpy as np
import torch

from trl_offpolicy.diagnosis.attribution.evidence import Array
from trl_offpolicy.functional.kl import k3

MAX_LOG_RATIO = 20.0


def kl_k3(log_ratio: Array) -> float:
    """Mean of e^d - 1 - d over finite entries, d clamped to +-20: KL(mu || old) in nats.

    Example:
        >>> round(kl_k3(np.array([0.0, 0.1, np.nan])), 6)
        0.002585
    """
    d = np.clip(log_ratio[np.isfinite(log_ratio)], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return float(np.mean(token_k3(d))) if d.size else float("nan")


def token_k3(d: Array) -> Array:
    """KL(mu || old) of each token by the kit's k3 = e^d - 1 - d, in float64; d = log(old / mu)."""
    return k3(torch.tensor(d, dtype=torch.float64)).numpy()


def distance(d: Array) -> float:
    """Mean of 2 (sqrt(1 + d^2) - 1) over finite entries: d^2 where it is small, 2 |d| where it is large."""
    values = d[np.isfinite(d)]
    return float(np.mean(2 * (np.sqrt(1 + values**2) - 1))) if values.size else 0.0


def spread(values: Array) -> float:
    """:func:`distance` of the finite values from their mean."""
    seen = values[np.isfinite(values)]
    return distance(seen - seen.mean()) if seen.size else 0.0


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's rank correlation, equal values at the mean of their ranks; NaN if one side does not vary.

    Example:
        >>> rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([0.1, 0.2, 0.3]))
        1.0
    """
    if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
        return float("nan")
    return float(round(np.corrcoef(_ranks(x), _ranks(y))[0, 1], 12))


def _ranks(values: Array) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]
