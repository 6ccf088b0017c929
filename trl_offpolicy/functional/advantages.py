"""Advantages from rewards, where a correction changes what the baseline may see."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.functional.groups import group_members

ScaleRewards = Literal["group", "batch", "none"]
STD_EPSILON = 1e-4
"""What TRL adds to a standard deviation before it divides."""


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    counted: Tensor,
    *,
    scale_rewards: ScaleRewards = "group",
    epsilon: float = STD_EPSILON,
) -> Tensor:
    """GRPO's advantage with a baseline of the counted responses only: (r - mean) / (std + epsilon).

    A response that rejection took out of the loss says something about the engine, not about the policy; left in the
    group's mean and spread it still moves the others. With all responses counted this is TRL's advantage.

    Args:
        rewards: (B,) float; NaN = no reward, not counted.
        group_ids: (B,) integer; a group may be spread over ranks, every rank makes this call.
        counted: (B,) bool, responses that belong to the baseline.
        scale_rewards: divide by the standard deviation (n - 1) of the "group", of the whole "batch", or not.
        epsilon: added to it.

    Returns:
        (B,) float32, no gradient; 0 for responses that are not counted and for groups of one. With "batch" a group of
        one still counts in the standard deviation, by its reward.

    Reference: Shao et al. 2024, GRPO (arXiv:2402.03300), Section 4.1.2; TRL ``scale_rewards``.

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 0])
        >>> group_advantages(rewards, ids, torch.tensor([True, True, False]), scale_rewards="none")
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    here = counted & ~rewards.isnan()
    values = torch.where(here, rewards.float(), 0.0).double()  # so that equal rewards are equal to their mean
    everyone = gather_rows(values)
    member = group_members(group_ids, here, across_ranks=True)
    count = member.sum(-1)
    mean = torch.where(member, everyone, 0.0).sum(-1) / count.clamp(min=1)
    advantages = torch.where(here & (count > 1), values - mean, 0.0)
    if scale_rewards == "none":
        return advantages.float()
    if scale_rewards == "batch":
        member = gather_rows(here).expand(len(rewards), -1)
        count = member.sum(-1)
        mean = torch.where(member, everyone, 0.0).sum(-1) / count.clamp(min=1)
    squares = torch.where(member, everyone - mean.unsqueeze(1), 0.0).square().sum(-1)
    return (advantages / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)).float()
