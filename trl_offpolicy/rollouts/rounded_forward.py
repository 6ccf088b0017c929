"""The learner's forward in the engine's precision: its linear weights are rounded as the engine's are.

What is left between the two is what kernels differ by. The weights that learn stay whole: gradients pass straight
through the rounding (Gu et al. 2026, QaRL, arXiv:2604.07853, training forward aligned with the quantised rollout).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    layers = dict(_layers(model))
    _check_whole(model, layers, rounding)
    for name, layer in layers.items():
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        columns = base.in_features
        if rounding.group_size is not None and columns % rounding.group_size:
            raise ValueError(
                f"learner_rounding.group_size must divide the {columns} columns of {name}, but got "
                f"{rounding.group_size}."
            )
        if base is not layer:
            _check_adapter(name, layer)
        layer.weight_rounding = rounding
        # a method, so that a copy of the layer computes with its own weights
        layer.forward = MethodType(_linear if base is layer else _linear_with_lora, layer)
    return len(layers)


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
    base = layer.get_base_layer()
    weight = base.weight
    if not layer.disable_adapters and not layer.merged:
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return F.linear(x, _rounded(weight, layer.weight_rounding), base.bias)


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


def _check_whole(model: nn.Module, layers: Mapping[str, Any], rounding: WeightRounding) -> None:
    """Every matrix that the engine rounds is one of ``layers``: else both sides would differ unseen."""
    covered = {parameter for layer in layers.values() for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the shape aside
        if is_rounded(name) and dimensions in (2, 3) and parameter not in covered:  # 3: experts in one tensor
            raise ValueError(
                f"learner_rounding {rounding.type!r} must be left out with this model: the engine rounds {name}, which "
                "is not the weight of a linear layer. Correct the mismatch instead (offpolicy: paper/tis)."
            )
    if not layers:
        raise ValueError(f"learner_rounding must be left out: {type(model).__name__} has no linear layer.")


def _check_adapter(name: str, layer: Any) -> None:
    for adapter in layer.lora_A:
        share = getattr(dict(layer.lora_dropout).get(adapter), "p", 0.0)
        if share > 0.0:
            raise ValueError(f"lora_dropout must be 0 with learner_rounding, but got {share} in {name}.")
        variant = getattr(layer, "lora_variant", {})
        if layer.use_dora.get(adapter) or adapter in variant or layer.lora_bias.get(adapter):
            raise ValueError(f"adapter must be plain LoRA with learner_rounding, but {name} has another kind.")
