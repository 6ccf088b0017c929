"""Counts completions of a group that are equal, and tells chance from ranks or requests that draw the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.functional.collective import gather_rows, own_rows
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.rollouts.batches import old_where_known, trainable
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.types import PolicyBatch

DUPLICATE_METRICS = ("distinct_fraction", "copied_fraction")
IMPROBABLE = math.log(1e-4)
"""A completion of at most this log-prob (nats) is hardly ever drawn twice: in a group of n once in 10^4 / n."""

_MULTIPLIER = 6364136223846793005  # odd, so that its powers modulo 2^64 stay different (Knuth's MMIX generator)
_OF_GROUP = 0x2545F4914F6CDD1D  # another odd number (of xorshift*), for the number of the group
_TWINS = "has_twin"  # a field of a generation batch: (B,) bool, another completion of the group is equal
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
    stats, twins = _compared(completion_keys(ids, mask), mask.any(-1), group_size=group_size, gather=True)
    return stats if sampling_logps is None else stats.union(copied_stats(twins, mask, sampling_logps))


def duplicate_stats_here(ids: Tensor, mask: Tensor, sampling_logps: Tensor, group_ids: Tensor) -> Stats:
    """The same of the rows of this rank alone, whose groups may be of any size and in any order.

    Copies in another micro-batch or on another rank are not seen, so both numbers are bounds: there are at most as many
    different completions, and at least as many copies.

    Args:
        ids: (B, T) completion ids.
        mask: (B, T) bool, tokens that were sampled.
        sampling_logps: (B, T) log-probs of the engine in nats.
        group_ids: (B,) integer, equal for completions of one prompt.
    """
    keys = completion_keys(ids, mask) + group_ids.to(torch.int64) * _OF_GROUP
    stats, twins = _compared(keys, mask.any(-1), group_size=len(ids), gather=False)
    return stats.union(copied_stats(twins, mask, sampling_logps))


def marked_duplicates(rows: dict[str, Any], *, group_size: int, drawn_as_scored: bool) -> Stats:
    """:func:`duplicate_stats` of a generation batch that may be without log-probs of an engine. All ranks call it.

    If the trainer's own model sampled, its log-probs are those of the sampler. They are known in the loss step only,
    so the rows are marked here, and :func:`late_copies` counts there.

    Args:
        rows: a generation batch under TRL's names; it may get the mark.
        group_size: completions per prompt.
        drawn_as_scored: True if the trainer's model sampled from the distribution that the trainer scores. Otherwise,
            and without an engine's log-probs, it is not known what is copied.
    """
    ids, mask, sampled = rows["completion_ids"], trainable(rows), rows.get("sampling_per_token_logps")
    if sampled is not None or not drawn_as_scored:
        return duplicate_stats(ids, mask, sampled, group_size=group_size)
    stats, rows[_TWINS] = _compared(completion_keys(ids, mask), mask.any(-1), group_size=group_size, gather=True)
    return stats


def late_copies(rows: dict[str, Any], batch: PolicyBatch) -> Stats:
    """``rollout/copied_fraction`` of a marked micro-batch, by the trainer's log-probs; empty if there is no mark.

    Args:
        rows: the micro-batch; the mark is taken off, so that a later pass over these rows does not count them again.
        batch: its log-probs. A row that older weights sampled counts only if their log-probs are known.
    """
    twins = rows.pop(_TWINS, None)
    return Stats({}) if twins is None else copied_stats(twins, batch.mask, old_where_known(batch))


def draws_as_scored(options: Mapping[str, Any]) -> bool:
    """True if transformers' ``generate`` draws from the trainer's distribution at the sampling temperature.

    A cut to the likeliest tokens and a greedy choice are allowed: the first is the trainer's to mirror, the second is
    a fault to find.

    Args:
        options: ``repetition_penalty`` and ``generation_kwargs``, as in a ``GRPOConfig``; either may be absent.
    """
    chosen = {"repetition_penalty": options.get("repetition_penalty"), **(options.get("generation_kwargs") or {})}
    penalty = chosen.pop("repetition_penalty")
    return penalty in (None, 1.0) and not set(chosen) - {"top_p", "top_k", "min_p", "do_sample"}


@torch.no_grad()
def copied_stats(twins: Tensor, mask: Tensor, logps: Tensor) -> Stats:
    """``rollout/copied_fraction``, from the rows of this rank.

    Args:
        twins: (B,) bool, another completion of the group is equal.
        mask: (B, T) bool, tokens that were sampled.
        logps: (B, T) log-probs in nats of the policy that sampled; a row with NaN does not count.
    """
    improbable = mask.any(-1) & (torch.where(mask, logps.float(), 0.0).sum(-1) <= IMPROBABLE)
    copied = moments(_COPIED, [improbable.sum(), (improbable & twins).sum()])
    return Stats({"rollout#copied": Group(copied, {"copied_fraction": fraction("copied", "improbable")}, sparse=True)})


def _compared(keys: Tensor, some: Tensor, *, group_size: int, gather: bool) -> tuple[Stats, Tensor]:
    """``rollout/distinct_fraction``, and (B,) bool: another completion of the group of this rank's row is equal.

    Args:
        keys: (B,) int64 hashes of the completions of this rank.
        some: (B,) bool, rows that have a token.
        group_size: rows of a group, which are neighbours.
        gather: whether the groups may lie on several ranks.
    """
    both = torch.stack([keys, some.to(keys.dtype)], dim=1)
    all_keys, any_token = (gather_rows(both) if gather else both).unbind(1)
    keyed, counted = all_keys.view(-1, group_size), any_token.bool().view(-1, group_size)
    equal = keyed.unsqueeze(-1) == keyed.unsqueeze(-2)  # (G, n, n)
    first = counted & ~equal.tril(-1).any(-1)  # no earlier completion of the group equals it
    distinct = moments(_DISTINCT, [counted.sum(), first.sum()])
    twins = (equal.sum(-1) > 1).flatten()
    stats = Stats({"rollout#distinct": Group(distinct, {"distinct_fraction": fraction("distinct", "completions")})})
    return stats, own_rows(twins) if gather else twins
