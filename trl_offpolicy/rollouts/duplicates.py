"""Counts completions of a group that are equal, and tells chance from ranks or requests that draw the same numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group, Stats

DUPLICATE_METRICS = ("distinct_fraction", "copied_fraction")
IMPROBABLE = math.log(1e-4)
"""A completion of at most this log-prob (nats) is hardly ever drawn twice: in a group of n once in 10^4 / n."""

_MULTIPLIER = 6364136223846793005  # odd, so that its powers modulo 2^64 stay different (Knuth's MMIX generator)
_DISTINCT = Layout(sums=("completions", "distinct"))
_COPIED = Layout(sums=("improbable", "copied"))


def completion_keys(ids: Tensor, mask: Tensor) -> Tensor:
    """(B,) int64: a hash of each row's token ids, equal for equal completions whatever their padding.

    Args:
        ids: (B, T) token ids.
        mask: (B, T) bool, the tokens that count.
    """
    powers = torch.full((ids.shape[1],), _MULTIPLIER, dtype=torch.int64, device=ids.device).cumprod(0)
    return torch.where(mask, (ids.to(torch.int64) + 1) * powers, 0).sum(-1)


@torch.no_grad()
def duplicate_stats(ids: Tensor, mask: Tensor, sampling_logps: Tensor | None, *, group_size: int) -> Stats:
    """``rollout/distinct_fraction`` and ``rollout/copied_fraction`` of a generation batch. All ranks call it.

    A short answer that the policy is sure of comes up several times by chance. One to which the engine gave a
    probability of at most 1e-4 does not: of these, the copied ones equal another completion of their group. Rows
    without a token (``mask_truncated_completions``) do not count.

    Args:
        ids: (B, T) completion ids of this rank. The rows of all ranks, in rank order, are groups of ``group_size``.
        mask: (B, T) bool, tokens that were sampled.
        sampling_logps: (B, T) log-probs of the engine in nats; without them nothing is called copied.
        group_size: completions per prompt.
    """
    keys = gather_rows(completion_keys(ids, mask)).view(-1, group_size)
    some = gather_rows(mask.any(-1)).view(-1, group_size)
    equal = keys.unsqueeze(-1) == keys.unsqueeze(-2)  # (G, n, n)
    first = some & ~equal.tril(-1).any(-1)  # no earlier completion of the group equals it
    count = some.sum()
    distinct = moments(_DISTINCT, [count, first.sum()])
    groups = {"rollout#distinct": Group(distinct, {"distinct_fraction": fraction("distinct", "completions")})}
    if sampling_logps is not None:
        own = torch.where(mask, sampling_logps.float(), 0.0).sum(-1)
        improbable = some & (gather_rows(own) <= IMPROBABLE).view(-1, group_size)
        copied = moments(_COPIED, [improbable.sum(), ((equal.sum(-1) > 1) & improbable).sum()])
        finalizers = {"copied_fraction": fraction("copied", "improbable")}
        groups["rollout#copied"] = Group(copied, finalizers, sparse=True)
    return Stats(groups)
