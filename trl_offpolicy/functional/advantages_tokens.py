"""Advantages by token from the energy of the score: the optimal token baseline and what it is made of."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_offpolicy.functional.collective import gather_padded, gather_rows

Alone = Literal["zero", "return"]


@torch.no_grad()
def score_energy(logps: Tensor, sum_sq_probs: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """rho^2 (1 - 2 pi + sum_v pi_v^2): squared norm of the token's score with respect to the logits.

    A proxy of its squared gradient norm that needs the forward only. rho, the importance weight of the token, enters
    squared as it multiplies the gradient.

    Args:
        logps: (B, T) log pi of the sampled token, nats; where it is not finite the energy is 0.
        sum_sq_probs: (B, T) sum over the vocabulary of pi squared.
        mask: (B, T) bool, True = trainable token.
        weights: (B, 1) or (B, T) importance weights; None = 1.

    Returns:
        (B, T) float32, >= 0; 0 outside ``mask``; no gradient.

    Reference: Li et al. 2026, OTB (arXiv:2602.07078).

    Example:
        >>> score_energy(torch.tensor([[0.5]]).log(), torch.tensor([[0.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])
    """
    energy = (1 - 2 * logps.float().exp() + sum_sq_probs.float()).clamp(min=0.0)
    if weights is not None:
        energy = energy * weights.float().square()
    return torch.where(mask & (energy < torch.inf), energy, 0.0)


@torch.no_grad()
def returns_to_go(outcome: Tensor, mask: Tensor, token_rewards: Tensor | None = None) -> Tensor:
    """G_t: the outcome plus the rewards of this and all later trainable tokens.

    Args:
        outcome: (B,) float, reward of the whole response (paid at its last token).
        mask: (B, T) bool.
        token_rewards: (B, T) float, e.g. -coef * KL; None = 0.

    Returns:
        (B, T) float32, 0 outside ``mask``.

    Example:
        >>> returns_to_go(torch.ones(1), torch.tensor([[True, False, True]]), torch.tensor([[0.1, 9.0, 0.2]]))
        tensor([[1.3000, 0.0000, 1.2000]])
    """
    later = torch.zeros_like(mask, dtype=torch.float32)
    if token_rewards is not None:
        later = torch.where(mask, token_rewards.float(), 0.0).flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask, outcome.float().unsqueeze(1) + later, 0.0)


@torch.no_grad()
def optimal_token_baseline(
    returns: Tensor,
    energy: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    counted: Tensor,
    *,
    multi_turn: bool = False,
    alone: Alone = "zero",
) -> Tensor:
    """OTB: A_t = G_t - B_t with B_t = sum_i W_it G_it / sum_i W_it over the group's responses that have a token t.

    W_t is the energy accumulated up to and with t, so noisy paths say more about the baseline of their own kind. Least
    variance if scores of different tokens do not correlate; biased by order 1 / n, since the own return is in B_t.

    Args:
        returns: (B, T) float32, G.
        energy: (B, T) float32, of :func:`score_energy`; with importance weights in it the baseline is IS-aware.
        mask: (B, T) bool, True = trainable token.
        group_ids: (B,) integer; a group may be spread over ranks, T may differ between them.
        counted: (B,) bool, responses that belong to the baseline; the others get 0.
        multi_turn: count trainable tokens only, so that t is the t-th token the policy wrote: gaps between turns (tool
            output) differ from response to response. False: t is the position.
        alone: tokens that no other response of the group reaches: "zero" (the formula: B_t = G_t), or "return" (B_t =
            0, verl's ``handle_zero_tail``, its default).

    Returns:
        (B, T) float32, 0 outside ``mask``. Where all W are 0 the plain mean takes over.

    Reference: Li et al. 2026 (arXiv:2602.07078) and verl's ``optimal_token_baseline``, ``tir_optimal_token_baseline``.
    Liu 2026 ("Off-Policy Drift in LLM RL") scales W_t by the squared weight of t; here, as in verl's code, each token's
    energy is scaled by its own before the sum (the same for weights that are constant over a response).

    Example:
        >>> optimal_token_baseline(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        ...                        torch.ones(2, 2).bool(), torch.zeros(2).long(), torch.ones(2).bool())
        tensor([[ 0.5000,  0.3333],
                [-0.5000, -0.6667]])
    """
    if multi_turn:
        order = (~mask).long().argsort(dim=-1, stable=True)  # trainable tokens first, in their order
        returns, energy, mask = (values.gather(1, order) for values in (returns, energy, mask))
        advantages = optimal_token_baseline(returns, energy, mask, group_ids, counted, alone=alone)
        return torch.zeros_like(advantages).scatter_(1, order, advantages)
    here = mask & counted.unsqueeze(1)
    path = torch.where(here, torch.where(mask, energy, 0.0).cumsum(-1), 0.0)
    member = (group_ids.unsqueeze(1) == gather_rows(group_ids).unsqueeze(0)).double()
    present = torch.where(here, returns, 0.0)

    def over_group(values: Tensor) -> Tensor:
        return (member @ gather_padded(values, padding=0.0).double())[:, : mask.shape[1]]

    total, count = over_group(path), over_group(here.float())
    weighted = over_group(path * present) / torch.where(total > 0, total, 1.0)
    baseline = torch.where(total > 0, weighted, over_group(present) / count.clamp(min=1.0))
    single = torch.where(here, returns, 0.0) if alone == "return" else torch.zeros_like(present)
    return torch.where(here, torch.where(count > 1, returns - baseline.float(), single), 0.0)
