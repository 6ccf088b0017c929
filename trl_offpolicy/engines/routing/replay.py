"""Record which experts a forward chose, and make another forward choose the same.

The record travels as a keyword argument of the decoder layers. A layer that activation checkpointing runs again in the
backward pass therefore gets the same record, even after :func:`replay` has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.engines.routing.routers import Gate, Routers, find_routers
from trl_offpolicy.engines.routing.storage import bytes_per_token, check_shape, check_storage, route_dtype
from trl_offpolicy.functional.moments import Moments
from trl_offpolicy.functional.routing import expert_layout, routing_moments, stacked_layers

_KEY = "routed_experts"
_ATTRIBUTE = "_offpolicy_routing"


class Recorded:
    """What :func:`record` collects.

    Args:
        experts: number of experts of a layer.
        device: where the record is kept; None = where the model is.
        limit_gib: GiB that the record may take; it raises before it takes more.
    """

    def __init__(self, *, experts: int, device: torch.device | str | None, limit_gib: float) -> None:
        self._dtype = route_dtype(experts)
        self._experts, self._device, self._limit = experts, device, limit_gib
        self._forwards: list[Tensor] = []
        self._tokens = 0

    def add(self, layers: list[Tensor]) -> None:
        """Add one forward: (b, L, k) ids of each layer with experts."""
        rows, length, top_k = layers[0].shape
        self._tokens += rows * length
        each = bytes_per_token(layers=len(layers), top_k=top_k, experts=self._experts)
        check_storage(self._tokens, each=each, limit_gib=self._limit)
        small = torch.stack([ids.to(self._dtype) for ids in layers], dim=2)
        self._forwards.append(small if self._device is None else small.to(self._device))

    @property
    def routed_experts(self) -> Tensor:
        """The record, (B, L, layers, k) int8 or int16, with the rows of all forwards in their order.

        Raises:
            ValueError: no forward was run.
        """
        if not self._forwards:
            raise ValueError("record must see at least one forward of the model, but got none.")
        return torch.cat(self._forwards)


class Replayed:
    """What :func:`replay` compares: the choice that the router would have made, and the record.

    Args:
        routes: the record, (B, L, layers, k).
        mask: (B, L) bool, the tokens that count; None = all.
        enforce: False only compares.
        experts: number of experts of a layer.
    """

    def __init__(self, routes: Tensor, mask: Tensor | None, *, enforce: bool, experts: int) -> None:
        self.routes, self.mask, self.enforce, self.experts = routes, mask, enforce, experts
        self._row = 0
        self._seen: dict[int, Moments] = {}

    def next_rows(self, rows: int, length: int) -> tuple[Tensor, Tensor | None]:
        """Record and mask of the next forward's rows; after the last row the first one follows."""
        if length != self.routes.shape[1]:
            raise ValueError(f"routed_experts must have one entry for each of {length} positions, but got "
                             f"{self.routes.shape[1]}.")  # fmt: skip
        start = 0 if self._row == len(self.routes) else self._row
        self._row = start + rows
        if self._row > len(self.routes):
            raise ValueError(f"routed_experts must have a row for each of the batch, but got {len(self.routes)}.")
        here = slice(start, self._row)
        return self.routes[here], None if self.mask is None else self.mask[here]

    def compare(self, layer: int, chosen: Tensor, record: Tensor, mask: Tensor | None) -> None:
        """Compare one layer, named by its place in the record: (b, L, k) ids of the router, and those of the record."""
        seen = routing_moments(chosen.unsqueeze(2), record.unsqueeze(2), mask, experts=self.experts)
        self._seen[layer] = seen if layer not in self._seen else self._seen[layer].merge(seen)

    @property
    def moments(self) -> Moments:
        """Moments over all layers and forwards so far: each router's choice, after replay in the layers below it."""
        layers, layout = self.routes.shape[2], expert_layout(1, self.experts)
        like = next(iter(self._seen.values())).sums if self._seen else torch.zeros(0, device=self.routes.device)
        none = like.new_zeros(len(layout.sums) + layout.bins, dtype=torch.float64)
        empty = Moments(layout, none, none.new_ones(1))
        return stacked_layers([self._seen.get(layer, empty) for layer in range(layers)])


