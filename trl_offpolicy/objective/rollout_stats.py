"""The diagnostics of the rollouts themselves: ``rollout/*``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer, fraction
from trl_offpolicy.functional.moments import Layout, Moments, moments
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.types import PolicyBatch


def _lag_max(m: Moments) -> Tensor:
    """Largest version lag of a token."""
    return m["lag_max"].clamp(min=0.0)


GROUPS: Mapping[str, tuple[Layout, Mapping[str, Finalizer]]] = {
    "rollout": (Layout(sums=("responses", "tokens")), {"response_length_mean": fraction("tokens", "responses")}),
    "rollout#lag": (
        Layout(sums=("tokens", "lag"), maxima=("lag_max",)),
        {"version_lag_mean": fraction("lag", "tokens"), "version_lag_max": _lag_max},
    ),
    "rollout#versions": (
        Layout(sums=("responses", "crossing")),
        {"cross_version_fraction": fraction("crossing", "responses")},
    ),
    "rollout#reward": (
        Layout(sums=("weight", "weighted_reward")),
        {"reward_reweighted": fraction("weighted_reward", "weight")},
    ),
    "rollout#support": (Layout(sums=("tokens", "outside")), {"outside_fraction": fraction("outside", "tokens")}),
}
"""Names of the moments and finalisers, by group; ``rollout#support`` is made by :func:`support_stats`."""


def _group(name: str, sums: list[Tensor], maxima: list[Tensor] | None = None) -> Group:
    layout, finalizers = GROUPS[name]
    return Group(moments(layout, sums, maxima), finalizers)


def support_stats(outside: Tensor, mask: Tensor) -> Stats:
    """``rollout/outside_fraction``: share of the sampled tokens that the trainer's own truncation would have cut.

    Args:
        outside: (B, T) bool, those tokens.
        mask: (B, T) bool, trainable tokens.
    """
    return Stats({"rollout#support": _group("rollout#support", [mask.sum(), (outside & mask).sum()])})


@torch.no_grad()
def rollout_stats(batch: PolicyBatch, weights: Tensor) -> Stats:
    """Lengths; the lag where versions are known; rows of several versions; the reweighted reward where rewards are.

    Args:
        batch: the rollouts.
        weights: (B, T) applied importance weights.
    """
    counts = batch.mask.sum(-1)
    groups = {"rollout": _group("rollout", [(counts > 0).sum(), counts.sum()])}
    if batch.policy_versions is not None and batch.current_version is not None:
        groups["rollout#lag"] = _lag(batch.current_version - batch.policy_versions, batch.mask)
    if batch.policy_versions is not None and batch.policy_versions.dim() == 2:
        groups["rollout#versions"] = _cross(batch.policy_versions, batch.mask)
    if batch.rewards is not None:
        groups["rollout#reward"] = _reward(batch, weights, counts)
    return Stats(groups)


def _lag(lag: Tensor, mask: Tensor) -> Group:
    by_token = (lag if lag.dim() == 2 else lag.unsqueeze(1)).expand_as(mask)
    top = torch.where(mask, by_token.double(), -torch.inf).flatten()
    maximum = torch.cat([top, top.new_full((1,), -torch.inf)]).amax()
    return _group("rollout#lag", [mask.sum(), torch.where(mask, by_token, 0).sum()], [maximum])


def _cross(versions: Tensor, mask: Tensor) -> Group:
    """Responses whose trainable tokens are of more than one version."""
    newest = torch.where(mask, versions, versions.min()).amax(-1)
    oldest = torch.where(mask, versions, versions.max()).amin(-1)
    some = mask.any(-1)
    return _group("rollout#versions", [some.sum(), (some & (newest > oldest)).sum()])


def _reward(batch: PolicyBatch, weights: Tensor, counts: Tensor) -> Group:
    """A response counts with its mean weight; those without a reward or a token do not."""
    assert batch.rewards is not None
    mean = torch.where(batch.mask, weights.expand_as(batch.mask).float(), 0.0).sum(-1) / counts.clamp(min=1)
    usable = (counts > 0) & (batch.rewards.abs() < torch.inf)
    weight = torch.where(usable, mean, 0.0)
    total = (weight * torch.where(usable, batch.rewards.float(), 0.0)).sum()
    return _group("rollout#reward", [weight.sum(), total])
