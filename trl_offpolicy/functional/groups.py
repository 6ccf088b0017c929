"""Which rows belong to the same prompt."""

from __future__ import annotations

from torch import Tensor

from trl_offpolicy.functional._shapes import check_rows
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
    check_rows(len(group_ids), group_ids=group_ids, counted=counted)
    ids, present = group_ids, counted
    if across_ranks:
        ids, present = gather_rows(ids), gather_rows(present)
    return (group_ids.unsqueeze(1) == ids.unsqueeze(0)) & present.unsqueeze(0)
