"""What a weight or keep term sees of a batch, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trl_offpolicy.functional import masks
from trl_offpolicy.functional.levels import Level, aggregate, aggregate_ratio, turn_index
from trl_offpolicy.types import Ratio, Scope


@dataclass(frozen=True)
class TermInputs:
    """One ratio of a batch of B responses of T positions. Nothing carries gradient.

    Args:
        log_ratios: (B, T) float32 of the term's ratio, nats, 0 where not observed.
        mask: (B, T) bool, the tokens to measure.
        advantages: (B, 1) or (B, T).
        denominator_logps: (B, T) log-probs of the ratio's denominator.
        turn_ids: (B, T) integer; None = runs of ``trainable`` tokens.
        group_ids: (B,) integer prompt group.
        version_lags: (B, 1) or (B, T) integer, weight versions between sampling and now.
        trainable: (B, T) bool, all trainable tokens, also those that ``mask`` leaves out; None = ``mask``.
        keep: (B, 1) or (B, T) bool, what is still in the loss.
    """

    log_ratios: Tensor
    mask: Tensor
    advantages: Tensor
    denominator_logps: Tensor | None = None
    turn_ids: Tensor | None = None
    group_ids: Tensor | None = None
    version_lags: Tensor | None = None
    trainable: Tensor | None = None
    keep: Tensor | None = None

    def log_ratio_at(self, level: Level) -> Tensor:
        """Log-ratio at ``level``, nats, (B, 1) or (B, T)."""
        return aggregate(self.log_ratios, self.mask, level, **self._units(level))

    def ratio_at(self, level: Level) -> Tensor:
        """Ratio at ``level``, (B, 1) or (B, T)."""
        return aggregate_ratio(self.log_ratios, self.mask, level, **self._units(level))

    def statistic_at(self, statistic: str, level: Level) -> Tensor:
        """Divergence statistic per token, then aggregated: (B, 1) or (B, T)."""
        denominator = self._usable_denominator() if statistic in masks.PROBABILITY_STATISTICS else None
        values = masks.divergence(self.log_ratios, statistic, denominator)
        return aggregate(values, self.mask, level, **self._units(level))

    def _units(self, level: Level) -> dict[str, Any]:
        """What ``aggregate`` needs to know besides the values."""
        return {"turn_ids": self._turns(level), "group_ids": self.group_ids, "zero_outside": self.zero_outside}

    @property
    def zero_outside(self) -> bool:
        """Log-ratios, and so their statistics, are 0 outside ``mask``: it is the mask they were made with."""
        return self.trainable is self.mask

    def _turns(self, level: Level) -> Tensor | None:
        """Turn ids; a dropped token in the middle of a turn does not make it two."""
        if self.turn_ids is None and self.trainable is not None and level in ("turn", "turn_mean"):
            return turn_index(self.trainable)
        return self.turn_ids

    def _usable_denominator(self) -> Tensor | None:
        """Log-probs with 0 for what is not finite: probability 1, where an unobserved ratio of 1 has divergence 0."""
        if self.denominator_logps is None:
            return None
        logps = self.denominator_logps.float().clamp(max=0.0)
        return torch.where(logps > -torch.inf, logps, 0.0)


class Violations(NamedTuple):
    """Where a term's statistic is above or below what it tolerates; bool (B, 1) or (B, T), None = cannot be."""

    above: Tensor | None
    below: Tensor | None


class Weighed(NamedTuple):
    """A weight as the ratio says (``raw``) and after caps, bands and shapes (``bounded``); (B, 1) or (B, T).

    ``shaped``: every weight differs from its ratio by design, so that none counts as truncated.
    """

    raw: Tensor
    bounded: Tensor
    shaped: bool = False


class Weight(Protocol):
    """A map from a ratio to a factor of the policy loss."""

    @property
    def scope(self) -> Scope:
        """What it must see at once."""

    @property
    def level(self) -> Level:
        """Level at which the ratio is aggregated."""

    @property
    def ratio(self) -> Ratio:
        """Which two policies."""

    def weigh(self, inputs: TermInputs) -> Weighed:
        """Weights of a batch."""


class KeepTerm(Protocol):
    """A rule that drops tokens or sequences from the policy loss."""

    @property
    def scope(self) -> Scope:
        """What it must see at once."""

    @property
    def ratio(self) -> Ratio:
        """Which two policies."""

    @property
    def name(self) -> str:
        """Name in the metric ``keep/<name>/dropped_fraction``."""

    def violations(self, inputs: TermInputs) -> Violations:
        """Which units break the rule."""


def is_late(part: Weight | KeepTerm) -> bool:
    """Decided in the loss step: it reads the current policy, or wants to see a micro-batch only."""
    return part.ratio != "old/sampling" or part.scope == "micro_batch"
