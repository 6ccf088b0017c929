"""Sums by version lag: how many weight versions lie between the policy that sampled a token and the current one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_LAGS = 9
"""Lags below this have a row of their own; the others share one."""
LAG_NAMES = (*map(str, range(MOST_LAGS)), f"{MOST_LAGS}_or_more")


def sums_by_lag(columns: Sequence[Tensor], lags: Tensor) -> Tensor:
    """(len(LAG_NAMES), K) float64: the sum of each of the K columns over the entries of every lag.

    Args:
        columns: numbers of the shape of ``lags``, 0 where an entry does not count.
        lags: integer lags, (B,) or (B, T); below 0 counts as 0.

    Example:
        >>> sums_by_lag([torch.tensor([1.0, 2.0, 4.0])], torch.tensor([0, 1, 0]))[:2]
        tensor([[5.],
                [2.]], dtype=torch.float64)
    """
    # Rows are summed in float32 first, as everywhere (seven times as quick on a CPU as float64 sums of single tokens).
    index = lags.long().clamp(0, MOST_LAGS).unsqueeze(-1) if lags.dim() == 1 else lags.long().clamp(0, MOST_LAGS)
    empty = torch.zeros(len(index), len(LAG_NAMES), device=lags.device)
    by_row = [empty.scatter_add(1, index, column.reshape(index.shape).float()) for column in columns]
    return torch.stack(by_row, dim=-1).double().sum(0)
