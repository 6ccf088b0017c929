"""Converts TRL's flat loss terms to (B, T) and back.

``AsyncGRPOTrainer`` folds the samples of a rank into one row and computes the loss over M terms, one per trained token.
A term has the packed position that predicts the token, its sampling log-prob, its advantage and its sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.types import PolicyBatch


@dataclass(frozen=True)
class PackedRows:
    """The place of each of M flat terms in (B, T).

    A term's column is its distance from the first trained token of its sample. So tool output between two turns is a
    gap in the mask, and runs of trained tokens remain turns.

    Args:
        rows: (M,) sample of each term.
        columns: (M,) place of each term within its sample.
        shape: (B, T).
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, segment_ids: Tensor, positions: Tensor) -> PackedRows:
        """The layout of terms with these samples (M,) and positions in them (M,), M at least 1.

        Raises:
            ValueError: there is no term, or two terms have the same place.

        Example:
            >>> PackedRows.of(torch.tensor([0, 0, 1]), torch.tensor([3, 5, 2])).columns
            tensor([0, 2, 0])
        """
        if not len(segment_ids):
            raise ValueError("segment_ids must have at least one term, but got none.")
        samples = int(segment_ids.max()) + 1
        first = torch.full((samples,), int(positions.max()) + 1, dtype=positions.dtype, device=positions.device)
        first = first.scatter_reduce(0, segment_ids, positions, "amin")
        columns = positions - first[segment_ids]
        layout = cls(segment_ids, columns, (samples, int(columns.max()) + 1))
        if int(layout.mask.sum()) != len(segment_ids):
            raise ValueError("positions must be distinct within a sample, but two terms have the same.")
        return layout

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: True where there is a term."""
        return self.scatter(torch.ones_like(self.rows, dtype=torch.bool), fill=False)

    def scatter(self, values: Tensor, *, fill: float) -> Tensor:
        """(M,) ``values`` placed into (B, T), with ``fill`` elsewhere. The result carries their gradient."""
        padded = torch.full(self.shape, fill, dtype=values.dtype, device=values.device)
        return padded.index_put((self.rows, self.columns), values)

    def gather(self, padded: Tensor) -> Tensor:
        """The (M,) values of the terms, read from a (B, T) tensor."""
        return padded[self.rows, self.columns]

    def by_sample(self, values: Tensor, *, fill: float) -> Tensor:
        """(B,) from (M,) values that are equal within a sample; ``fill`` if a sample has no term."""
        return torch.full(self.shape[:1], fill, dtype=values.dtype, device=values.device).index_put(
            (self.rows,), values
        )


def packed_batch(
    inputs: dict[str, Any], log_probs: Tensor, entropies: Tensor | None, *, current_version: int
) -> PolicyBatch:
    """The :class:`~trl_offpolicy.PolicyBatch` of a rank's packed row.

    Each sample is trained once and every batch makes one optimizer step. So the current policy, detached, is the
    proximal policy of that step. The batch has no old and proximal log-probs: the objective then uses it for both.

    Args:
        inputs: what :class:`~trl_offpolicy.trl.async_grpo.data.VersionedCollator` returns.
        log_probs: (N,) log-probs of the packed positions, with gradient.
        entropies: (N,) entropies of the packed positions, or None.
        current_version: version of the learner's weights.
    """
    chosen = inputs["token_index"] >= 0
    places = inputs["token_index"][chosen]
    positions = inputs["position_ids"][inputs["attention_mask"].bool()][places]
    layout = PackedRows.of(inputs["segment_id"][chosen], positions)
    logps = layout.scatter(log_probs[places].float(), fill=0.0)
    rewards = layout.by_sample(inputs["rewards"][chosen], fill=torch.nan)
    return PolicyBatch(
        per_token_logps=logps,
        sampling_per_token_logps=layout.scatter(inputs["old_log_probs"][chosen], fill=0.0),
        completion_mask=layout.mask,
        advantages=layout.by_sample(inputs["advantages"][chosen], fill=0.0),
        rewards=rewards,
        entropies=None if entropies is None else layout.scatter(entropies[places].float(), fill=0.0),
        policy_versions=layout.scatter(inputs["policy_versions"][chosen], fill=current_version),
        group_ids=layout.by_sample(inputs["group_ids"][chosen], fill=-1),
        current_version=current_version,
    )
