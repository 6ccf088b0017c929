"""Advantages by response, from rewards (B,) and prompt groups that may be spread over ranks.

The baselines take ``counted`` (B,) bool: responses that belong to the baseline; the others get 0, as do groups of
one, which have nothing to compare (verl leaves those their whole reward). What is normalised over the batch says what
becomes of a group of one there. A NaN reward is not counted. Nothing carries gradient. Each rank makes the same calls
and has the same number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional.advantages import STD_EPSILON, group_advantages
from trl_offpolicy.functional.collective import gather_rows, sum_ranks
from trl_offpolicy.functional.groups import group_members

_VARIANCE_EPSILON = 1e-8  # as verl and OpenRLHF add to the variance


@torch.no_grad()
def leave_one_out(rewards: Tensor, group_ids: Tensor, counted: Tensor) -> Tensor:
    """RLOO: the reward minus the mean of the *other* responses, n / (n - 1) (r - mean).

    Unbiased: the baseline does not depend on the response that it is subtracted from.

    Args:
        rewards: (B,) float.
        group_ids: (B,) integer.
        counted: (B,) bool.

    Returns:
        (B,) float32.

    Reference: Ahmadian et al. 2024 (arXiv:2402.14740).

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 0]), torch.ones(3).bool())
        tensor([-1.5000, -3.0000,  4.5000])
    """
    here = counted & ~rewards.isnan()
    count = group_members(group_ids, here, across_ranks=True).sum(-1)
    centred = group_advantages(rewards, group_ids, counted, scale_rewards="none")
    return centred * count / (count - 1).clamp(min=1)


@torch.no_grad()
def weighted_baseline(rewards: Tensor, group_ids: Tensor, counted: Tensor, importance: Tensor) -> Tensor:
    """Reward minus sum_i e_i r_i / sum_i e_i over the group: the baseline of least variance for energies e.

    e = squared norm of the response's gradient. Its length (OPO) is right if every token has the same energy and tokens
    do not correlate; w^2 ||g||^2 (OPOB) holds the importance weight as well. A heuristic with a bias of order 1 / n:
    the response's own reward is in the baseline.

    Args:
        rewards: (B,) float.
        group_ids: (B,) integer.
        counted: (B,) bool.
        importance: (B,) float, e >= 0; in a group where all are 0 the plain mean takes over.

    Returns:
        (B,) float32.

    Reference: Hao et al. 2025, OPO (arXiv:2505.23585); Huang et al. 2026, VCPO (arXiv:2602.17616).

    Example:
        >>> weighted_baseline(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2).bool(),
        ...                   torch.tensor([3.0, 1.0]))
        tensor([ 0.2500, -0.7500])
    """
    here = counted & ~rewards.isnan()
    values = torch.where(here, rewards.float(), 0.0)
    energy = torch.where(here, importance.float(), 0.0)
    member = group_members(group_ids, here, across_ranks=True).double()
    everyone, energies = gather_rows(values).double(), gather_rows(energy).double()
    total, count = member @ energies, member.sum(-1)
    plain = (member @ everyone) / count.clamp(min=1.0)
    baseline = torch.where(total > 0, (member @ (energies * everyone)) / torch.where(total > 0, total, 1.0), plain)
    return torch.where(here & (count > 1), values - baseline, 0.0).float()


@torch.no_grad()
def normalised_by_function(
    rewards: Tensor, group_ids: Tensor, counted: Tensor, weights: Tensor | None = None
) -> Tensor:
    """GDPO: each reward function normalised in its group, then the weighted sum normalised over the batch.

    A_k = (r_k - mean) / (std + 1e-4), then (sum_k w_k A_k - mean) / (std + 1e-4) over all counted responses: a function
    of large spread cannot drown one of small. Biased, as every division by the batch's own spread.

    Args:
        rewards: (B, K) float, one column a function; NaN = this function does not apply.
        group_ids: (B,) integer.
        counted: (B,) bool.
        weights: (K,) float; None = ones.

    Returns:
        (B,) float32; 0 for a response without any reward. Every group adds up to 0, so that the batch's mean is 0 up to
        rounding and a group of one gets 0; as a 0 it counts in the batch's standard deviation.

    Reference: Liu et al. 2026, GDPO (arXiv:2601.05242); TRL's ``normalize_then_sum``. verl's batch normalisation counts
    each response once for every token.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0]])
        >>> normalised_by_function(rewards, torch.zeros(3).long(), torch.ones(3).bool())
        tensor([-0.5774, -0.5771,  1.1546])
    """
    here = counted & ~rewards.isnan().all(-1)
    columns = [group_advantages(column, group_ids, here) for column in rewards.unbind(-1)]
    by_function = torch.stack(columns, dim=-1)
    total = by_function.sum(-1) if weights is None else by_function @ weights.to(by_function)
    mean, variance = _batch_moments(total, here.float())
    return torch.where(here, (total - mean) / (variance.sqrt() + STD_EPSILON), 0.0)


@torch.no_grad()
def whitened_by_token(advantages: Tensor, lengths: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the batch, each response counted once for every token.

    Args:
        advantages: (B,) float32.
        lengths: (B,) trainable tokens; 0 = the response does not count.

    Returns:
        (B,) float32; 0 where the length is 0. An advantage of 0 (a group of one) becomes - mean / std.

    Reference: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), as verl and OpenRLHF compute it.

    Example:
        >>> whitened_by_token(torch.tensor([1.0, -1.0]), torch.tensor([1, 3]))
        tensor([ 1.5000, -0.5000])
    """
    mean, variance = _batch_moments(advantages, lengths.float())
    return torch.where(lengths > 0, (advantages - mean) * torch.rsqrt(variance + _VARIANCE_EPSILON), 0.0)


def _batch_moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and n - 1 variance of all ranks' values with integer ``weights``, 0-d float32."""
    weights, values = weights.double(), values.double()
    totals = sum_ranks(torch.stack([weights.sum(), (weights * values).sum()]))
    mean = totals[1] / totals[0].clamp(min=1.0)
    squares = sum_ranks((weights * (values - mean).square()).sum())
    return mean.float(), (squares / (totals[0] - 1).clamp(min=1.0)).float()
