"""The diagnostics of the loss: ``loss/*``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer, fraction
from trl_offpolicy.functional.moments import Layout, Moments, moments
from trl_offpolicy.functional.policy_losses import LossTerms
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.types import PolicyBatch


class LossParts(NamedTuple):
    """Terms of the policy loss, policy and KL per token (B, T), the KL's coefficient, and what was kept."""

    terms: LossTerms
    policy: Tensor
    kl: Tensor | None
    kl_coef: float
    keep_mask: Tensor


_LAYOUT = Layout(
    sums=(
        "tokens", "units", "policy", "kl", "entropy", "clip_low", "clip_high", "clip_region", "nonfinite",
        "nonfinite_reference", "gate", "calls", "kl_coef",
    ),
    maxima=("row_clip_low_min_negated", "row_clip_high_max"),
)  # fmt: skip


def _row_low(m: Moments) -> Tensor:
    """Smallest share of low-clipped tokens in a response."""
    top = m["row_clip_low_min_negated"]
    return torch.where(top > -torch.inf, -top, 0.0)


def _row_high(m: Moments) -> Tensor:
    """Largest share of high-clipped tokens in a response."""
    return m["row_clip_high_max"].clamp(0.0, 1.0)


_FINALIZERS: Mapping[str, Finalizer] = {
    "policy": fraction("policy", "tokens"),
    "kl": fraction("kl", "tokens"),
    "kl_coef": fraction("kl_coef", "calls"),
    "entropy": fraction("entropy", "tokens"),
    "clip_low_fraction": fraction("clip_low", "units"),
    "clip_high_fraction": fraction("clip_high", "units"),
    "clip_region_fraction": fraction("clip_region", "units"),
    "response_clip_low_min": _row_low,
    "response_clip_high_max": _row_high,
    "nonfinite_current": fraction("nonfinite", "tokens"),
    "nonfinite_reference": fraction("nonfinite_reference", "tokens"),
    "gate_mean": fraction("gate", "units"),
}


GROUPS = {"loss": (_LAYOUT, _FINALIZERS)}
"""Names of the moments and finalisers, by group."""


def _clip_unit(terms: LossTerms, mask: Tensor) -> Tensor:
    """What clips and gates decide on: tokens (B, T), or sequences with a trainable token (B, 1)."""
    decisions = [part for part in (terms.clipped_low, terms.clipped_high, terms.gate) if part is not None]
    return mask.any(-1, keepdim=True) if decisions and decisions[0].shape[-1] == 1 else mask


@torch.no_grad()
def loss_stats(batch: PolicyBatch, parts: LossParts) -> Stats:
    """The ``loss`` group of one call."""
    mask = batch.mask
    unit = _clip_unit(parts.terms, mask)
    never = torch.zeros_like(unit)
    low = never if parts.terms.clipped_low is None else parts.terms.clipped_low & unit
    high = never if parts.terms.clipped_high is None else parts.terms.clipped_high & unit
    tokens = mask.sum(-1)
    count = unit.sum(-1).clamp(min=1)
    low_rows = torch.where(tokens > 0, low.sum(-1) / count, torch.inf)
    high_rows = torch.where(tokens > 0, high.sum(-1) / count, -torch.inf)
    zero = torch.zeros((), device=mask.device)
    reference, gate = batch.ref_per_token_logps, parts.terms.gate
    sums = [
        tokens.sum(),
        unit.sum(),
        parts.policy.sum(),
        zero if parts.kl is None else torch.where(mask, parts.kl, 0.0).sum(),
        zero if batch.entropies is None else torch.where(mask, batch.entropies.float(), 0.0).sum(),
        low.sum(),
        high.sum(),
        (low | high).sum(),
        (mask & ~(batch.per_token_logps.abs() < torch.inf)).sum(),
        zero if reference is None else (mask & ~(reference.abs() < torch.inf)).sum(),
        zero if gate is None else torch.where(unit, gate, 0.0).sum(),
        zero + 1,
        zero.double() + parts.kl_coef,
    ]
    none = low_rows.new_full((1,), -torch.inf)  # a batch without rows
    maxima = [torch.cat([-low_rows, none]).amax(), torch.cat([high_rows, none]).amax()]
    group = Group(moments(_LAYOUT, sums, maxima), _FINALIZERS)
    return Stats({"loss": group})
