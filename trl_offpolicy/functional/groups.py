"""Which rows belong to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask, check_rows
from trl_offpolicy.functional.collective import gather_rows


def group_members(group_ids: Tensor, counted: Tensor, *, across_ranks: bool) -> Tensor:
    """The counted rows that share the group of each row; a matrix, so that nothing waits for the device.

    Args:
        group_ids: (B,) integer; equal ids on different ranks are one group.
        counted: (B,) bool, rows that may be members.
        across_ranks: look at the N rows of all ranks (then every rank must make the call), else at these B rows.

    Returns:
        (B, N) or (B, B) bool.
    """
    check_mask(counted=counted)
    check_rows(len(group_ids), group_ids=group_ids, counted=counted)
    ids, present = group_ids, counted
    if across_ranks:
        ids, present = gather_rows(ids), gather_rows(present)
    return (group_ids.unsqueeze(1) == ids.unsqueeze(0)) & present.unsqueeze(0)


def member_sums(values: Tensor, member: Tensor) -> Tensor:
    """Sum of the values of each row's members, (B,).

    A number that is not finite stays in its group: in a matrix product 0 * NaN would reach all others.

    Args:
        values: (N,) float.
        member: (B, N) bool, from :func:`group_members`.
    """
    return torch.where(member, values, 0.0).sum(-1)
