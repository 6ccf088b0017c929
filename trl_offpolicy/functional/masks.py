"""Keep masks: True = the token or sequence stays in the policy loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_offpolicy.functional.weights import inside_band


def outlier_veto(log_ratios: Tensor, mask: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Drop a whole sequence if the ratio of any trainable token leaves [low, high].

    Args:
        log_ratios: (B, T) float32, nats.
        mask: (B, T) bool.
        low: smallest tolerated token ratio (e.g. 1e-4); None = open.
        high: largest tolerated token ratio (e.g. 100); None = open.

    Returns:
        (B, 1) bool; an empty row is kept.

    Reference: Liu, Li et al. 2025, "When speed kills stability" (veto); SkyRL ``outlier_token_is_threshold_*``.
    """
    log_low = None if low is None else math.log(low)
    log_high = None if high is None else math.log(high)
    tolerated = inside_band(log_ratios, low=log_low, high=log_high) | ~mask
    return tolerated.all(dim=-1, keepdim=True)


def off_policy_sequence_mask(mean_log_ratio: Tensor, advantages: Tensor, *, max_divergence: float) -> Tensor:
    """DeepSeek's off-policy sequence mask: drop negative-advantage tokens of sequences that drifted too far.

    Dropped where ``A < 0`` and ``-mean_log_ratio > max_divergence``: a one-sided geometric mask
    ``rho_geo >= exp(-max_divergence)`` on the sequences that would be pushed down.

    Args:
        mean_log_ratio: (B, 1) mean over trainable tokens of log(pi / mu), nats.
        advantages: (B, 1) or (B, T).
        max_divergence: delta, nats per token.

    Returns:
        bool of the shape of ``advantages``.

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), Eq. 8-9.
    """
    return (advantages >= 0) | (-mean_log_ratio <= max_divergence)


def divergence(log_ratios: Tensor, statistic: str) -> Tensor:
    """Per-token divergence statistic of sampler and trainer, nats.

    With l = log(numerator / denominator): k1 = -l (unbiased, signed), k2 = l^2 / 2 (biased, never negative),
    k3 = exp(l) - 1 - l (unbiased, never negative); all estimate KL(denominator || numerator).

    Args:
        log_ratios: (B, T) float32.
        statistic: "k1", "k2" or "k3".

    Raises:
        ValueError: unknown statistic.

    Reference: Schulman 2020, "Approximating KL divergence".
    """
    if statistic == "k1":
        return -log_ratios
    if statistic == "k2":
        return log_ratios.square() / 2
    if statistic == "k3":
        return torch.expm1(log_ratios) - log_ratios
    raise ValueError(f"statistic must be one of 'k1', 'k2', 'k3', but got {statistic!r}.")
