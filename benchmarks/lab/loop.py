"""The GRPO loop of the small experiments, around the kit's own Objective."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import trl_offpolicy as op
from benchmarks.lab.sorting import Answers, Sorter, token_logps
from trl_offpolicy.engines.rounding import round_integer
from trl_offpolicy.stats import Stats


@dataclass(frozen=True)
class Rollouts:
    """A generation batch of B responses.

    Args:
        answers: what the sampler said, with its own log-probs (mu).
        old: (B, T) log-probs of the learner, unrounded, at the weights that the sampler was made from.
        rewards: (B,).
        advantages: (B,).
        group_size: neighbouring rows that answer one prompt.
    """

    answers: Answers
    old: Tensor
    rewards: Tensor
    advantages: Tensor
    group_size: int


def rounded(model: Sorter, bits: int | None) -> Sorter:
    """A copy for the sampler: every linear weight, the head's too, rounded to ``bits`` a row (None = as it is)."""
    copy = deepcopy(model).requires_grad_(False)
    for module in copy.modules():
        if bits is not None and isinstance(module, nn.Linear):
            module.weight.data = round_integer(module.weight.data, bits=bits)
    return copy


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(B,): GRPO's, centred and scaled in each group.

    Example:
        >>> group_advantages(torch.tensor([0.0, 1.0, 1.0, 1.0]), 2).round(decimals=2)
        tensor([-0.7100,  0.7100,  0.0000,  0.0000])
    """
    by_group = rewards.view(-1, group_size)
    return ((by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)).flatten()


def policy_batch(model: nn.Module, rollouts: Rollouts, index: Tensor, **others: Any) -> op.PolicyBatch:
    """Some rows, with the three policies: mu (sampler), pi_old and pi (the learner then and now).

    ``others`` are fields of the batch beside these, or in place of the old log-probs.
    """
    return op.PolicyBatch(
        per_token_logps=token_logps(model, rollouts.answers.ids[index]),
        sampling_per_token_logps=rollouts.answers.logps[index],
        completion_mask=rollouts.answers.mask[index],
        advantages=rollouts.advantages[index],
        rewards=rollouts.rewards[index],
        group_ids=index // rollouts.group_size,
        **{"old_per_token_logps": rollouts.old[index], **others},
    )


BatchOf = Callable[[nn.Module, Rollouts, Tensor], op.PolicyBatch]


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: op.Objective,
    rollouts: Rollouts,
    minibatches: int,
    generator: torch.Generator,
    batch_of: BatchOf = policy_batch,
) -> tuple[Stats, float]:
    """One pass over the rollouts, an optimizer step a minibatch, gradient norm at most 1.

    ``batch_of`` makes the objective's batch of some rows.

    Returns:
        The diagnostics of all steps together, and the last gradient norm before clipping.
    """
    merged, norm = Stats({}), 0.0
    for index in torch.randperm(len(rollouts.rewards), generator=generator).chunk(minibatches):
        result = objective(batch_of(model, rollouts, index))
        optimizer.zero_grad()
        result.loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        merged = merged.merge(result.stats)
    return merged, norm
