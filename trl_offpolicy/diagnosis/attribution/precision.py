"""Contexts in which a model computes as if in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.engines.rounding import WeightRounding, parse_rounding, round_weights

SIGNIFICANT_BITS = {"bf16": 8, "fp16": 11, "tf32": 11}


@contextmanager
def rounded_weights(model: Any, rounding: WeightRounding | str) -> Iterator[None]:
    """Round linear weights as :func:`~trl_offpolicy.engines.rounding.round_weights` does; restore them at the end."""
    modules = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    before = {name: module.weight.data for name, module in modules.items()}
    try:
        for name, weight in round_weights(before.items(), parse_rounding(rounding)):
            modules[name].weight.data = weight
        yield
    finally:
        for name, module in modules.items():
            module.weight.data = before[name]


@contextmanager
def rounded_activations(model: Any, bits: int) -> Iterator[None]:
    """A context in which outputs of linear layers, norms and attention are rounded to ``bits`` binary digits.

    8 digits are bfloat16, 11 float16 (its range is not limited here). Sums inside a layer stay float32, as on a GPU.
    """
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: _rounded(output, bits))
        for module in model.modules()
        if isinstance(module, nn.Linear) or "Norm" in type(module).__name__ or "Attention" in type(module).__name__
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def int8_activations(model: Any) -> Iterator[None]:
    """A context in which the inputs of linear layers are rounded to int8, with a scale per token."""

    def rounded(_module: Any, inputs: Any) -> Any:
        scale = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return ((inputs[0] / scale).round() * scale, *inputs[1:])

    linears = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name]
    hooks = [module.register_forward_pre_hook(rounded) for module in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def simulated_dtype(model: Any, name: str) -> Iterator[None]:
    """A context in which weights and activations of a float32 model are rounded as in ``bf16`` or ``fp16``."""
    with rounded_weights(model, name), rounded_activations(model, SIGNIFICANT_BITS[name]):
        yield


def routers(model: Any) -> list[Any]:
    """The modules that choose experts; empty for a dense model."""
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


@contextmanager
def rounded_routers(model: Any, bits: int) -> Iterator[None]:
    """A context in which routers see their input rounded to ``bits`` digits, so some tokens go to other experts."""
    hooks = [
        gate.register_forward_pre_hook(lambda _module, inputs: (round_significant(inputs[0], bits), *inputs[1:]))
        for gate in routers(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(output: Any, bits: int) -> Any:
    if isinstance(output, tuple):
        return (_rounded(output[0], bits), *output[1:])
    return round_significant(output, bits) if isinstance(output, Tensor) else output


def round_significant(values: Tensor, bits: int) -> Tensor:
    """Round float32 to ``bits`` significant binary digits, half away from zero.

    Example:
        >>> round_significant(torch.tensor([1.0, 1.1, -3.3]), 3)
        tensor([ 1.0000,  1.0000, -3.5000])
    """
    cut = 24 - bits
    if cut <= 0:
        return values
    raw = values.float().contiguous().view(torch.int32)
    return ((raw + (1 << (cut - 1))) & ~((1 << cut) - 1)).view(torch.float32).to(values.dtype)
