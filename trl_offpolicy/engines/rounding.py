"""Simulated low-precision weights: a cheap, real mismatch between engine and trainer on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["int8"]
_UNROUNDED = ("embed_tokens", "lm_head")


def round_int8(weight: Tensor) -> Tensor:
    """Round a (out, in) matrix to symmetric 8-bit integers with one scale a row, and back to its dtype.

    The largest error is half a step, ``max|row| / 254``.

    Example:
        >>> round_int8(torch.tensor([[127.0, 0.4, -63.6]]))
        tensor([[127.,   0., -64.]])
    """
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scale).round().mul_(scale).to(weight.dtype)


def round_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Round every linear weight of a named stream; embeddings, the head, norms and biases stay as they are."""
    for name, weight in weights:
        linear = weight.dim() == 2 and not any(part in name for part in _UNROUNDED)
        yield name, round_int8(weight) if linear else weight
