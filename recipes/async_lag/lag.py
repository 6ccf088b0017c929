"""Stale rollouts: which version samples a batch, what the batch knows of it, and the objectives that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import trl_offpolicy as op
from benchmarks.lab.loop import Rollouts, policy_batch, rounded
from benchmarks.lab.sorting import Sorter
from trl_offpolicy.proximal import InterpolatedProximal, RecomputedProximal

VARIANTS: Mapping[str, str] = {
    "naive": "naive PPO",
    "decoupled": "decoupled PPO",
    "recomputed": "recomputed, no weight",
    "a3po": "A-3PO",
}
LAGS: tuple[int | None, ...] = (0, 1, 4, 8, None)
"""None = unbounded."""
ONLY_AT: Mapping[str, tuple[int | None, ...]] = {"recomputed": (4, 8), "a3po": (4, 8)}
"""Lags of the variants that the table does not have everywhere."""


def sampling_version(step: int, lag: int | None, *, speed: float) -> int:
    """The weight version that samples the batch of training step ``step`` (from 1; it learns at version step - 1).

    With a bound the sampler always is ``lag`` versions behind, as far as there are any: a full queue. Without one
    (None) it makes ``speed`` batches a training step, first in first out, and nothing holds it back: the lag is
    (1 - 1/speed) of the steps made so far.

    Example:
        >>> [sampling_version(step, 2, speed=2.0) for step in range(1, 6)]
        [0, 0, 0, 1, 2]
        >>> [sampling_version(step, None, speed=2.0) for step in range(1, 6)]
        [0, 0, 1, 1, 2]
    """
    return max(0, step - 1 - lag) if lag is not None else int((step - 1) / speed)


def objective_of(variant: str) -> op.Objective:
    """The kit's objective of a variant; PPO's clip at 0.2 in all of them. mu = the policy that sampled, stale.

    - naive: one ratio pi / mu, clipped around mu.
    - decoupled: AReaL's, min(proximal / mu, 2) x PPO's clip around the proximal policy, the learner before the step.
    - recomputed: the same without the weight: the staleness is not corrected at all (verl's recomputed old log-probs).
    - a3po: the decoupled loss with a proximal policy interpolated between mu and pi by age, no forward.

    Raises:
        ValueError: an unknown variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {list(VARIANTS)}, but got {variant!r}.")
    weight = op.TruncateWeight(level="token", max_weight=2.0)
    correction = op.Correction(weight=weight if variant in ("decoupled", "a3po") else None, measure=("total",))
    clip = op.losses.PPOClip(low=0.2, high=0.2)
    if variant == "naive":
        return op.Objective(policy_loss=clip, correction=correction, mode="bypass")
    centre = InterpolatedProximal() if variant == "a3po" else RecomputedProximal()
    return op.Objective(policy_loss=clip, correction=correction, proximal=centre)


@dataclass(frozen=True)
class StaleBatch:
    """Makes the PolicyBatch of some rows of one generation.

    Sampled by the current version, the learner's log-probs before the step are those of pi_old; by an older one they
    are the proximal policy's, and nobody has pi_old.

    Args:
        sampled_by: version that sampled all rows.
        version: version of the learner before the step.
        proximal: False where the objective makes its own centre.
    """

    sampled_by: int
    version: int
    proximal: bool = True

    def __call__(self, model: nn.Module, rollouts: Rollouts, index: Tensor) -> op.PolicyBatch:
        """(rows, T), with gradient in ``per_token_logps``."""
        stale = self.sampled_by < self.version
        return policy_batch(
            model,
            rollouts,
            index,
            old_per_token_logps=None if stale else rollouts.old[index],
            proximal_per_token_logps=rollouts.old[index] if stale and self.proximal else None,
            policy_versions=torch.full((len(index),), self.sampled_by),
            current_version=self.version,
        )


class History:
    """The weights of past versions, as long as somebody may still sample from them."""

    def __init__(self, model: Sorter) -> None:
        self._kept = {0: rounded(model, None)}

    def add(self, version: int, model: Sorter) -> None:
        """Remember ``model`` as ``version``."""
        self._kept[version] = rounded(model, None)

    def sampler(self, version: int) -> Sorter:
        """The model of ``version``; older ones are forgotten, because lags never lead back."""
        self._kept = {kept: model for kept, model in self._kept.items() if kept >= version}
        return self._kept[version]
