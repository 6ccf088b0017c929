"""Turns drawn groups into a PolicyBatch: pads them and scores them with the current weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_offpolicy.functional.advantages import group_advantages
from trl_offpolicy.rollouts.replay.records import ReplayGroup
from trl_offpolicy.types import PolicyBatch


@dataclass(frozen=True)
class PaddedGroups:
    """B responses of several groups as tensors; P and T are the longest prompt and completion.

    Args:
        prompt_ids: (B, P), padded on the left.
        prompt_mask: (B, P) bool.
        completion_ids: (B, T), padded on the right.
        attention_mask: (B, T) bool; False = padding.
        completion_mask: (B, T) bool; True = trainable token.
        sampling_per_token_logps: (B, T) float32, NaN on padding.
        old_per_token_logps: (B, T) float32, NaN for responses without them; None if no response has them.
        policy_versions: (B, T) int64; padding repeats the version of the response's last token.
        rewards: (B,) float32.
        group_ids: (B,) int64, 0, 1, ... in the order of the groups.
        kept_ids: the ids that truncated sampling kept at each token of each response, none where that is not known.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    sampling_per_token_logps: Tensor
    old_per_token_logps: Tensor | None
    policy_versions: Tensor
    rewards: Tensor
    group_ids: Tensor
    kept_ids: list[tuple[tuple[int, ...], ...]]


Score = Callable[[PaddedGroups], Tensor]
"""Returns (B, T) log-probs of the completions under the current weights, nats; with gradient if the loss needs it."""


def pad_groups(groups: Sequence[ReplayGroup], *, pad_token_id: int) -> PaddedGroups:
    """Pad the responses of ``groups`` to one length.

    Raises:
        ValueError: ``groups`` is empty.
    """
    if not groups:
        raise ValueError("groups must have at least one group, but got none.")
    rows = [(place, group, one) for place, group in enumerate(groups) for one in group.responses]
    longest = max(len(one.completion_ids) for _, _, one in rows)
    prompt = max(1, *(len(group.prompt_ids) for group in groups))
    lengths = [len(one.completion_ids) for _, _, one in rows]
    attention = torch.arange(longest).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    masks = [one.completion_mask or (True,) * len(one.completion_ids) for _, _, one in rows]
    olds = [one.old_logps or () for _, _, one in rows]
    prompts = [group.prompt_ids for _, group, _ in rows]
    return PaddedGroups(
        prompt_ids=_padded([(pad_token_id,) * (prompt - len(ids)) + ids for ids in prompts], prompt, pad_token_id),
        prompt_mask=torch.tensor([[False] * (prompt - len(ids)) + [True] * len(ids) for ids in prompts]),
        completion_ids=_padded([one.completion_ids for _, _, one in rows], longest, pad_token_id),
        attention_mask=attention,
        completion_mask=_padded(masks, longest, False),
        sampling_per_token_logps=_padded([one.sampling_logps for _, _, one in rows], longest, math.nan),
        old_per_token_logps=_padded(olds, longest, math.nan) if any(olds) else None,
        policy_versions=torch.stack([_extended(one.policy_versions, longest) for _, _, one in rows]),
        rewards=torch.tensor([one.reward for _, _, one in rows], dtype=torch.float32),
        group_ids=torch.tensor([place for place, _, _ in rows]),
        kept_ids=[one.kept_ids or ((),) * len(one.completion_ids) for _, _, one in rows],
    )


def replayed_batch(
    groups: Sequence[ReplayGroup],
    score: Score,
    *,
    current_version: int,
    pad_token_id: int,
    weights: Sequence[float] | None = None,
    advantages: Callable[[PaddedGroups], Tensor] | None = None,
) -> PolicyBatch:
    """The batch that an :class:`~trl_offpolicy.Objective` reads, with log-probs of the current weights.

    ``score`` is called once. Its values are pi and, detached, the proximal policy, which is exact for the first
    optimizer step on the batch. For later steps put new ``per_token_logps`` into it (``dataclasses.replace``). mu and
    the versions are those of the sampling. Weights hold proximal/mu, the whole shift. A stored pi_old is not put into
    the batch (it is in :class:`PaddedGroups`): with it, weights would hold pi_old/mu and nothing would hold
    proximal/pi_old. The advantages are made again from the stored rewards, within the groups.

    Args:
        groups: groups drawn from a :class:`~trl_offpolicy.rollouts.replay.ReplayBuffer`.
        score: a function of type :data:`Score`.
        current_version: weight version of ``score``.
        pad_token_id: id that pads shorter rows.
        weights: one per group, multiplied with its advantages (``ReplaySample.weights``); None = 1.
        advantages: makes (B,) or (B, T) advantages from the padded rows; None = GRPO's, scaled by group.

    Raises:
        ValueError: ``groups`` is empty, the number of weights is wrong, or ``score`` returned another shape.
    """
    rows = pad_groups(groups, pad_token_id=pad_token_id)
    logps = score(rows)
    if logps.shape != rows.completion_ids.shape:
        raise ValueError(f"score must return shape {tuple(rows.completion_ids.shape)}, but got {tuple(logps.shape)}.")
    if weights is not None and len(weights) != len(groups):
        raise ValueError(f"weights must have {len(groups)} entries, one a group, but got {len(weights)}.")
    device = logps.device
    every = torch.ones(len(rows.rewards), dtype=torch.bool)
    found = group_advantages(rows.rewards, rows.group_ids, every) if advantages is None else advantages(rows)
    if weights is not None:
        factor = torch.tensor(list(weights), dtype=torch.float32)[rows.group_ids]
        found = found * (factor if found.dim() == 1 else factor.unsqueeze(1)).to(found.device)
    return PolicyBatch(
        per_token_logps=logps,
        proximal_per_token_logps=logps.detach(),
        sampling_per_token_logps=rows.sampling_per_token_logps.to(device),
        completion_mask=rows.completion_mask.to(device),
        advantages=found.to(device),
        rewards=rows.rewards.to(device),
        group_ids=rows.group_ids.to(device),
        policy_versions=rows.policy_versions.to(device),
        current_version=current_version,
    )


def _padded(rows: Sequence[Sequence[float]], length: int, fill: float) -> Tensor:
    return torch.tensor([[*row, *(fill,) * (length - len(row))] for row in rows])


def _extended(versions: Sequence[int], length: int) -> Tensor:
    return torch.tensor([*versions, *(versions[-1],) * (length - len(versions))])
