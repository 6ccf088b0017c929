"""Which rows belong to the same prompt."""

from __future__ import annotations

from torch import Tensor

from trl_offpolicy.functional.collective import gather_rows


def group_members(group_ids: Tensor, counted: Tensor, *, across_ranks: bool) -> Tensor:
    """The counted rows that share the group of each row; a matrix, so that nothing waits for the device.

    Args:
        group_ids: (B,) integer; equal ids on different ranks are one group.
        counted: (B,) bool, rows that may be members.
        across_ranks: look at the N rows of all ranks (every rank must make the call), else at these B.

    Returns:
        (B, N) or (B, B) bool.
    """
    ids, present = (gather_rows(group_ids), gather_rows(counted)) if across_ranks else (group_ids, counted)
    return (group_ids.unsqueeze(1) == ids.unsqueeze(0)) & present.unsqueeze(0)
