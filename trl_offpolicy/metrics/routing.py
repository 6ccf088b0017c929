"""Whether trainer and engine send tokens to the same experts of a mixture, one class per diagnostic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.functional.routing import EXPERT_DIAGNOSTICS, ROUTING_DIAGNOSTICS, ROUTING_LAYOUT, expert_layout
from trl_offpolicy.functional.routing import routing_moments as moments_of
from trl_offpolicy.metrics.base import MomentMetric, by_quantity, classes_in, derived


class RoutingMetric(MomentMetric):
    """Base of the diagnostics of two records of a routing: A and B, the k experts of a token in a layer on each side.

    Args:
        layers: number of layers with experts; the classes that count by expert (``RoutingExpertFlip*``) need it.
        experts: number of experts of a layer; the same classes need it.

    Raises:
        ValueError: only one of the two is given, or neither to a class that counts by expert.

    Example:
        >>> import torch
        >>> from trl_offpolicy.metrics import RoutingAgreement
        >>> metric = RoutingAgreement()  # any of ROUTING_METRICS
        >>> metric.update(torch.tensor([[[[0, 3]], [[1, 2]]]]), torch.tensor([[[[3, 0]], [[1, 5]]]]), torch.ones(1, 2))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    layout = ROUTING_LAYOUT

    def __init__(self, *, layers: int | None = None, experts: int | None = None, **kwargs: Any) -> None:
        by_expert = getattr(type(self), "key", "").rpartition("/")[2] in EXPERT_DIAGNOSTICS
        if (layers is None) != (experts is None) or (by_expert and experts is None):
            raise ValueError(f"layers and experts must be given together, but got {layers} and {experts}.")
        if layers is not None and experts is not None:
            self.layout = expert_layout(layers, experts)  # type: ignore[misc]
        self.experts = experts
        super().__init__(**kwargs)

    def update(self, first: Tensor, second: Tensor, mask: Tensor) -> None:
        """Add a batch.

        Args:
            first: (B, L, layers, k) expert ids of the trainer, signed integers, -1 = unknown (not compared).
            second: (B, L, layers, k) expert ids of the engine, or of the trainer at other weights.
            mask: (B, L) bool or 0/1: the tokens to compare.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: the ids are not integers.
        """
        _check_ids("first", first)
        _check_ids("second", second, first)
        if mask.shape != first.shape[:2]:
            raise ValueError(f"mask must have shape {tuple(first.shape[:2])}, but got {tuple(mask.shape)}.")
        if self.experts is not None and first.shape[2] * self.experts != self.layout.bins:
            raise ValueError(f"first must have {self.layout.bins // self.experts} layers, but got {first.shape[2]}.")
        with torch.no_grad():
            self._add(moments_of(first, second, mask.bool(), experts=self.experts))


def _routing(name: str, key: str, *, better: bool = False) -> type[RoutingMetric]:
    finalize = {**ROUTING_DIAGNOSTICS, **EXPERT_DIAGNOSTICS}[key]
    return derived(RoutingMetric, name, f"routing/{key}", finalize, __name__, better=better)


RoutingAgreement = _routing("RoutingAgreement", "agreement", better=True)
RoutingFlipFraction = _routing("RoutingFlipFraction", "flip_fraction")
RoutingExpertFlipMean = _routing("RoutingExpertFlipMean", "expert_flip_mean")
RoutingExpertFlipMax = _routing("RoutingExpertFlipMax", "expert_flip_max")

ROUTING_METRICS: Mapping[str, type[RoutingMetric]] = by_quantity(classes_in(globals(), RoutingMetric))
"""Key of ``offpolicy/routing/<key>`` -> class."""


def _check_ids(name: str, ids: Tensor, like: Tensor | None = None) -> None:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, but got {getattr(ids, 'dtype', type(ids).__name__)}.")
    expected = "(B, L, layers, k)" if like is None else str(tuple(like.shape))
    if ids.dim() != 4 or (like is not None and ids.shape != like.shape):
        raise ValueError(f"{name} must have shape {expected}, but got {tuple(ids.shape)}.")