@dataclass
class _Places:
    """The hooks of one model. They are never removed, because a layer may run again after every context has ended."""

    routers: Routers
    recorded: Recorded | None = None
    replayed: Replayed | None = None
    shape: tuple[int, int] = (0, 0)
    mask: Tensor | None = None
    inside: bool = False
    """True while the backbone's own forward runs, False in a layer that runs again."""
    hooked: set[nn.Module] = field(default_factory=set)
    index_of: dict[nn.Module, int] = field(default_factory=dict)
    """Decoder layer with experts -> its place in the record."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    record_of: dict[int, tuple[Tensor | None, bool]] = field(default_factory=dict)
    """Layer -> its (b, L, k) record while it runs, and whether the router must follow it."""


@contextmanager
def record(model: nn.Module, *, device: torch.device | str | None = None, limit_gib: float = 4.0) -> Iterator[Recorded]:
    """While open, every forward of ``model`` adds the experts that its tokens went to.

    Args:
        model: a mixture of experts of transformers, plain or wrapped.
        device: where the record is kept, e.g. "cpu"; None = with the model.
        limit_gib: GiB that the record may take.

    Raises:
        ValueError: the model is dense.
        NotImplementedError: its routers are not known.
        RouteStorageError: the record is larger than allowed.
    """
    places = _installed(model)
    if places.recorded is not None:
        raise RuntimeError("record must not be open already for this model, but it is.")
    places.recorded = Recorded(experts=places.routers.experts, device=device, limit_gib=limit_gib)
    try:
        yield places.recorded
    finally:
        places.recorded = None


@contextmanager
def replay(
    model: nn.Module, routed_experts: Tensor, *, mask: Tensor | None = None, enforce: bool = True
) -> Iterator[Replayed]:
    """While open, forwards of ``model`` send their tokens to the experts of a record.

    The experts are weighted by the present router at the recorded ids, so its gradient flows, and the auxiliary loss
    still sees its logits. Where the router would choose the same experts, outputs and gradients are bit for bit those
    without replay. Several forwards (micro-batches) take the rows one after the other, and begin again after the last.
    A checkpointed layer gets the same record again in the backward pass, even after this context has ended.

    Args:
        model: a mixture of experts of transformers, plain or wrapped.
        routed_experts: (B, L, layers, k) signed integers over the positions of the forward's input, padding included;
            -1: this token routes freely.
        mask: (B, L) bool, the tokens that :attr:`Replayed.moments` counts; None = all.
        enforce: False leaves the routing alone and only compares.

    Raises:
        TypeError: ``routed_experts`` are not signed integers.
        ValueError: they have another shape, or the model is dense.
        NotImplementedError: the model's routers are not known.

    Reference: Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs", Sec. 3 (R2, R3); Ma et al. 2025,
    "Stabilizing MoE RL by aligning training and inference routers" (R3, arXiv:2510.11370).
    """
    places = _installed(model)
    check_shape(routed_experts, top_k=places.routers.top_k, layers=len(places.routers))
    if places.replayed is not None:
        raise RuntimeError("replay must not be open already for this model, but it is.")
    places.replayed = Replayed(routed_experts, mask, enforce=enforce, experts=places.routers.experts)
    try:
        yield places.replayed
    finally:
        places.replayed = None


def _installed(model: nn.Module) -> _Places:
    """The hooks of a model. They are kept on its backbone, so that each copy of the model has its own hooks."""
    routers = find_routers(model)
    places: _Places | None = getattr(routers.backbone, _ATTRIBUTE, None)
    if places is None:
        places = _Places(routers)
        setattr(routers.backbone, _ATTRIBUTE, places)
        routers.backbone.register_forward_pre_hook(partial(_enter, places), with_kwargs=True)
        routers.backbone.register_forward_hook(partial(_leave, places), always_call=True)
        for layer in routers.layers:
            layer.register_forward_pre_hook(partial(_enter_layer, places), with_kwargs=True)
    places.routers = routers  # PEFT may have wrapped some of them since the last call
    for index, of_layer in enumerate(routers.of_layer):
        for router in of_layer:
            if router.module not in places.hooked:
                places.hooked.add(router.module)
                places.index_of[router.layer] = index
                router.module.register_forward_hook(partial(_route, places, index, router.gate))
    return places


def _enter(places: _Places, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the decoder layers the rows of this forward."""
    places.inside = places.recorded is not None or places.replayed is not None
    if not places.inside:
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    places.shape, places.mask = (tokens.shape[0], tokens.shape[1]), None
    places.chosen.clear()
    if places.replayed is None:
        return None
    rows, places.mask = places.replayed.next_rows(*places.shape)
    return args, {**kwargs, _KEY: (rows, places.replayed.enforce)}


def _leave(places: _Places, backbone: nn.Module, args: Any, output: Any) -> None:
    if places.inside and places.recorded is not None and len(places.chosen) == len(places.routers):
        places.recorded.add([places.chosen[index] for index in range(len(places.routers))])
    places.inside = False
    places.chosen.clear()


def _enter_layer(places: _Places, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the record out of the arguments of a layer; this hook runs whenever the layer does."""
    index = places.index_of.get(layer, -1)
    places.record_of.pop(index, None)
    if _KEY not in kwargs:
        return None
    rows, enforce = kwargs[_KEY]
    if index >= 0:
        places.record_of[index] = (rows[:, :, index], enforce)
    return args, {name: value for name, value in kwargs.items() if name != _KEY}


def _route(places: _Places, index: int, gate: Gate, router: Any, args: Any, output: Any) -> Any:
    """After the router has run: replace its choice by the record's experts, weighted by the present gate."""
    logits, weights, ids = output
    record, enforce = places.record_of.pop(index, (None, False))
    if record is not None:
        record = record.to(ids.device, torch.long)
        _compare(places, index, ids.view(record.shape), record)
        if enforce:
            given = record.view(ids.shape)
            ids = torch.where(given >= 0, given, ids)
            weights = gate(router, logits, ids)
    if places.inside and places.recorded is not None:
        places.chosen[index] = ids.detach().view(*places.shape, -1)
    return logits, weights, ids


@torch.no_grad()
def _compare(places: _Places, index: int, chosen: Tensor, record: Tensor) -> None:
    if places.inside and places.replayed is not None:
        mask = None if places.mask is None else places.mask.to(chosen.device)
        places.replayed.compare(index, chosen, record, mask)
