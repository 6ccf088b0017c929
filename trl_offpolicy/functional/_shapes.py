"""Checks of tensors at the border of a function. They read sizes and dtypes, and never wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tokens(shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Raise unless every tensor has exactly this ``shape``: (B, T), or any shape for elementwise functions.

    Raises:
        ValueError: the message names the argument.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, but got {tuple(tensor.shape)}.")


def check_mask(**masks: Tensor) -> None:
    """Raise unless every mask is bool: of 0 and 1 in another dtype, ``~`` makes 254 or -2, which count as True.

    Raises:
        TypeError: the message names the argument.
    """
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise TypeError(f"{name} must be a bool tensor, but got {mask.dtype}.")


def check_zero_or_one(**masks: Tensor | None) -> None:
    """Raise unless every mask is bool or holds only 0 and 1; a NaN, for example, would count as True. None passes.

    The values are checked only on the CPU, where this does not wait for a device.

    Raises:
        ValueError: another value; the message names the argument.
        TypeError: a complex tensor.
    """
    for name, mask in masks.items():
        if mask is None or mask.dtype == torch.bool:
            continue
        if mask.is_complex():
            raise TypeError(f"{name} must be a bool or 0/1 tensor, but got {mask.dtype}.")
        if mask.device.type == "cpu":
            strange = mask[(mask != 0) & (mask != 1)]
            if len(strange):
                raise ValueError(f"{name} must be a bool or 0/1 tensor, but got {strange[0].item()}.")


def check_tokens_or_rows(shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Raise unless every tensor is (B, T), which is ``shape``, or (B, 1); None passes.

    A size of 1 always passes, because it broadcasts. The usual mistake is (B,), which torch would read as (1, T).

    Raises:
        ValueError: the message names the argument.
    """
    rows, length = shape
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dim() != 2 or tensor.shape[0] not in (1, rows) or tensor.shape[1] not in (1, length):
            raise ValueError(f"{name} must have shape {(rows, length)} or {(rows, 1)}, but got {tuple(tensor.shape)}.")


def check_rows(count: int, **tensors: Tensor | None) -> None:
    """Raise unless every tensor is (B,) with B = ``count``; None passes.

    Raises:
        ValueError: the message names the argument.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (count,):
            raise ValueError(f"{name} must have shape ({count},), but got {tuple(tensor.shape)}.")


def check_matrix(**tensors: Tensor) -> None:
    """Raise unless every tensor is a matrix (B, T), with which the other arguments can then be compared.

    Raises:
        ValueError: the message names the argument.
    """
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have shape (B, T), but got {tuple(tensor.shape)}.")


def check_broadcast(**tensors: Tensor | None) -> None:
    """Raise unless all tensors broadcast to one (B, T) and none has another number of dimensions; None passes.

    Raises:
        ValueError: the message names the first argument that does not fit those before it.
    """
    rows = length = 1
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_matrix(**{name: tensor})
        if (tensor.shape[0] not in (1, rows) and rows != 1) or (tensor.shape[1] not in (1, length) and length != 1):
            raise ValueError(f"{name} must have shape {(rows, length)} or {(rows, 1)}, but got {tuple(tensor.shape)}.")
        rows = tensor.shape[0] if rows == 1 else rows
        length = tensor.shape[1] if length == 1 else length
