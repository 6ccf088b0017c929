"""Aggregation of a per-token quantity to the level on which a decision is taken."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_choice
from trl_offpolicy.functional._fast import any_true, count_true
from trl_offpolicy.functional._shapes import check_mask, check_rows, check_tokens
from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.functional.groups import group_members, member_sums
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, exp_of

Level = Literal[
    "token", "turn", "turn_mean", "prefix", "sequence", "sequence_mean", "sequence_max", "sequence_min", "group"
]
LEVELS: tuple[Level, ...] = get_args(Level)
"""token: each token alone. turn, turn_mean: sum or mean over the token's turn. prefix: sum up to and with the token.
sequence: the sum (for log-ratios: the product of ratios). sequence_mean: the mean over trainable tokens (the geometric
mean, which does not scale with length). sequence_max, sequence_min: the largest, the smallest. group: the mean over the
sequences of a prompt group of their sequence_mean."""

TOKEN_LEVELS: tuple[Level, ...] = ("token", "turn", "turn_mean", "prefix")
"""Levels whose value differs from token to token: shape (B, T). All others are (B, 1)."""


def aggregate(
    values: Tensor,
    mask: Tensor,
    level: Level,
    *,
    turn_ids: Tensor | None = None,
    group_ids: Tensor | None = None,
    zero_outside: bool = False,
) -> Tensor:
    """Aggregate (B, T) ``values`` over the True tokens of ``mask``.

        token           x_t                       turn       sum of x over t's turn
        prefix          sum_{s <= t} x_s          turn_mean  its mean
        sequence        sum_s x_s                 group      mean of the sequence means of a prompt group
        sequence_mean   sum_s x_s / n             sequence_max, sequence_min

    where s runs over the n True tokens of t's row.

    Args:
        values: (B, T) float32; may hold anything, NaN included, where ``mask`` is False.
        mask: (B, T) bool.
        level: see :data:`LEVELS`.
        turn_ids: (B, T) integer, for the turn levels; None = every run of trainable tokens is a turn.
        group_ids: (B,) integer, for ``group``, which reads all ranks.
        zero_outside: ``values`` are already 0 outside ``mask``. This saves a pass; ``token`` returns them unchanged.

    Returns:
        (B, T) for the token levels (0 outside ``mask``), else (B, 1); an empty row gives 0.

    Raises:
        ValueError: an unknown level, or ``group`` without ``group_ids``.

    Example:
        >>> aggregate(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]), "sequence_mean")
        tensor([[2.]])
    """
    check_choice("level", level, LEVELS)
    check_mask(mask=mask)
    check_tokens(mask.shape, values=values, turn_ids=turn_ids)
    check_rows(len(mask), group_ids=group_ids)
    inside = values if zero_outside else torch.where(mask, values, 0.0)
    if level == "token":
        return inside
    if level == "prefix":
        return torch.where(mask, inside.cumsum(-1), 0.0)
    if level in ("turn", "turn_mean"):
        return _over_turns(inside, mask, turn_index(mask, turn_ids), mean=level == "turn_mean")
    if level in ("sequence_max", "sequence_min"):
        return _extreme(values, mask, largest=level == "sequence_max")
    total = inside.sum(dim=-1, keepdim=True)
    if level == "sequence":
        return total
    mean = total / count_true(mask).unsqueeze(-1).clamp(min=1)
    if level == "sequence_mean":
        return mean
    if group_ids is None:
        raise ValueError("group_ids must be given for level 'group', but got None.")
    return group_mean(mean.squeeze(-1), any_true(mask), group_ids).unsqueeze(-1)


def aggregate_ratio(
    log_ratios: Tensor,
    mask: Tensor,
    level: Level,
    *,
    turn_ids: Tensor | None = None,
    group_ids: Tensor | None = None,
    zero_outside: bool = False,
) -> Tensor:
    """Ratio at ``level``: aggregated in log space, then clamped to +-20 nats, then exponentiated.

        rho = exp(clip(aggregate(l), -20, 20))

    where l are the log-ratios. So ``sequence`` gives the product of a row's ratios, ``sequence_mean`` their geometric
    mean.

    Arguments and shapes are those of :func:`aggregate`. An empty row and a masked token give 1.
    """
    total = aggregate(log_ratios, mask, level, turn_ids=turn_ids, group_ids=group_ids, zero_outside=zero_outside)
    held = total.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return exp_of(held) if torch.compiler.is_compiling() else held.exp_()


def turn_index(mask: Tensor, turn_ids: Tensor | None = None) -> Tensor:
    """0-based number of each token's turn within its row, (B, T) int64.

    A turn is a run of neighbouring positions with one id in ``turn_ids``; without ids, a run of trainable tokens
    (tool output between two assistant turns is not trainable). Positions outside ``mask`` hold some valid number.

    Example:
        >>> turn_index(torch.tensor([[False, True, True, False, True]]))
        tensor([[0, 0, 0, 0, 1]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, turn_ids=turn_ids)
    if turn_ids is None:
        # A turn starts at a trainable token whose left neighbour is none. Counting the starts numbers the turns.
        starts = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
        return (starts.cumsum(-1) - 1).clamp(min=0)
    changes = turn_ids[:, 1:] != turn_ids[:, :-1]
    return torch.nn.functional.pad(changes, (1, 0)).cumsum(-1)


def _over_turns(inside: Tensor, mask: Tensor, index: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean over each token's turn, (B, T): every token of a turn holds the same value."""
    # Add every token up at the place of its turn's number (a row has at most T turns), then look the sums up again.
    total = torch.zeros_like(inside).scatter_add_(1, index, inside)
    if mean:
        count = torch.zeros_like(inside).scatter_add_(1, index, mask.to(inside.dtype))
        total = total / count.clamp(min=1.0)
    return torch.where(mask, total.gather(1, index), 0.0)


def _extreme(values: Tensor, mask: Tensor, *, largest: bool) -> Tensor:
    fill = -torch.inf if largest else torch.inf
    inside = torch.where(mask, values, fill)
    top = inside.amax(-1, keepdim=True) if largest else inside.amin(-1, keepdim=True)
    return torch.where(any_true(mask, keepdim=True), top, 0.0)


def group_mean(values: Tensor, active: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of ``values`` over the active rows of each row's group, on all ranks.

        sum_j x_j / n

    where j runs over the n active rows with the same group id as the row. A group without active rows gives 0.

    Args:
        values: (B,) float.
        active: (B,) bool, rows that count.
        group_ids: (B,) integer; equal ids on different ranks are one group.

    Returns:
        (B,) of the dtype of ``values``.
    """
    check_mask(active=active)
    check_rows(len(values), values=values, active=active, group_ids=group_ids)
    member = group_members(group_ids, active, across_ranks=True)
    total = member_sums(gather_rows(torch.where(active, values, 0.0)).double(), member)
    return (total / member.sum(-1).clamp(min=1)).to(values.dtype)
