"""Token losses whose trust region is not a fixed clip of the ratio: divergences, moments, groups."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import any_true
from trl_offpolicy.functional._shapes import check_broadcast, check_mask, check_rows, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.groups import group_members, member_sums
from trl_offpolicy.functional.kl import kl_estimate, reverse_k3
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, ratio_of
from trl_offpolicy.functional.masks import divergence as divergence_of
from trl_offpolicy.functional.masks import second_moment_budget
from trl_offpolicy.functional.policy_losses.common import LossTerms
from trl_offpolicy.functional.policy_losses.tokens import ppo_clip

BinaryDivergence = Literal["tv", "kl"]


def dppo(
    log_ratios: Tensor,
    logps: Tensor,
    advantages: Tensor,
    *,
    divergence: BinaryDivergence,
    low: float,
    high: float,
    max_ratio: float,
) -> LossTerms:
    """DPPO: a truncated policy gradient that is 0 on tokens that are already too far from pi_old.

        -sg[min(r, C)] A log pi, 0 on the tokens that are out

    where r = pi / pi_old and sg stops the gradient. A token is out where A > 0, p > p_old and D > high, or A <= 0, p <
    p_old and D > low. D is the binary divergence of "this token or another": tv = |p - p_old|, kl = KL(p_old || p).
    What carries gradient: log pi of the tokens that are in; the truncated ratio and the mask are detached. Biased by
    the mask, and by the cap where r > C.

    Args:
        log_ratios: log(pi / pi_old); its gradient is stopped.
        logps: log pi, carries gradient.
        advantages: no gradient.
        divergence: "tv" (a difference of probabilities) or "kl" (nats).
        low: bound on D where A <= 0.
        high: bound on D where A > 0.
        max_ratio: C.

    Reference: Qi et al. 2026, DPPO (arXiv:2602.04879), Binary-TV and Binary-KL.
    """
    check_broadcast(log_ratios=log_ratios, logps=logps, advantages=advantages)
    here = log_ratios.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    statistic = "binary_tv" if divergence == "tv" else "binary_kl"
    distance = divergence_of(log_ratios.detach(), statistic, logps.detach() - log_ratios.detach())
    clipped_high = (advantages > 0) & (here > 0) & (distance > high)
    clipped_low = (advantages <= 0) & (here < 0) & (distance > low)
    loss = -here.exp().clamp(max=max_ratio) * advantages * logps
    return LossTerms(torch.where(clipped_low | clipped_high, 0.0, loss), clipped_low, clipped_high)


def p3o(log_ratios: Tensor, logps: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    """P3O: weights capped at the batch's effective sample size, and a KL that takes over as it falls.

        -sg[min(r, ESS)] A log pi + (1 - ESS) (log r + 1 / r - 1),   ESS = (sum r)^2 / (n sum r^2)

    where r = pi / pi_old, sg stops the gradient and the sums are over the n tokens of the call. The second part is k3
    of KL(pi || pi_old), nats, whose gradient is that of 1 - 1 / r times log pi. Where the policies agree the ESS is 1:
    the policy gradient, with weights of at most 1. The cap holds from above only, and a capped token keeps its
    gradient. What carries gradient: log pi, and log r in the KL. Biased by the cap.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient in the KL; clamped to +-20 nats in every exponential.
        logps: (B, T) log pi, carries gradient.
        advantages: no gradient.
        mask: (B, T) bool.

    Returns:
        Where the cap acts as ``clipped_high``, and the ESS as ``gate``.

    Reference: Fakoor et al. 2026, P3O (arXiv:2605.12380), as in FeynRL 4f7eafe06, ``algs/P3O/p3o.py``. There the ESS
    is one number for all ranks, and the KL's exponential is clamped to +-10 nats. Here it is that of this call on this
    rank, as for the other losses that take a statistic of the current policy.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios, logps=logps)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    ratio = ratio_of(log_ratios.detach())
    counted = torch.where(mask, ratio, 0.0).double()
    total, squares, count = counted.sum(), counted.square().sum(), mask.sum()
    ess = torch.where(count > 0, total.square() / (count * squares).clamp(min=1e-300), 1.0).to(ratio.dtype)
    pull = (1 - ess) * kl_estimate(log_ratios, "k3")
    loss = -torch.minimum(ratio, ess) * advantages * logps + pull
    return LossTerms(loss, None, ratio > ess, gate=ess.expand_as(ratio))


