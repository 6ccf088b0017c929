"""Losses that pick tokens by the covariance of advantage and log-probability over all rows of one call."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.kl import k3
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, ratio_of
from trl_offpolicy.functional.policy_losses.common import LossTerms, masked_mean
from trl_offpolicy.functional.policy_losses.tokens import ppo_clip

CovPenalty = Literal["abs", "k3"]


def token_covariance(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Covariance of advantage and log-probability, by token. No gradient.

        (A - mean A) (log pi - mean log pi)

    where the means are over the True tokens of ``mask``.

    Args:
        logps: (B, T) log pi.
        advantages: (B, 1) or (B, T).
        mask: (B, T) bool.

    Returns:
        (B, T), 0 outside ``mask``.

    Example:
        >>> token_covariance(torch.tensor([[-1.0, -3.0]]), torch.tensor([[2.0, 0.0]]), torch.ones(1, 2).bool())
        tensor([[1., 1.]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, logps=logps)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    logps, advantages = logps.detach(), advantages.expand_as(logps)
    centred = (advantages - masked_mean(advantages, mask)) * (logps - masked_mean(logps, mask))
    return torch.where(mask, centred, 0.0)


def first_ranked(scores: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """(B, T) bool: the ``count`` candidates with the highest scores of the call; all of them if there are fewer."""
    check_mask(candidates=candidates)
    check_tokens(candidates.shape, scores=scores)
    # Sorting the order of the sorted places gives each place its rank; nothing waits for the value of ``count``.
    flat = torch.where(candidates, scores, -torch.inf).flatten()
    rank = flat.argsort(descending=True, stable=True).argsort()
    return candidates & (rank.view_as(candidates) < count)


def clip_cov(
    log_ratios: Tensor,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    fraction: float,
    cov_low: float,
    cov_high: float,
) -> LossTerms:
    """Clip-Cov: PPO's clipped surrogate, without the loss of a few tokens drawn from those with a large covariance.

        0 on the tokens drawn, else -min(r A, clip(r, 1 - low, 1 + high) A)

    where r = pi / pi_old. What carries gradient: log r of the tokens that neither clip takes out. Heuristic.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        logps: log pi, for the covariance only.
        advantages: no gradient.
        mask: (B, T) bool.
        low: PPO's clip is at 1 - low.
        high: PPO's clip is at 1 + high.
        fraction: share of the call's tokens to draw, rounded down, but at least one if there is a candidate.
        cov_low: the covariance of a candidate is above this.
        cov_high: the covariance of a candidate is below this.

    Returns:
        ``gate`` is 0 on the tokens taken out, else 1; the clip flags are PPO's.

    Reference: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov; verl's ``clip_cov``. torch's global generator draws.
    """
    check_tokens(mask.shape, log_ratios=log_ratios)
    clipped = ppo_clip(log_ratios, advantages, low=low, high=high)
    covariance = token_covariance(logps, advantages, mask)
    assert clipped.clipped_low is not None and clipped.clipped_high is not None
    at_clip = clipped.clipped_low | clipped.clipped_high
    candidates = mask & ~at_clip & (covariance > cov_low) & (covariance < cov_high)
    count = (mask.sum() * fraction).floor().clamp(min=1)
    taken = first_ranked(torch.rand_like(covariance), candidates, count)
    gate = (~taken).to(clipped.loss.dtype)
    return clipped._replace(loss=torch.where(taken, 0.0, clipped.loss), gate=gate)


def kl_cov(
    log_ratios: Tensor,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    fraction: float,
    coef: float,
    penalty: CovPenalty = "abs",
) -> LossTerms:
    r"""KL-Cov: a pull to pi_old on the tokens with the largest covariance of the call.

        -r A, plus coef \|log r\| (or coef (r - 1 - log r)) on those tokens

    where r = pi / pi_old. What carries gradient: log r of every token; there is no clip. Heuristic.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        logps: log pi, for the covariance only.
        advantages: no gradient.
        mask: (B, T) bool.
        fraction: share of the call's tokens that are penalised, rounded down, but at least one.
        coef: factor of the penalty.
        penalty: "abs" is \|log r\|, a push of constant size. "k3" is r - 1 - log r, which estimates KL(pi_old || pi)
            on tokens of pi_old without bias. Here only some tokens have it, picked by their own log pi.

    Returns:
        ``gate`` is 1 on the penalised tokens, else 0.

    Reference: Cui et al. 2025 (arXiv:2505.22617), Eq. 14, has the KL divergence; "k3" is its estimate from the sampled
    token. "abs" is what the authors' code and verl's ``kl_cov`` compute.
    """
    check_tokens(mask.shape, log_ratios=log_ratios)
    count = (mask.sum() * fraction).floor().clamp(min=1)
    worst = first_ranked(token_covariance(logps, advantages, mask), mask, count)
    inside = log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    distance = log_ratios.abs() if penalty == "abs" else k3(inside)
    loss = -ratio_of(log_ratios) * advantages + torch.where(worst, coef * distance, 0.0)
    return LossTerms(loss, gate=worst.to(loss.dtype))
