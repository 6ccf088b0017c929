"""Collectives over the ranks: plain tensors in, plain tensors out. Without torch.distributed they change nothing.

They serve the terms and normalisers whose declared scope is ``group`` or ``generation_batch``. Every rank must make the
same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_distributed() -> bool:
    """True inside an initialised process group of more than one rank."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def sum_ranks(values: Tensor) -> Tensor:
    """Sum over ranks; the input is not changed."""
    if not is_distributed():
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


def gather_rows(values: Tensor) -> Tensor:
    """Rows of all ranks in rank order; every rank has the same number of rows.

    Args:
        values: (B, ...) of one shape on all ranks.
    """
    if not is_distributed():
        return values
    if values.dtype == torch.bool:  # as bytes: where inductor writes AVX-512, it takes gathered booleans for int64
        return gather_rows(values.to(torch.uint8)) != 0
    parts = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def own_rows(rows: Tensor) -> Tensor:
    """The rows of this rank in what :func:`gather_rows` returned.

    Args:
        rows: (world * B, ...), the rows of all ranks in rank order.
    """
    if not is_distributed():
        return rows
    return rows.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


def gather_flat(values: Tensor, *, padding: float) -> Tensor:
    """Entries of all ranks as one vector; ranks may hold different numbers, ``padding`` fills the gaps.

    Waits for the device, because the longest vector sets the size. Call it once per generation, not at every step.
    """
    return gather_padded(values.flatten().unsqueeze(0), padding=padding).flatten()


def gather_padded(values: Tensor, *, padding: float) -> Tensor:
    """Rows (B, T) of all ranks in rank order; T may differ, ``padding`` fills short rows up to the longest T.

    Waits for the device like :func:`gather_flat`; every rank has the same number of rows.
    """
    if not is_distributed():
        return values
    length = torch.tensor(values.shape[1], device=values.device)
    torch.distributed.all_reduce(length, op=torch.distributed.ReduceOp.MAX)
    return gather_rows(torch.nn.functional.pad(values, (0, int(length) - values.shape[1]), value=padding))


def gather_objects(value: Any) -> list[Any]:
    """One picklable object of each rank, in rank order. Also a barrier: no rank goes on before all have called it."""
    if not is_distributed():
        return [value]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def broadcast_object(value: Any) -> Any:
    """Rank 0's picklable object, on every rank. What the others give is ignored."""
    if not is_distributed():
        return value
    sent = [value]
    torch.distributed.broadcast_object_list(sent, src=0)
    return sent[0]


def exchange_objects(sent: Sequence[Any]) -> list[Any]:
    """The picklable objects that the ranks have for this one, in rank order.

    Args:
        sent: this rank's object for each rank. On its way each takes as much room as the largest.
    """
    if not is_distributed():
        return list(sent)
    here, received = torch.distributed.get_rank(), [None] * len(sent)
    for rank, value in enumerate(sent):
        torch.distributed.gather_object(value, received if rank == here else None, dst=rank)
    return received


def scattered(parts: Sequence[Any]) -> Any:
    """This rank's object out of the main rank's list, which has one per rank. All ranks call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return parts[0]
    received: list[Any] = [None]
    torch.distributed.scatter_object_list(received, list(parts) or None, src=0)
    return received[0]
