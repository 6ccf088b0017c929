"""How far two records of a mixture of experts' routing agree."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional.moments import Layout, Moments, moments

ROUTING_LAYOUT = Layout(sums=("choices", "shared", "flips"))
"""``choices``: token-layers compared. ``shared``: sum over them of the share of common experts. ``flips``: those with
any difference."""


def shared_experts(first: Tensor, second: Tensor) -> Tensor:
    """(...) float32 share of the k experts that two choices have in common; their order does not count.

    Args:
        first: (..., k) expert ids, each at most once.
        second: likewise, of the same shape.

    Example:
        >>> shared_experts(torch.tensor([[0, 3], [1, 2]]), torch.tensor([[3, 0], [1, 5]]))
        tensor([1.0000, 0.5000])
    """
    return (first.unsqueeze(-1) == second.unsqueeze(-2)).any(-1).float().mean(-1)


def routing_moments(first: Tensor, second: Tensor, mask: Tensor | None = None) -> Moments:
    """What :func:`routing_agreement` and :func:`routing_flip_fraction` are made of.

    Args:
        first: (B, L, layers, k) expert ids, negative where there is no record.
        second: likewise.
        mask: (B, L) bool, the tokens to compare; None = all.
    """
    known = (first >= 0).all(-1) & (second >= 0).all(-1)
    if mask is not None:
        known = known & mask.unsqueeze(-1)
    shared = torch.where(known, shared_experts(first, second), 0.0).double()
    flips = known & (shared < 1.0)
    return moments(ROUTING_LAYOUT, [known.sum(), shared.sum(), flips.sum()])


def routing_agreement(m: Moments) -> Tensor:
    """Mean share of a token's experts in a layer on which both sides agree; 1 where nothing was compared."""
    return _share(m, "shared", empty=1.0)


def routing_flip_fraction(m: Moments) -> Tensor:
    """Share of token-layers whose sets of experts differ."""
    return _share(m, "flips", empty=0.0)


def _share(m: Moments, name: str, *, empty: float) -> Tensor:
    count = m["choices"]
    return torch.where(count > 0, m[name] / count.clamp(min=1.0), empty)


ROUTING_DIAGNOSTICS = {"agreement": routing_agreement, "flip_fraction": routing_flip_fraction}
"""Key of ``offpolicy/routing/<key>`` -> finaliser."""
