"""The routers of a mixture of experts, and how each architecture weights the experts that it chose.

A router of transformers returns (logits, weights, ids). Replay keeps the logits of the present router, takes the ids of
a record, and weights them as the architecture does: by the gate's probabilities at these ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Gate = Callable[[Any, Tensor, Tensor], Tensor]
"""A function from (router, logits (N, experts), ids (N, k)) to weights (N, k), which carry gradient."""

_LAYER = re.compile(r"^(?P<layer>(?P<layers>(?:.*\.)?layers)\.(?P<number>\d+))\.")
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


def softmax_gate(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Qwen3-MoE, OLMoE: softmax over all experts, renormalised over the chosen ones where ``norm_topk_prob``."""
    chosen = torch.softmax(logits, dtype=torch.float, dim=-1).gather(-1, ids)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen.to(logits.dtype)


def renormalised_gate(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Mixtral: softmax over all experts, always renormalised over the chosen ones, in float32."""
    chosen = torch.softmax(logits.float(), dim=-1).gather(-1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def sigmoid_gate(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3: sigmoid scores without the correction bias, which only chooses."""
    chosen = logits.sigmoid().gather(-1, ids)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    scaled: Tensor = chosen * router.routed_scaling_factor
    return scaled


GATES: dict[str, Gate] = {
    "Qwen3MoeTopKRouter": softmax_gate,
    "OlmoeTopKRouter": softmax_gate,
    "MixtralTopKRouter": renormalised_gate,
    "DeepseekV3TopkRouter": sigmoid_gate,
}
"""Router classes of transformers that can be recorded and replayed. Add yours; the tests check what it must satisfy."""


@dataclass(frozen=True)
class Router:
    """One router.

    Args:
        module: the router itself, which returns (logits, weights, ids).
        path: its name in the model.
        layer: the decoder layer around it.
        number: number of that layer.
        gate: how the architecture weights given ids.
    """

    module: Any
    path: str
    layer: nn.Module
    number: int
    gate: Gate


@dataclass(frozen=True)
class Routers:
    """The routers of a model, in the order of its layers.

    Args:
        of_layer: the routers of each layer with experts; if a layer's router is wrapped twice it has two, and one runs.
        backbone: the module that passes its keyword arguments on to the decoder layers.
    """

    of_layer: tuple[tuple[Router, ...], ...]
    backbone: nn.Module

    @property
    def layers(self) -> list[nn.Module]:
        """All decoder layers, those without experts too."""
        return [_unwrapped(layer) for layer in self.backbone.layers]  # type: ignore[union-attr]

    @property
    def top_k(self) -> int:
        """k, the number of experts that a token is sent to."""
        return int(self.of_layer[0][0].module.top_k)

    @property
    def experts(self) -> int:
        """The number of experts of a layer."""
        return int(self.of_layer[0][0].module.num_experts)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that have experts."""
        return tuple(routers[0].number for routers in self.of_layer)

    def __len__(self) -> int:
        return len(self.of_layer)


def find_routers(model: nn.Module) -> Routers:
    """The routers of a model of transformers, plain or inside PEFT, DDP, FSDP2 or DeepSpeed.

    Args:
        model: a mixture of experts of :data:`GATES`.

    Raises:
        ValueError: the model is dense.
        NotImplementedError: its routers are of a class that is not in :data:`GATES`.
    """
    modules = dict(model.named_modules())
    found: dict[int, list[Router]] = {}
    backbones = set()
    for path, module in modules.items():
        gate, place = _gate_of(module), _LAYER.match(path)
        if gate is None or place is None:
            continue
        layer = _unwrapped(modules[place["layer"]])
        backbones.add(place["layers"].rpartition(".")[0])
        router = Router(module, path, layer, int(place["number"]), gate)
        found.setdefault(router.number, []).append(router)
    if not found:
        raise _not_a_mixture(model, modules.values())
    if len(backbones) > 1:
        raise NotImplementedError(f"the model must have one stack of layers with experts, but got {sorted(backbones)}.")
    (backbone,) = backbones
    return Routers(tuple(tuple(found[number]) for number in sorted(found)), modules[backbone])


def _gate_of(module: nn.Module) -> Gate | None:
    """The gate of a router, found by the names of its base classes too, because FSDP2 puts its own class first."""
    return next((GATES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in GATES), None)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The decoder layer itself: what activation checkpointing calls again."""
    while inner := next((name for name in _WRAPPED if name in module._modules), None):
        module = getattr(module, inner)
    return module


def _not_a_mixture(model: nn.Module, modules: Iterable[nn.Module]) -> Exception:
    routers = sorted({type(module).__name__ for module in modules if "router" in type(module).__name__.lower()})
    if routers:
        return NotImplementedError(f"routers must be one of {sorted(GATES)}, but got {', '.join(routers)}.")
    return ValueError(f"model must be a mixture of experts to record its routing, but got {type(model).__name__}.")
