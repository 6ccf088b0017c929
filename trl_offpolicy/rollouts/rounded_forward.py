"""The learner's forward in the engine's precision: its linear weights are rounded as the engine's are.

What is left between the two is what kernels differ by. The weights that learn stay whole: gradients pass straight
through the rounding (Gu et al. 2026, QaRL, arXiv:2604.07853, training forward aligned with the quantised rollout).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trl_offpolicy.engines.rounding import WeightRounding, is_rounded, parse_rounding
from trl_offpolicy.rollouts.model_parts import innermost

OF_ENGINE = "engine"
"""The value that takes the engine's ``weight_rounding``."""


def parse_learner_rounding(spec: Any, engine: Mapping[str, Any] | None) -> WeightRounding | None:
    """The learner's rounding.

    Args:
        spec: None = none; ``engine`` = that of ``engine.weight_rounding``; else what
            :func:`~trl_offpolicy.engines.rounding.parse_rounding` takes.
        engine: options of the engine.

    Raises:
        ValueError: a wrong value, or an engine that has no ``weight_rounding``; the message names the field.

    Example:
        >>> parse_learner_rounding("engine", {"weight_rounding": "int4"})
        WeightRounding(type='int4', group_size=None, scale=None)
    """
    if spec is None:
        return None
    if spec != OF_ENGINE:
        return parse_rounding(spec, where="learner_rounding")
    of_engine = (engine or {}).get("weight_rounding")
    if of_engine is None:
        raise ValueError(
            "engine.weight_rounding must be given with learner_rounding 'engine', but it is absent. Name the rounding "
            "itself (e.g. learner_rounding: fp8) for an engine with quantised kernels of its own."
        )
    return parse_rounding(of_engine)


def round_forward(model: nn.Module, rounding: WeightRounding) -> int:
    """Let each linear layer of ``model`` compute with its rounded weight, from now on.

    Names, values and gradients of the parameters stay as they are; the gradient is that of the rounded weight. A layer
    with LoRA computes with the rounded sum of its weight and its adapter, as an engine does that gets them merged.
    Embeddings and the head are not rounded, as in the engine.

    Args:
        model: whole or sharded; wrapped by nothing but PEFT.
        rounding: how.

    Returns:
        The number of layers that round.

    Raises:
        ValueError: a weight that the engine rounds is not one of a linear layer, or has dropout or a kind of adapter
            that cannot be merged in the forward; the message names it.
    """
    layers = _checked_layers(model, rounding, where="learner_rounding")
    for layer in layers:
        layer.weight_rounding = rounding
        # a method, so that a copy of the layer computes with its own weights
        layer.forward = MethodType(_linear_with_lora if hasattr(layer, "get_base_layer") else _linear, layer)
    return len(layers)


@contextmanager
def rounded_while_fixed(model: nn.Module, rounding: WeightRounding) -> Iterator[None]:
    """A context in which linear layers compute with the rounded weights that they have at its start.

    As :func:`round_forward`, for many forwards of weights that do not change and without gradient: they are rounded
    once, which takes a second copy of them. What the layers computed with before comes back at the end.

    Args:
        model: whole (its parameters are not sharded); wrapped by nothing but PEFT.
        rounding: how.

    Raises:
        ValueError: as :func:`round_forward`; the message names ``engine.weight_rounding``.
    """
    layers = _checked_layers(model, rounding, where="engine.weight_rounding")
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
            with torch.no_grad():
                fixed = rounding(_merged(layer))
            layer.forward = partial(_linear_of, fixed, base.bias)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _linear_of(weight: Tensor, bias: Tensor | None, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.linear(x, weight, bias)


def _checked_layers(model: nn.Module, rounding: WeightRounding, *, where: str) -> list[Any]:
    """The linear layers that round.

    Raises:
        ValueError: the rounding does not fit one of them, or they are not all that is rounded.
    """
    layers = dict(_layers(model))
    _check_whole(model, layers, rounding, where=where)
    for name, layer in layers.items():
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        columns = base.in_features
        if rounding.group_size is not None and columns % rounding.group_size:
            raise ValueError(
                f"{where}.group_size must divide the {columns} columns of {name}, but got {rounding.group_size}."
            )
        if base is not layer:
            _check_adapter(name, layer, where=where)
    return list(layers.values())


def round_learner(spec: Any, engine: Any, *models: Any) -> None:
    """:func:`round_forward` of the policy and its reference as configured; None among ``models`` is left out.

    The reference of a KL term is rounded as well, so that the term is 0 at the start.
    """
    rounding = parse_learner_rounding(spec, engine)
    for model in models:
        if rounding is not None and model is not None:
            round_forward(innermost(model), rounding)


class _Rounded(torch.autograd.Function):
    """The rounded weight; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounding: WeightRounding) -> Tensor:
        return rounding(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _rounded(weight: Tensor, rounding: WeightRounding) -> Tensor:
    found: Tensor = _Rounded.apply(weight, rounding)  # type: ignore[no-untyped-call]
    return found


def _linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, _rounded(layer.weight, layer.weight_rounding), layer.bias)


def _linear_with_lora(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.linear(x, _rounded(_merged(layer), layer.weight_rounding), layer.get_base_layer().bias)


def _merged(layer: Any) -> Tensor:
    """The weight of a linear layer, with the adapters that are in use."""
    if not hasattr(layer, "get_base_layer"):
        return layer.weight  # type: ignore[no-any-return]
    weight: Tensor = layer.get_base_layer().weight
    if not layer.disable_adapters and not layer.merged:
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers by name, one with LoRA in place of its parts."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not is_rounded(name):
            continue
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear):
            inside.update(module.modules())
            yield name, module
        elif isinstance(module, nn.Linear):
            yield name, module


def _check_whole(model: nn.Module, layers: Mapping[str, Any], rounding: WeightRounding, *, where: str) -> None:
    """Every matrix that the engine rounds is one of ``layers``: else both sides would differ unseen."""
    covered = {parameter for layer in layers.values() for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the shape aside
        if is_rounded(name) and dimensions in (2, 3) and parameter not in covered:  # 3: experts in one tensor
            raise ValueError(
                f"{where} {rounding.type!r} must be left out with this model: the engine rounds {name}, which "
                "is not the weight of a linear layer. Correct the mismatch instead (offpolicy: paper/tis)."
            )
    if not layers:
        raise ValueError(f"{where} must be left out: {type(model).__name__} has no linear layer.")


def _check_adapter(name: str, layer: Any, *, where: str) -> None:
    for adapter in layer.lora_A:
        share = getattr(dict(layer.lora_dropout).get(adapter), "p", 0.0)
        if share > 0.0:
            raise ValueError(f"lora_dropout must be 0 with {where}, but got {share} in {name}.")
        variant = getattr(layer, "lora_variant", {})
        if layer.use_dora.get(adapter) or adapter in variant or layer.lora_bias.get(adapter):
            raise ValueError(f"adapter must be plain LoRA with {where}, but {name} has another kind.")
