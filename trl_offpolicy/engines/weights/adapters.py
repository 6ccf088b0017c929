"""What an engine can do with an adapter of PEFT: load it alone, take it merged into the weights, or neither.

Where possible the layers themselves are asked, because a configuration need not say all: EVA, for example, gives each
layer a rank of its own after the adapter was made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

_SAME_AS_LORA = ("MiCALinearVariant", "VeloraLinearVariant")  # variants that compute what plain LoRA does
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` under which the base weights stay those of the checkpoint. PiSSA, OLoRA, CorDA, LoftQ
and LoRA-GA take the adapter's first values out of them."""


def is_lora(module: nn.Module) -> bool:
    """True of a layer that PEFT has wrapped for LoRA."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def require_mergeable(model: nn.Module) -> None:
    """Raise unless base weights + LoRA on linear layers (or stacked experts) is all that the active adapters do.

    Args:
        model: of transformers, or PEFT's of one.

    Raises:
        NotImplementedError: an active adapter does something else; the message names the layer and the kind.
    """
    for name in _active(model):
        config = getattr(model, "peft_config", {}).get(name)
        kind = getattr(config, "peft_type", None)
        if kind is not None and getattr(kind, "value", kind) != "LORA":
            raise _refusal("the model", name, f"of type {getattr(kind, 'value', kind)}")
        if getattr(config, "layer_replication", None):
            raise _refusal("the model", name, "with layer_replication, whose layers the engine's model does not have")
    for path, module in model.named_modules():
        if hasattr(module, "base_layer"):
            for name, what in _other_than_lora(module):
                raise _refusal(path, name, what)


def _refusal(where: str, adapter: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"adapter {adapter!r} must be plain LoRA on linear layers to be merged for the engine, but in {where} it is "
        f"{what}. Train plain LoRA, or sample with the trainer's own model (without vLLM)."
    )


def _active(model: Any) -> list[str]:
    active = getattr(model, "active_adapters", ()) if hasattr(model, "peft_config") else ()
    return list(active() if callable(active) else active)


def _other_than_lora(module: Any) -> Iterator[tuple[str, str]]:
    """(adapter, what it is) for each active adapter of a layer whose effect is not scale * B A on its weight."""
    from peft.tuners.lora import Linear, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(module, BaseTunerLayer):
        return
    for name in module.active_adapters:
        variant = getattr(module, "lora_variant", {}).get(name)
        if not isinstance(module, Linear | ParamWrapper):
            kind = f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"
            yield name, f"a layer of type {kind} (an embedding's, a quantised layer's or another method's)"
        elif variant is not None and type(variant).__name__ not in _SAME_AS_LORA:
            yield name, f"the variant {type(variant).__name__} (DoRA is one)"
        elif name in module.lora_A and has_bias(module, name) and getattr(module.base_layer, "bias", None) is None:
            yield name, "LoRA with lora_bias=True on a layer that has no bias to which it could be added"


def has_bias(module: Any, adapter: str) -> bool:
    """Whether the adapter of a layer adds a bias (``lora_bias``)."""
    return bool(getattr(module, "lora_bias", {}).get(adapter))


def stands_alone(model: nn.Module, config: Any, adapter: str = "default") -> bool:
    """True if the checkpoint's weights + LoRA on linear layers is the whole policy, which vLLM can then hot-load.

    vLLM reads ``r``, ``lora_alpha`` and ``use_rslora`` of the adapter's configuration and scales all layers alike. It
    passes over ``rank_pattern``, ``alpha_pattern`` and whatever else it does not know.

    Args:
        model: PEFT's model.
        config: of the adapter.
        adapter: its name.
    """
    plain = getattr(config, "peft_type", None) == "LORA" and getattr(config, "bias", "none") == "none"
    others = ("modules_to_save", "use_dora", "target_parameters", "trainable_token_indices", "layer_replication")
    extras = [getattr(config, name, None) for name in others]
    on_head = any("lm_head" in name or "embed" in name for name, _ in model.named_parameters() if "lora_" in name)
    trained = all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    own_base = getattr(config, "init_lora_weights", True) in _KEEP_BASE
    if not plain or any(extras) or on_head or not trained or not own_base:
        return False
    return all(_as_configured(module, config, adapter) for module in model.modules() if is_lora(module))


def _as_configured(module: Any, config: Any, adapter: str) -> bool:
    """True if a layer's adapter is plain LoRA with the rank and scale that the configuration gives all layers."""
    if list(module.active_adapters) != [adapter] or has_bias(module, adapter) or adapter in module.lora_variant:
        return False
    if adapter not in module.lora_A:
        return False
    scale = config.lora_alpha / (math.sqrt(config.r) if getattr(config, "use_rslora", False) else config.r)
    return bool(module.r[adapter] == config.r and math.isclose(module.scaling[adapter], scale, rel_tol=1e-6))
