"""Policy losses on one ratio for a whole response: the geometric mean of its token ratios, or VESPO's product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_broadcast, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, ratio_of
from trl_offpolicy.functional.policy_losses.common import LossTerms
from trl_offpolicy.functional.policy_losses.tokens import ppo_clip

GSPO_LOG_LIMIT = 10.0
"""Nats at which a response's mean log-ratio is held in GSPO-token, and its gradient ends, as in verl and SkyRL."""
GMPO_WEIGHT_FLOOR = math.log(1e-10)
"""An importance weight of 0 enters GMPO's geometric mean as 1e-10, as in verl."""


def gspo_token(log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float) -> LossTerms:
    """GSPO-token: PPO's clipped surrogate on one ratio for the response, with the gradient of each token.

        -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t), s_t = sg[s] pi_t / sg[pi_t]

    where s is the geometric mean ratio of the response, at most e^10, and sg stops the gradient. What carries gradient:
    pi_t alone, on its own token, with weight s A_t; s itself is detached. With one advantage for the response and the
    mean over its tokens the gradient is GSPO's. Biased: the geometric mean is not the importance weight of the
    response.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient.
        advantages: no gradient; may differ from token to token.
        mask: (B, T) bool.
        low: the clip is at 1 - low.
        high: the clip is at 1 + high.

    Reference: Zheng et al. 2025, GSPO (arXiv:2507.18071), section 4.3; verl's ``gspo``.
    """
    check_tokens(mask.shape, log_ratios=log_ratios)
    mean = aggregate(log_ratios.detach(), mask, "sequence_mean")
    by_token = mean + (log_ratios - log_ratios.detach())
    return ppo_clip(by_token.clamp(max=GSPO_LOG_LIMIT), advantages, low=low, high=high)


def gmpo(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    weights: Tensor | None = None,
) -> LossTerms:
    """GMPO: the geometric mean of the token ratios, each clipped where it moved as its advantage asks.

        -A exp(mean_t c_t), c_t = min(l_t, high) where A_t > 0, max(l_t, -low) where A_t < 0, 0 where A_t = 0

    where l_t is the log-ratio and the mean is over the trainable tokens of the response. What carries gradient: log r
    of the tokens that are not clipped, all with the response's weight. Biased, as every geometric mean.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient.
        advantages: no gradient. The paper has one for each response, (B, 1). (B, T): each token is clipped by its own
            sign, and A is their mean over the response, since the ratio is the response's (as in verl).
        mask: (B, T) bool.
        low: nats below 0, not a distance from the ratio 1.
        high: nats above 0.
        weights: (B, 1) or (B, T) importance weights; their geometric mean over the response multiplies the loss.

    Returns:
        Loss (B, 1); clip flags (B, T).

    Reference: Zhao et al. 2025, GMPO (arXiv:2507.20673), Eq. 4; verl's ``geo_mean``.
    """
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_tokens_or_rows(mask.shape, advantages=advantages, weights=weights)
    advantage = aggregate(advantages.expand_as(log_ratios), mask, "sequence_mean")
    clipped_high = mask & (advantages > 0) & (log_ratios.detach() > high)
    clipped_low = mask & (advantages < 0) & (log_ratios.detach() < -low)
    clipped = torch.where(clipped_high, high, torch.where(clipped_low, -low, log_ratios))  # c
    if advantages.shape[-1] > 1:  # with one advantage for the response, 0 makes the whole loss 0
        clipped = torch.where(advantages == 0, 0.0, clipped)
    loss = -advantage * ratio_of(aggregate(clipped, mask, "sequence_mean"))
    if weights is not None:
        logs = weights.log().clamp(min=GMPO_WEIGHT_FLOOR).expand_as(log_ratios)
        loss = loss * aggregate(logs, mask, "sequence_mean").exp()
    return LossTerms(loss, clipped_low, clipped_high)


def tbpo(
    sequence_log_ratio: Tensor, advantages: Tensor, *, high: float, negative_low: float, negative_high: float
) -> LossTerms:
    """TBPO: one clipped ratio for the response, with a band on both sides where its advantage is negative.

        -min(s, 1 + high) A where A >= 0, -clip(s, 1 - negative_low, 1 + negative_high) A where A < 0

    where s is the geometric mean ratio of the response. Both bounds of a negative response end its gradient, where PPO
    has the lower one only: a response with "error tokens" that has become far likelier is left alone too. What carries
    gradient: log s inside the band. Biased.

    Args:
        sequence_log_ratio: (B, 1) mean over tokens of log(pi / pi_old), carries gradient.
        advantages: no gradient.
        high: upper bound where A >= 0.
        negative_low: lower bound where A < 0.
        negative_high: upper bound where A < 0.

    Reference: Gu et al. 2026, QaRL (arXiv:2604.07853), Trust-Band Policy Optimization. Its mismatch weight, capped at
    2, is a correction: ``TruncateWeight(level="sequence_mean", max_weight=2.0)``.
    """
    check_broadcast(sequence_log_ratio=sequence_log_ratio, advantages=advantages)
    ratio = ratio_of(sequence_log_ratio)
    negative = advantages < 0
    band = torch.where(negative, ratio.clamp(1 - negative_low, 1 + negative_high), ratio.clamp(max=1 + high))
    return LossTerms(-band * advantages, ratio < band, ratio > band)


VESPO_LOG_FLOOR = math.log(1e-8)


def vespo_phi(
    sequence_log_ratio: Tensor, advantages: Tensor, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float
) -> Tensor:
    """VESPO's Gamma weight, normalised so that phi(1) = 1. No gradient.

        phi(w) = exp(lambda) w^k exp(-lambda w)

    where w is the product of the response's ratios pi / mu, held in [1e-8, e^20].

    Args:
        sequence_log_ratio: (B, 1) sum over tokens of log(pi / mu), nats.
        advantages: (B, 1) or (B, T); picks (k, lambda) by sign.
        k_pos: the shape k where A >= 0.
        lambda_pos: the rate lambda where A >= 0.
        k_neg: the shape k where A < 0.
        lambda_neg: the rate lambda where A < 0.

    Reference: "VESPO: variational sequence-level soft policy optimization", arXiv:2602.10693, section 3.4.
    """
    check_broadcast(sequence_log_ratio=sequence_log_ratio, advantages=advantages)
    log_w = sequence_log_ratio.detach().clamp(VESPO_LOG_FLOOR, LOG_RATIO_CLAMP)
    shape = torch.where(advantages >= 0, k_pos, k_neg)
    rate = torch.where(advantages >= 0, lambda_pos, lambda_neg).clamp(min=1e-4)
    return (rate + shape * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
