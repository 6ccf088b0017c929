"""Simulated low-precision weights: a cheap, real mismatch between engine and trainer on any machine.

At every sync the engine gets weights that were rounded and widened again. It still computes in its own dtype. What a
kernel of that precision does to activations is not simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trl_offpolicy.parts import parse_settings

_BITS = {"int8": 8, "int4": 4, "int3": 3}
_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TYPES = (*_BITS, "fp8", *_FLOATS)
_UNROUNDED = ("embed", "wte", "wpe", "lm_head")
_FP8_MAX = 448.0
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class WeightRounding:
    """How linear weights are rounded.

    Args:
        type: ``int8``, ``int4`` or ``int3`` (symmetric integers), ``fp8`` (e4m3), ``bf16``, ``fp16``.
        group_size: integers only: number of columns that share a scale; None = a whole row.
        scale: fp8 only: one scale per ``row`` or per ``tensor``; None = ``row``.

    Raises:
        ValueError: an unknown type or scale, or an option that the type does not have.

    Example:
        >>> WeightRounding("int4", group_size=2)(torch.tensor([[7.0, 2.4, 0.7, 0.24]]))
        tensor([[7.0000, 2.0000, 0.7000, 0.2000]])
    """

    type: str
    group_size: int | None = None
    scale: Literal["row", "tensor"] | None = None

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise ValueError(f"type must be one of {list(_TYPES)}, but got {self.type!r}.")
        if self.group_size is not None:
            if self.type not in _BITS:
                raise ValueError(f"group_size must be absent with type {self.type}, but got {self.group_size!r}.")
            if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
                raise ValueError(f"group_size must be a whole number >= 1, but got {self.group_size!r}.")
        if self.scale is not None and self.type != "fp8":
            raise ValueError(f"scale must be absent with type {self.type}, but got {self.scale!r}.")
        if self.scale not in (None, "row", "tensor"):
            raise ValueError(f"scale must be 'row' or 'tensor', but got {self.scale!r}.")

    def __call__(self, weight: Tensor) -> Tensor:
        """The rounded (out, in) matrix, in its own dtype."""
        if self.type in _BITS:
            return round_integer(weight, bits=_BITS[self.type], group_size=self.group_size)
        if self.type == "fp8":
            return round_fp8(weight, scale=self.scale or "row")
        return weight.to(_FLOATS[self.type]).to(weight.dtype)


def round_integer(weight: Tensor, *, bits: int, group_size: int | None = None) -> Tensor:
    """Round a (out, in) matrix to symmetric integers and back: ``s * round(w / s)``, ``s = max|w| / (2^(bits-1) - 1)``.

    The maximum is that of a row, or of ``group_size`` neighbours in a row. The largest error is half a step, s / 2.

    Raises:
        ValueError: ``group_size`` does not divide the number of columns.

    Example:
        >>> round_integer(torch.tensor([[127.0, 0.4, -63.6]]), bits=8)
        tensor([[127.,   0., -64.]])
    """
    if group_size is not None and weight.shape[1] % group_size:
        raise ValueError(f"group_size must divide the {weight.shape[1]} columns of a weight, but got {group_size}.")
    groups = weight.float().reshape(len(weight), -1, group_size or weight.shape[1])
    step = groups.abs().amax(dim=-1, keepdim=True).clamp(min=_TINY) / (2 ** (bits - 1) - 1)
    rounded: Tensor = (groups / step).round().mul_(step)
    return rounded.reshape(weight.shape).to(weight.dtype)


def round_fp8(weight: Tensor, *, scale: Literal["row", "tensor"] = "row") -> Tensor:
    """Round a (out, in) matrix to 8-bit floats (e4m3) and back: ``s * e4m3(w / s)``, ``s = max|w| / 448``.

    The maximum is that of a row, or of the whole matrix. The error is at most |w| / 17, and s / 1024 next to zero.

    Example:
        >>> round_fp8(torch.tensor([[448.0, 100.0, 1.06]]))
        tensor([[448.,  96.,   1.]])
    """
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True) if scale == "row" else wide.abs().amax()
    step = largest.clamp(min=_TINY) / _FP8_MAX
    rounded = (wide / step).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return rounded.float().mul_(step).to(weight.dtype)


def parse_rounding(spec: Any, *, where: str = "engine.weight_rounding") -> WeightRounding:
    """A rounding from a name, ``int4``, or a mapping, ``{type: int4, group_size: 32}``.

    Raises:
        ValueError: a wrong value; the message names the field.

    Example:
        >>> parse_rounding({"type": "fp8", "scale": "tensor"})
        WeightRounding(type='fp8', group_size=None, scale='tensor')
    """
    rounding: WeightRounding = parse_settings(spec, WeightRounding, where=where, short="type", choices=_TYPES)
    return rounding


def round_weights(weights: Iterable[tuple[str, Tensor]], rounding: Any = "int8") -> Iterator[tuple[str, Tensor]]:
    """Round every linear weight of a named stream; embeddings, the head, norms and biases stay as they are.

    Args:
        weights: names and tensors.
        rounding: anything that :func:`parse_rounding` takes.

    Raises:
        ValueError: a wrong value, or a group size that does not fit a weight; the message names the field or weight.
    """
    return _rounded(weights, parse_rounding(rounding))


def is_rounded(name: str) -> bool:
    """Whether a matrix of this name is rounded: all but embeddings and the head.

    Example:
        >>> is_rounded("model.layers.0.mlp.up_proj.weight"), is_rounded("lm_head.weight")
        (True, False)
    """
    return not any(part in name for part in _UNROUNDED)


def _rounded(weights: Iterable[tuple[str, Tensor]], rounding: WeightRounding) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        if weight.dim() != 2 or not is_rounded(name):
            yield name, weight
            continue
        try:
            rounded = rounding(weight)
        except ValueError as error:
            raise ValueError(f"engine.weight_rounding does not fit {name}: {error}") from None
        yield name, rounded
