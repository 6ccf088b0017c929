"""How well two records of the routing of a mixture of experts agree."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask
from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.moments import Layout, Moments, moments

ROUTING_LAYOUT = Layout(sums=("choices", "shared", "flips"))
"""``choices``: pairs of token and layer that were compared. ``shared``: the sum over them of the share of common
experts. ``flips``: how many of them differ at all."""


def expert_layout(layers: int, experts: int) -> Layout:
    """:data:`ROUTING_LAYOUT` with what :func:`expert_flip_rates` needs: a count for each expert of each layer."""
    return Layout(sums=ROUTING_LAYOUT.sums, maxima=("layers",), bins=layers * experts)


def routing_moments(
    first: Tensor, second: Tensor, mask: Tensor | None = None, *, experts: int | None = None
) -> Moments:
    """The moments from which the diagnostics of the routing are computed.

    Of each token and layer, |A and B| / k: the share of the k experts that both sides chose, in whatever order.

    Args:
        first: (B, L, layers, k) expert ids, negative where there is no record.
        second: likewise.
        mask: (B, L) bool, the tokens to compare; None = all.
        experts: number of experts of a layer, to count by expert as well (:data:`EXPERT_DIAGNOSTICS`); None = do not.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> first, second = torch.tensor([[[[0, 3]]], [[[1, 2]]]]), torch.tensor([[[[3, 0]]], [[[1, 5]]]])
        >>> routing_agreement(routing_moments(first, second)).item()
        0.75
    """
    if first.shape != second.shape:
        raise ValueError(f"second must have shape {tuple(first.shape)} as first, but got {tuple(second.shape)}.")
    known = (first >= 0).all(-1) & (second >= 0).all(-1)
    if mask is not None:
        check_mask(mask=mask)
        known = known & mask.unsqueeze(-1)
    same = first.unsqueeze(-1) == second.unsqueeze(-2)  # (i, j): the first's i-th expert is the second's j-th
    shared = torch.where(known, same.any(-1).float().mean(-1), 0.0).double()
    flips = known & (shared < 1.0)
    total = moments(ROUTING_LAYOUT, [known.sum(), shared.sum(), flips.sum()])
    if experts is None:
        return total
    layers = first.shape[-2]
    counts = torch.zeros(layers * experts, dtype=torch.float64, device=first.device)
    offset = experts * torch.arange(layers, device=first.device).unsqueeze(-1)
    for ids, alone in ((first, ~same.any(-1)), (second, ~same.any(-2))):  # chosen by one side only
        places = ids.long().clamp(min=0) + offset
        counts.index_add_(0, places.flatten(), (alone & known.unsqueeze(-1)).double().flatten())
    return Moments(expert_layout(layers, experts), torch.cat([total.sums, counts]), counts.new_full((1,), layers))


def stacked_layers(parts: list[Moments]) -> Moments:
    """Joins the moments of single layers, each counted by expert, into the moments of all layers."""
    names = len(ROUTING_LAYOUT.sums)
    total = torch.stack([part.sums[:names] for part in parts]).sum(0)
    counts = torch.cat([part.histogram for part in parts])
    layout = expert_layout(len(parts), len(counts) // len(parts))
    return Moments(layout, torch.cat([total, counts]), counts.new_full((1,), len(parts)))


def routing_agreement(m: Moments) -> Tensor:
    """E|A ∩ B| / k over tokens and layers: the experts that both sides chose; 1 if nothing was compared."""
    return _share(m, "shared", empty=1.0)


def routing_flip_fraction(m: Moments) -> Tensor:
    """E 1[A is not B] over tokens and layers: share of token-layers whose sets of experts differ."""
    return _share(m, "flips", empty=0.0)


def expert_flip_rates(m: Moments) -> Tensor:
    """(layers * experts,) float64, layer after layer: share of its tokens for which one side alone chose the expert.

    Every layer is taken to have compared the same tokens.

    Raises:
        ValueError: the moments were not counted by expert.
    """
    if not m.layout.bins:
        raise ValueError("moments must be counted by expert (experts=...), but got none.")
    return m.histogram * m["layers"].clamp(min=1.0) / m["choices"].clamp(min=1.0)


def expert_flip_mean(m: Moments) -> Tensor:
    """Mean over experts and layers of Pr[i in A but not in B, or the reverse], the delta of Liu 2026."""
    return expert_flip_rates(m).mean()


def expert_flip_max(m: Moments) -> Tensor:
    """Largest Pr[i in A but not in B, or the reverse] of an expert i of a layer."""
    return expert_flip_rates(m).amax()


def _share(m: Moments, name: str, *, empty: float) -> Tensor:
    count = m["choices"]
    return torch.where(count > 0, m[name] / count.clamp(min=1.0), empty)


ROUTING_DIAGNOSTICS: dict[str, Finalizer] = {"agreement": routing_agreement, "flip_fraction": routing_flip_fraction}
"""Key of ``offpolicy/routing/<key>`` -> finaliser, for all moments of a routing."""
EXPERT_DIAGNOSTICS: dict[str, Finalizer] = {"expert_flip_mean": expert_flip_mean, "expert_flip_max": expert_flip_max}
"""The same for moments that were counted by expert; other moments lack these entries."""
