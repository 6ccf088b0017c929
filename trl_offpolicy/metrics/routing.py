"""How far trainer and engine send tokens to the same experts of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional.routing import (
    ROUTING_LAYOUT,
    routing_agreement,
    routing_flip_fraction,
    routing_moments,
)
from trl_offpolicy.metrics.base import MomentMetric


class RoutingMetric(MomentMetric):
    """Base of the diagnostics of two records of a routing."""

    layout = ROUTING_LAYOUT

    def update(self, first: Tensor, second: Tensor, mask: Tensor) -> None:
        """Add a batch.

        Args:
            first: (B, L, layers, k) expert ids of the trainer, signed integers, -1 = unknown (not compared).
            second: likewise of the engine, or of the trainer at other weights.
            mask: (B, L) bool or 0/1: the tokens to compare.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: the ids are not integers.
        """
        _check_ids("first", first)
        _check_ids("second", second, first)
        if mask.shape != first.shape[:2]:
            raise ValueError(f"mask must have shape {tuple(first.shape[:2])}, but got {tuple(mask.shape)}.")
        with torch.no_grad():
            self._add(routing_moments(first, second, mask.bool()))


class RoutingAgreement(RoutingMetric):
    """Mean share of a token's experts in a layer that both sides chose; 1 where nothing was compared.

    Formula: mean over tokens and layers of |A ∩ B| / k.
    Unit: share, in [0, 1]. Normaliser: token-layers known to both.

    Example:
        >>> import torch
        >>> metric = RoutingAgreement()
        >>> metric.update(torch.tensor([[[[0, 3]], [[1, 2]]]]), torch.tensor([[[[3, 0]], [[1, 5]]]]), torch.ones(1, 2))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)

    Reference: Ma et al. 2025, "Stabilizing MoE RL by aligning training and inference routers" (arXiv:2510.11370).
    """

    higher_is_better = True
    finalize = staticmethod(routing_agreement)


class RoutingFlipFraction(RoutingMetric):
    """Share of token-layers whose sets of experts differ.

    Formula: mean over tokens and layers of 1[A != B].
    Unit: share, in [0, 1]. Normaliser: token-layers known to both.

    Example:
        >>> import torch
        >>> metric = RoutingFlipFraction()
        >>> metric.update(torch.tensor([[[[0, 3]], [[1, 2]]]]), torch.tensor([[[[3, 0]], [[1, 5]]]]), torch.ones(1, 2))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)

    Reference: Ma et al. 2025, "Stabilizing MoE RL by aligning training and inference routers" (arXiv:2510.11370).
    """

    higher_is_better = False
    finalize = staticmethod(routing_flip_fraction)


def _check_ids(name: str, ids: Tensor, like: Tensor | None = None) -> None:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, but got {getattr(ids, 'dtype', type(ids).__name__)}.")
    expected = "(B, L, layers, k)" if like is None else str(tuple(like.shape))
    if ids.dim() != 4 or (like is not None and ids.shape != like.shape):
        raise ValueError(f"{name} must have shape {expected}, but got {tuple(ids.shape)}.")
