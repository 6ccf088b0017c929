"""A quantile of any number of values; ``torch.quantile`` refuses more than 2^24."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_offpolicy.checks import check_within

TORCH_LIMIT = 2**24
"""Most values that ``torch.quantile`` takes: above it, float32 does not hold every whole number."""


def quantile(values: Tensor, q: float) -> Tensor:
    """The value below which the share ``q`` of all values lies; between two of them it interpolates linearly.

        (1 - w) v_k + w v_{k+1},   k = floor(q (N - 1)),   w = q (N - 1) - k

    where v_0 <= v_1 <= ... are the sorted values. Up to 2^24 values it is the result of ``torch.quantile``, to the bit.

    Args:
        values: (N,) float32 or float64, N >= 1.
        q: in [0, 1].

    Returns:
        () of the dtype of ``values``; NaN if one of them is NaN.

    Raises:
        ValueError: ``values`` is no vector or has no entry, or ``q`` is out of range.

    Example:
        >>> quantile(torch.tensor([4.0, 1.0, 2.0]), 0.25)
        tensor(1.5000)
    """
    if values.dim() != 1 or not len(values):
        raise ValueError(f"values must be a vector with at least one entry, but got shape {tuple(values.shape)}.")
    check_within("q", q, 0.0, 1.0)
    # torch.quantile computes the rank in the dtype of the values; above its limit, float32 would be off by whole ranks.
    dtype = values.dtype if len(values) <= TORCH_LIMIT else torch.float64
    rank = float(torch.tensor(q, dtype=dtype) * (len(values) - 1))
    below = math.floor(rank)
    ordered = values.sort().values  # kthvalue needs less, but is refused on a GPU with deterministic algorithms
    # NaN is sorted as the largest value, so a low rank would hide it
    return torch.where(ordered[-1].isnan(), torch.nan, ordered[below].lerp(ordered[math.ceil(rank)], rank - below))
