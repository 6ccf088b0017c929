"""The size of a routing record: one small integer for each token, layer and chosen expert."""

from __future__ import annotations

import torch
from torch import Tensor

UNKNOWN = -1
"""Replaces every expert id of a token without a record, which then routes freely."""


class RouteStorageError(ValueError):
    """The records of a batch would take more than was allowed."""


def route_dtype(experts: int) -> torch.dtype:
    """int8 up to 128 experts, int16 beyond: the smallest that holds the ids and :data:`UNKNOWN`.

    Example:
        >>> route_dtype(128), route_dtype(256)
        (torch.int8, torch.int16)
    """
    return torch.int8 if experts <= torch.iinfo(torch.int8).max + 1 else torch.int16


def bytes_per_token(*, layers: int, top_k: int, experts: int) -> int:
    """Bytes of one token's record: layers * k * bytes of an id.

    Args:
        layers: number of layers with experts.
        top_k: number of experts that a token is sent to.
        experts: number of experts of a layer.

    Example:
        >>> bytes_per_token(layers=48, top_k=8, experts=128)  # Qwen3-30B-A3B
        384
        >>> bytes_per_token(layers=58, top_k=8, experts=256)  # DeepSeek-V3
        928
    """
    return layers * top_k * route_dtype(experts).itemsize


def check_storage(tokens: int, *, each: int, limit_gib: float) -> None:
    """Raise before the records take more memory than allowed.

    Args:
        tokens: number of tokens of the batch, padding included.
        each: bytes of a token's record.
        limit_gib: GiB (2^30 bytes) allowed.

    Raises:
        RouteStorageError: the records would be larger.
    """
    wanted = tokens * each / 2**30
    if wanted > limit_gib:
        raise RouteStorageError(
            f"routing_replay.limit_gib must be at least {wanted:.3g} for {tokens} tokens of {each} bytes, but got "
            f"{limit_gib:g}. Generate fewer or shorter completions at a time, or raise it."
        )


def check_routes(routes: Tensor, *, experts: int, top_k: int, layers: int, name: str = "routed_experts") -> None:
    """Raise for a record that no model of this shape can have made. Reads the values on the host; call once per batch.

    Args:
        routes: (B, L, layers, k) expert ids; all k of a token and layer, or none, are :data:`UNKNOWN`.
        experts: number of experts of a layer.
        top_k: k.
        layers: number of layers with experts.
        name: name of the argument in the message.

    Raises:
        TypeError: the ids are not integers.
        ValueError: another shape, an id out of range, one expert twice, or a choice that is unknown in part.
    """
    check_shape(routes, top_k=top_k, layers=layers, name=name)
    low, high = (int(routes.min()), int(routes.max())) if routes.numel() else (0, 0)
    if low < UNKNOWN or high >= experts:
        raise ValueError(f"{name} must hold ids from -1 to {experts - 1}, but got {low} to {high}.")
    known = routes >= 0
    if bool((known.any(-1) & ~known.all(-1)).any()):
        raise ValueError(f"{name} must know all {top_k} experts of a token and layer or none, but got a part.")
    ordered = routes.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise ValueError(f"{name} must name each expert of a token and layer once, but got one twice.")


def check_shape(routes: Tensor, *, top_k: int, layers: int, name: str = "routed_experts") -> None:
    """Raise for anything but (B, L, layers, k) signed integers.

    Raises:
        TypeError: the ids are not signed integers.
        ValueError: they have another shape.
    """
    if routes.is_floating_point() or routes.is_complex() or routes.dtype in (torch.bool, torch.uint8):
        raise TypeError(f"{name} must be signed integers (-1 = unknown), but got {routes.dtype}.")
    if routes.dim() != 4 or tuple(routes.shape[2:]) != (layers, top_k):
        raise ValueError(f"{name} must have shape (B, L, {layers}, {top_k}), but got {tuple(routes.shape)}.")