def m2po(log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, budget: float) -> LossTerms:
    """M2PO: no clip, but the tokens with the largest log-ratios are taken out.

        -r A on the tokens that stay, mean over them of (log r)^2 <= budget

    where r = pi / pi_old. As with PPO's clip, only tokens that moved where their advantage pushes them (A > 0 and
    r > 1, or A < 0 and r < 1) are counted and taken out. The others have no bound. What carries gradient: log r of the
    tokens that stay. Biased by the mask.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient.
        mask: (B, T) bool.
        budget: nats squared, over the tokens of one call.

    Reference: Zheng et al. 2025, M2PO (arXiv:2510.01161). The authors' code caps those ratios instead of taking the
    tokens out, and never tighter than 0.7 and 1.5.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    here = log_ratios.detach()
    moved = mask & (here * advantages > 0)
    out = moved & ~second_moment_budget(here, moved, budget=budget, across_ranks=False)
    loss = torch.where(out, 0.0, -ratio_of(log_ratios) * advantages)
    return LossTerms(loss, out & (advantages < 0), out & (advantages > 0))


def group_ratio_variance(log_ratios: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Variance of the token ratios over the trainable tokens of each row's group in this call, (B, 1). No gradient.

        E[r^2] - E[r]^2

    where r = pi / pi_old and E is the mean over those tokens.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_rows(len(mask), group_ids=group_ids)
    ratios = torch.where(mask, ratio_of(log_ratios.detach()), 0.0).double()
    member = group_members(group_ids, any_true(mask), across_ranks=False)
    count = member_sums(mask.sum(-1).double(), member).clamp(min=1)
    mean = member_sums(ratios.sum(-1), member) / count
    square = member_sums(ratios.square().sum(-1), member) / count
    return (square - mean.square()).clamp(min=0.0).to(log_ratios.dtype).unsqueeze(-1)


def r2vpo(
    log_ratios: Tensor, advantages: Tensor, mask: Tensor, group_ids: Tensor, *, low: float, high: float, variance: float
) -> LossTerms:
    """R2VPO: PPO's clipped surrogate with a range for each group.

        -min(r A, clip(r, 1 - low_g, 1 + high_g) A), low_g = low / (1 + Var_g(r) / v), high_g likewise

    where Var_g(r) is the variance of the ratios in the group. What carries gradient: log r where the clip is not
    active; the range is detached. Biased by the clip.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient.
        mask: (B, T) bool.
        group_ids: (B,) integer.
        low: epsilon below 1 of a group whose ratios do not vary.
        high: epsilon above 1 of such a group.
        variance: v, the ratio variance at which the range is half as wide.

    Reference: Luo et al. 2026, R2VPO (arXiv:2601.03320). The paper penalises the variance with a dual variable and does
    not clip. The range above is this kit's formula for "high-variance groups receive tighter clips".
    """
    narrower = 1 + group_ratio_variance(log_ratios, mask, group_ids) / variance
    return ppo_clip(log_ratios, advantages, low=low / narrower, high=high / narrower)


def quatro(log_ratios: Tensor, advantages: Tensor, reward_std: Tensor, *, radius: float) -> LossTerms:
    """QUATRO: the policy gradient with a KL term whose multiplier follows from the query's rewards.

        -r A + lambda_q (r log r - r + 1), lambda_q = std_q(R) / sqrt(2 radius)

    where r log r - r + 1 estimates KL(pi || pi_old) on samples of pi_old (``functional.kl.reverse_k3``) and lambda_q is
    the multiplier at which the policy that maximises A - lambda KL lies ``radius`` away, to second order in A. What
    carries gradient: log r, with weight -r (A - lambda_q log r); no clip. The gradient is that of the Lagrangian,
    unbiased on samples of pi_old up to the treatment of tokens as independent.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient, in units of reward: not divided by the group's standard deviation.
        reward_std: (B, 1) standard deviation of the rewards of each row's query.
        radius: bound on KL(pi || pi_old) of a query, nats.

    Reference: Lee et al. 2026, QUATRO (arXiv:2602.04620): the KL-constrained problem solved per query, a multiplier
    from the variance of its rewards, and the log-ratio stabiliser that comes with it. The closed form of the
    multiplier is the second-order one.
    """
    check_broadcast(log_ratios=log_ratios, advantages=advantages)
    check_tokens_or_rows((len(log_ratios), 1), reward_std=reward_std)
    inside = log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    multiplier = reward_std / math.sqrt(2 * radius)
    return LossTerms(-inside.exp() * advantages + multiplier * reverse_k3(inside))
