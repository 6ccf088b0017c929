"""A tensor in a few numbers, so that two processes can compare weights without sending them.

Both sides summarise the same tensor in the same data type. Equal checksums mean equal values, bit for bit. Where they
differ, both sides also read the same few thousand places, from which the size of the difference follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SAMPLE = 4096
"""Number of places that are read of a tensor whose checksums differ."""
_BLOCK = 1 << 14  # elements; small enough for a processor's cache
_BLOCKS_AT_ONCE = 512  # on an accelerator: 64 MiB of integers, four times
_MIX = (-7046029254386353131, -4658895280553007687)  # odd 64-bit constants of splitmix64
_SPREAD = 2654435761  # 2^32 / golden ratio, a prime: multiples of it spread evenly over any other size
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor, *, ordered: bool = True) -> str:
    """A 64-bit checksum of a tensor's values as 16 hexadecimal digits; +0 and -0 count as the same.

    It is a sum of integers, so that every device gives the same one, in every order of summation.

    Args:
        tensor: values of any shape and dtype.
        ordered: False = the places of the values do not matter, nor do zeros: the checksum of a kernel's own layout
            is then that of the matrix that was packed into it.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0))
        (True, False)
        >>> checksum(a, ordered=False) == checksum(torch.tensor([2.0, 0.0, 1.0]), ordered=False)
        True
    """
    return _text(_total(tensor.reshape(-1), ordered=ordered))


def joined(checksums: list[str]) -> str:
    """The unordered checksum of several tensors together, from that of each."""
    return _text(sum(int(one, 16) for one in checksums))


def _text(total: int) -> str:
    return f"{total % 2**64:016x}"


def _total(values: Tensor, *, ordered: bool) -> int:
    """Sum over blocks of (2 block + 1) times the sum over places in a block of (2 place + 1) times the mixed bits."""
    total = 0
    blocks = 1 if values.device.type == "cpu" else _BLOCKS_AT_ONCE
    odd = torch.arange(_BLOCK, device=values.device) * 2 + 1
    for start in range(0, len(values), _BLOCK * blocks):
        part = values[start : start + _BLOCK * blocks]
        part = part + 0 if part.is_floating_point() and part.element_size() > 1 else part  # -0 becomes +0
        mixed = part.view(_BITS[part.element_size()]).to(torch.int64)
        # Zero stays zero, and other patterns are spread over 64 bits, so that sums of different values differ.
        mixed.mul_(_MIX[0]).bitwise_xor_(mixed >> 29).mul_(_MIX[1])
        if not ordered:
            total += int(mixed.sum())
            continue
        mixed = nn.functional.pad(mixed, (0, -len(mixed) % _BLOCK)).view(-1, _BLOCK)
        numbers = torch.arange(len(mixed), device=values.device) + start // _BLOCK
        total += int((mixed.mul_(odd).sum(1) * (2 * numbers + 1)).sum())
    return total


def sample_places(count: int, size: int = SAMPLE) -> Tensor:
    """At most ``size`` different places of a flat tensor with ``count`` elements, spread over it.

    Example:
        >>> sample_places(3).tolist(), len(sample_places(10**6, 100).unique())
        ([0, 1, 2], 100)
    """
    if count <= size:
        return torch.arange(count)
    return torch.arange(size) * _SPREAD % count


@torch.no_grad()
def sample_of(tensor: Tensor, size: int = SAMPLE) -> list[float]:
    """The values at :func:`sample_places`, as floats."""
    flat = tensor.reshape(-1)
    values: list[float] = flat[sample_places(len(flat), size).to(flat.device)].double().tolist()
    return values


@torch.no_grad()
def summarise(tensor: Tensor, *, ordered: bool = True) -> dict[str, Any]:
    """Shape, dtype and checksum of a tensor as plain JSON values."""
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "checksum": checksum(tensor, ordered=ordered),
    }
