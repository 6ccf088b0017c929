"""Advantages of tokens that are changed in the loss step: a price on the mismatch, and a signal for unanimous groups.

Shapes: tokens (B, T); advantages (B, 1) or (B, T). Nothing carries gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_broadcast, check_mask, check_tokens


@torch.no_grad()
def penalised_advantages(advantages: Tensor, discrepancy: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Advantages less a price for the discrepancy of trainer and engine at each token.

        A'_t = A_t - lambda d_t

    where d_t >= 0 is the discrepancy of the two policies at token t, e.g. their absolute difference in probability.

    Args:
        advantages: (B, 1) or (B, T).
        discrepancy: (B, T).
        mask: (B, T) bool; outside it the advantages stay as they are.
        coef: lambda, at least 0.

    Returns:
        (B, T) float32, no gradient.

    Reference: Liu et al. 2026, DCMDP (arXiv:2606.08779), whose Lagrangian takes the discrepancy from the reward.

    Example:
        >>> penalised_advantages(torch.ones(1, 1), torch.tensor([[0.0, 0.2]]), torch.ones(1, 2).bool(), coef=0.5)
        tensor([[1.0000, 0.9000]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, discrepancy=discrepancy)
    check_broadcast(advantages=advantages, discrepancy=discrepancy)
    return advantages.float() - coef * torch.where(mask, discrepancy.float(), 0.0)


def dual_ascent(coef: float, value: float, *, target: float, rate: float, largest: float) -> float:
    """The multiplier of a constraint ``value <= target``, one projected step of dual ascent later.

        lambda' = min(max(lambda + rate (value - target), 0), largest)

    It rises while the constraint is violated and falls to 0 while it holds.

    Args:
        coef: lambda.
        value: what was measured.
        target: the bound on it.
        rate: step size.
        largest: upper bound of the multiplier.

    Example:
        >>> dual_ascent(0.5, 0.03, target=0.02, rate=10.0, largest=1.0)
        0.6
    """
    return min(max(coef + rate * (value - target), 0.0), largest)


def is_unanimous(group_rewards: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """Where all rewards of a group are equal: (B, 1) bool; False where fewer than two are known.

    Args:
        group_rewards: (B, G), the rewards of the row's whole group; one that is not finite does not count.
        tolerance: rewards that lie within this of each other are equal.

    Example:
        >>> is_unanimous(torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, float("nan")]])).flatten().tolist()
        [True, False, False]
    """
    rewards = group_rewards.double()  # a difference of float32 rewards has no rounding of its own then
    counts = rewards.isfinite()
    low = torch.where(counts, rewards, torch.inf).amin(-1, keepdim=True)
    high = torch.where(counts, rewards, -torch.inf).amax(-1, keepdim=True)
    return (high - low <= tolerance) & (counts.sum(-1, keepdim=True) > 1)


@torch.no_grad()
def zero_variance_advantages(
    advantages: Tensor, entropies: Tensor, mask: Tensor, unanimous: Tensor, correct: Tensor, *, alpha: float
) -> Tensor:
    """RL-ZVP: advantages by entropy for the responses of a prompt on which all have one reward.

        A_t = alpha H_t                   if all are correct
        A_t = -alpha (max_k H_k - H_t)    if all are wrong

    where H_t is the entropy of the next-token distribution at t, and the maximum is over the response's trainable
    tokens. A group's baseline gives these responses an advantage of 0, so they teach nothing. Here a correct one is
    rewarded most where the policy was unsure; a wrong one is penalised least there, so that it may go on trying.

    Args:
        advantages: (B, 1) or (B, T); they stay where the rewards of the group differ.
        entropies: (B, T), nats; one that is not finite counts as 0.
        mask: (B, T) bool, trainable tokens.
        unanimous: (B, 1) bool, all rewards of the response's group are equal.
        correct: (B, 1) bool, the response is correct.
        alpha: scale, positive.

    Returns:
        (B, T) float32, no gradient.

    Reference: Le et al. 2025, "No prompt left behind" (arXiv:2509.21880), Eq. 5. Heuristic: no baseline is left, so the
    gradient is not that of the expected reward.

    Example:
        >>> entropies = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
        >>> yes = torch.tensor([[True], [True]])
        >>> zero_variance_advantages(
        ...     torch.zeros(2, 1), entropies, torch.ones(2, 2).bool(), yes, torch.tensor([[True], [False]]), alpha=0.1
        ... )
        tensor([[ 0.1000,  0.3000],
                [-0.2000,  0.0000]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, entropies=entropies)
    check_broadcast(advantages=advantages, entropies=entropies)
    entropies = torch.where(mask & (entropies.abs() < torch.inf), entropies.float(), 0.0)
    most = torch.where(mask, entropies, -torch.inf).amax(-1, keepdim=True)
    shaped = alpha * torch.where(correct, entropies, entropies - most)
    return torch.where(unanimous & mask, shaped, advantages.float())
