"""What makes the passes over (B, T) quick on a CPU: blocks of rows, and boolean masks that are read as bytes.

Neither changes a number. In a graph of torch.compile the plain operation is the quick one, because it is fused, so
every function here falls back to it there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_TOKENS = {"cpu": 1 << 15}
"""Tokens per block, by device type; measured with ``benchmarks/correction_cost.py``."""
_ACCELERATOR_TOKENS = 1 << 23


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Slices of rows that cover (B, T), so that the intermediate tensors of a pass stay in the cache.

    Each slice holds at least one row. A batch without rows gives one empty slice. torch.compile gets all rows at once.

    Example:
        >>> list(row_blocks(torch.Size([3, 100_000]), torch.device("cpu")))
        [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    rows, length = shape
    step = max(BLOCK_TOKENS.get(device.type, _ACCELERATOR_TOKENS) // max(length, 1), 1)
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


# torch's kernels on bool are several times slower on a CPU than those on uint8, and a view costs nothing.


def as_float(mask: Tensor) -> Tensor:
    """The mask as 0.0 and 1.0 in float32. Multiply only finite values by it, because 0 * NaN is NaN."""
    return (mask if torch.compiler.is_compiling() else mask.view(torch.uint8)).float()


def count_true(mask: Tensor) -> Tensor:
    """Number of True entries of each row, (B,) float32, exact up to 2^24. Works in blocks: the mask is never cast."""
    if mask.shape[-1] == 1:
        return as_float(mask).squeeze(-1)
    return torch.cat([as_float(mask[block]).sum(-1) for block in row_blocks(mask.shape, mask.device)])


def any_true(mask: Tensor, *, keepdim: bool = False) -> Tensor:
    """True for the rows that have a True entry, (B,) or (B, 1) bool."""
    if torch.compiler.is_compiling():
        return mask.any(-1, keepdim=keepdim)
    return mask.view(torch.uint8).amax(-1, keepdim=keepdim).view(torch.bool)


def both(left: Tensor, right: Tensor) -> Tensor:
    """``left & right``, quick also where one of them is (B, 1)."""
    if torch.compiler.is_compiling():
        return left & right
    return (left.view(torch.uint8) * right.view(torch.uint8)).view(torch.bool)
