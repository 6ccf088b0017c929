"""Corrections of wide scope: decided once on the whole generation batch, before a trainer shuffles and splits it.

``stage(objective)`` cuts a correction in two; :meth:`Stages.decide` runs the early part and returns tensors that
travel with the rows. The loss step puts them into its PolicyBatch as ``decided_weights`` and ``decided_keep``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trl_offpolicy.corrections import Correction
from trl_offpolicy.functional.advantages import ScaleRewards, group_advantages
from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.objectives import Objective
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import PolicyBatch


@dataclass(frozen=True)
class Decided:
    """What the early part says about a generation batch.

    Args:
        rows: ``decided_weights`` (B, T), or (B, 1) where they are constant over the response, ``decided_keep`` (B, T)
            and, with a baseline of kept responses, the (B,) ``advantages`` that replace the old ones.
        kept_tokens: 0-d, kept trainable tokens of all ranks.
        kept_sequences: 0-d, responses of all ranks with a kept token.
        stats: diagnostics of the early part, once per generation batch.
    """

    rows: dict[str, Tensor]
    kept_tokens: Tensor
    kept_sequences: Tensor
    stats: Stats


@dataclass(frozen=True)
class Stages:
    """The two parts of an objective whose correction or denominator is of wide scope."""

    early: Correction
    late: Objective

    def decide(self, batch: PolicyBatch, *, scale_rewards: ScaleRewards = "group") -> Decided:
        """Run the early part. Called by all ranks, each with its rows of the generation batch.

        Raises:
            ValueError: the baseline of kept responses is asked for, but the batch lacks rewards or group_ids.
        """
        out = self.early(batch)
        weights = out.weights if out.sequence_weights is None else out.sequence_weights
        rows = {"decided_weights": weights, "decided_keep": out.keep_mask}
        kept_rows = out.keep_mask.any(-1)
        if self.early.baseline == "kept":
            if batch.rewards is None or batch.group_ids is None:
                raise ValueError("rewards and group_ids must be given for baseline='kept', but got None.")
            rows["advantages"] = group_advantages(
                batch.rewards, batch.group_ids, kept_rows, scale_rewards=scale_rewards
            )
        kept = sum_ranks(torch.stack([out.keep_mask.sum(), kept_rows.sum()]))
        groups = {
            name: group
            for name, group in out.stats.groups.items()
            if name != "keep" or not self._drops_later  # else the loss steps count what is dropped in all
        }
        return Decided(rows, kept[0], kept[1], Stats(groups))

    @property
    def _drops_later(self) -> bool:
        late = self.late.correction
        return late is not None and bool(late.keep)


def stage(objective: Objective) -> Stages | None:
    """The two parts of an objective of wide scope; None where a micro-batch is enough.

    Raises:
        ValueError: the parts cannot be told apart without changing what they do.
    """
    correction = objective.correction or Correction()
    if objective.scope not in ("group", "generation_batch"):
        return None
    early, late = correction.split()
    if objective.denominator == "kept" and late.keep:
        raise ValueError(
            f"denominator must be 'all' with {late.keep[0].name}, which reads the current policy: what a whole "
            "optimizer step keeps is not known at its first micro-batch."
        )
    return Stages(early, replace(objective, correction=late))
