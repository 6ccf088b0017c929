"""Row blocks: intermediate tensors of a pass stay in the cache, and small beside the batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_TOKENS = {"cpu": 1 << 15}
"""Tokens a block, by device type; measured with ``benchmarks/correction_cost.py``."""
_ACCELERATOR_TOKENS = 1 << 23


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Slices of rows that cover (B, T); at least one row each, one empty slice for no rows.

    One slice in a graph of torch.compile, which fuses the pass and holds nothing in between.

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
