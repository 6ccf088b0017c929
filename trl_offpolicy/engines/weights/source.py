"""The trainer's weights in the form that an engine needs: full tensors, adapters merged, names of the plain model.

Works on a plain model, on PEFT, on FSDP2 (DTensor) and on DeepSpeed ZeRO-3 (gathered module by module). All ranks
iterate: gathering is collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trl_offpolicy.engines.weights.adapters import has_bias, is_lora, require_mergeable, stands_alone

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
_SAVED = re.compile(r"\bmodules_to_save\.([^.]+)\.?")  # PEFT's copy of a module that an adapter trains whole


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as PEFT saves it: its configuration (plain JSON values) and tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class WeightSource(Protocol):
    """The source of an engine's weights: the trainer's model in this process."""

    is_main: bool
    """True on the rank that writes files and talks to a server."""

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full tensor of every weight, adapters merged in. Collective."""

    def adapter(self) -> Adapter | None:
        """The adapter, or None if it is not all that was trained, or there is none. Collective."""


class ModelWeights:
    """Weights of a ``transformers`` model, or of a PEFT model of one.

    Args:
        model: unwrapped (not DDP); its parameters may be sharded.
        is_main: True on the rank that sends them.
    """

    def __init__(self, model: nn.Module, *, is_main: bool = True) -> None:
        self.model = model
        self.is_main = is_main

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full tensor of every weight, as in a checkpoint (with the experts of a mixture one by one).

        The model itself is never changed, because nothing is merged in place.

        Raises:
            NotImplementedError: at the first weight, if an adapter is more than LoRA on linear layers
                (:func:`~trl_offpolicy.engines.weights.adapters.require_mergeable`).
        """
        return as_checkpoint(self.model, self._merged())

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        require_mergeable(self.model)
        seen: set[int] = set()
        for path, module in self.model.named_modules():
            if _inside_adapter(path) or self._is_spare_copy(path):
                continue
            parameters = [p for p in module.parameters(recurse=is_lora(module)) if is_lora(module) or id(p) not in seen]
            # With its adapter a tied weight is a tensor of its own: neither is left out for the other.
            seen.update(id(p) for p in parameters if not is_lora(module))
            with _gathered(parameters):
                yield from _own_weights(path, module, parameters)

    def _is_spare_copy(self, path: str) -> bool:
        """True inside PEFT's copy of a module for an adapter that is not in use, such as TRL's "ref"."""
        match = _SAVED.search(path)
        wrapper: Any = None if match is None else self.model.get_submodule(path[: match.start()].rstrip("."))
        return match is not None and match[1] not in getattr(wrapper, "active_adapters", (match[1],))

    @property
    def has_adapter(self) -> bool:
        """Whether :meth:`adapter` returns one. No weight is gathered or copied."""
        return self._adapter_config is not None

    @property
    def _adapter_config(self) -> Any:
        config = getattr(self.model, "peft_config", {}).get("default")
        return config if config is not None and stands_alone(self.model, config) else None

    @torch.no_grad()
    def adapter(self) -> Adapter | None:
        """The default adapter if it is plain LoRA on linear layers and nothing else is trained."""
        config = self._adapter_config
        if config is None:
            return None
        from peft import get_peft_model_state_dict

        trained = [p for name, p in self.model.named_parameters() if "lora_" in name]
        with _gathered(trained):
            tensors = get_peft_model_state_dict(self.model)
            full = {name: _full(tensor).detach().clone() for name, tensor in tensors.items()}
        return Adapter(_plain(config.to_dict()), full)


def as_checkpoint(model: Any, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Undo what transformers 5 does to the weights of a mixture of experts when it loads them.

    It stacks the experts of a layer into one tensor (``experts.gate_up_proj``) and renames routers. vLLM loads the
    names of a checkpoint and skips others without an error, so the engine would keep its old experts.

    Args:
        model: a model of transformers, or of PEFT around one; weights of others pass through.
        named: names and full tensors of the model.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not any(".experts." in name for name, _ in model.named_parameters()):
        yield from named
        return
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in named:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def _inside_adapter(path: str) -> bool:
    parts = path.split(".")
    return "base_layer" in parts or "original_module" in parts or any(part.startswith("lora_") for part in parts)


def _own_weights(path: str, module: nn.Module, parameters: list[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    wanted = {id(p) for p in parameters}
    if is_lora(module):
        layers = list(_lora_layers(module))
        base: Any = layers[-1].base_layer
        for name, parameter in base.named_parameters(recurse=False):
            if id(parameter) in wanted:
                full = _full(parameter.data)
                adapted = [layer for layer in layers if getattr(layer, "parameter_name", "weight") == name]
                deltas = [_delta(layer, full) for layer in adapted]
                deltas += [_bias_delta(layer, full) for layer in layers if name == "bias"]
                yield plain_name(f"{path}.{name}"), sum(deltas, full)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in wanted:
            yield plain_name(f"{path}.{name}" if path else name), _full(parameter.data)


def _lora_layers(module: Any) -> Iterator[Any]:
    """The LoRA layers from outside in; PEFT nests one for each parameter that it adapts (``target_parameters``)."""
    while is_lora(module):
        yield module
        module = module.base_layer


def _delta(module: Any, weight: Tensor) -> Tensor:
    """The sum of scale * B A over the active adapters, in the base weight's dtype and shape."""
    total = torch.zeros_like(weight)
    if hasattr(module, "parameter_name"):  # an adapter of stacked experts: one product for each expert
        for name in module.active_adapters:
            total += _full(module.get_delta_weight(name)).to(weight.dtype)
        return total
    for name in module.active_adapters:
        if name not in module.lora_A:  # it does not touch this layer
            continue
        up, down = _full(module.lora_B[name].weight), _full(module.lora_A[name].weight)
        delta = module.scaling[name] * (up.float() @ down.float())
        total += (delta.T if getattr(module, "fan_in_fan_out", False) else delta).to(weight.dtype)
    return total


def _bias_delta(module: Any, bias: Tensor) -> Tensor:
    """The sum of scale * the bias of B over the active adapters with ``lora_bias``, in the base bias's dtype."""
    total = torch.zeros_like(bias)
    for name in module.active_adapters:
        if name in module.lora_A and has_bias(module, name):
            total += (module.scaling[name] * _full(module.lora_B[name].bias).float()).to(bias.dtype)
    return total


def plain_name(name: str) -> str:
    """Name of a weight in the plain model, without the parts of PEFT and of wrappers."""
    name = name.removeprefix("base_model.model.")
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return _SAVED.sub("", name)


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor; other tensors as they are."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """A context in which ZeRO-3 parameters are whole; it does nothing for others."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return gathered


def _plain(value: Any) -> Any:
    """Sets and enums of a PEFT configuration as JSON values."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, set | list | tuple):
        return sorted(value) if isinstance(value, set) else [_plain(item) for item in value]
    return value.value if hasattr(value, "value") else value
