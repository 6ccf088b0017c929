"""The contract of a weight and of a keep term: what it sees of a batch, what it returns and what it declares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional import masks
from trl_offpolicy.functional.levels import Level, aggregate, aggregate_ratio, turn_index
from trl_offpolicy.parts import Part, overridable
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
        keep: (B, 1) or (B, T) bool, True = still in the loss.
        group_rewards: (B, G) rewards of all responses of the row's group; one that is not finite does not count.
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
    group_rewards: Tensor | None = None

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
        """The arguments of ``aggregate`` besides values, mask and level."""
        return {"turn_ids": self._turns(level), "group_ids": self.group_ids, "zero_outside": self.zero_outside}

    @property
    def zero_outside(self) -> bool:
        """True if log-ratios, and so their statistics, are 0 outside ``mask``: they were made with this mask."""
        return self.trainable is self.mask

    def _turns(self, level: Level) -> Tensor | None:
        """Turn ids of the trainable tokens: a token that was dropped inside a turn does not split the turn."""
        if self.turn_ids is None and self.trainable is not None and level in ("turn", "turn_mean"):
            return turn_index(self.trainable)
        return self.turn_ids

    def _usable_denominator(self) -> Tensor | None:
        """Log-probs, 0 (probability 1) where not finite: an unobserved ratio of 1 then has divergence 0."""
        if self.denominator_logps is None:
            return None
        logps = self.denominator_logps.float().clamp(max=0.0)
        return torch.where(logps > -torch.inf, logps, 0.0)


class Violations(NamedTuple):
    """Where a term's statistic is above or below what it tolerates: bool (B, 1) or (B, T), None = impossible."""

    above: Tensor | None
    below: Tensor | None


class Weighed(NamedTuple):
    """A weight that equals its ratio (``raw``), and after caps, bands and shapes (``bounded``); (B, 1) or (B, T).

    ``shaped``: every weight differs from its ratio by design, so none counts as truncated.
    """

    raw: Tensor
    bounded: Tensor
    shaped: bool = False


class Weight(Part):
    """A map from a ratio to a factor of the policy loss. Subclass it as a frozen, keyword-only dataclass.

    A subclass must write :meth:`weigh`. Everything else has the default below. A field, a class attribute or a property
    of the same name in the subclass replaces it.
    """

    @overridable
    def ratio(self) -> Ratio:
        """The two policies that :attr:`TermInputs.log_ratios` compares, numerator first."""
        return "old/sampling"

    @overridable
    def level(self) -> Level:
        """Level at which the ratio is aggregated."""
        return "token"

    @overridable
    def scope(self) -> Scope:
        """What it must see at once: one row, a micro-batch, a prompt group or the generation batch."""
        return "row"

    @overridable
    def formula(self) -> str:
        """One line for reports and the docs, e.g. ``w = min(rho_t, 2)``."""
        return f"w = {type(self).__name__}({settings_text(self, leave_out=('ratio', 'scope'))})"

    @abstractmethod
    def weigh(self, inputs: TermInputs) -> Weighed:
        """The weights of a batch, raw and bounded: (B, 1), or (B, T) where they differ between tokens."""


class KeepTerm(Part):
    """A rule that drops tokens or sequences from the policy loss. Subclass it as a frozen, keyword-only dataclass.

    A subclass must write :meth:`violations`. Everything else has the default below. A field, a class attribute or a
    property of the same name in the subclass replaces it.
    """

    reads_ratio: ClassVar[bool] = True
    """Whether it reads the ratio at all. A rule on age, or on what earlier terms dropped, does not."""

    reads_advantages: ClassVar[bool] = False
    """Whether it reads the advantages, which must then be known before it runs."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Fields that the batch must have besides the log-probs of its ratio."""

    @overridable
    def name(self) -> str:
        """Name in the metrics ``keep/<name>/*``. The default is the name in YAML, else the name of the class."""
        return self.type_name or type(self).__name__

    @overridable
    def ratio(self) -> Ratio:
        """The two policies that :attr:`TermInputs.log_ratios` compares, numerator first."""
        return "old/sampling"

    @overridable
    def scope(self) -> Scope:
        """What it must see at once: one row, a micro-batch, a prompt group or the generation batch."""
        return "row"

    @overridable
    def formula(self) -> str:
        """One line for reports and the docs, e.g. ``keep if 0.99 <= rho_geo <= 1.01``."""
        return f"{self.name}: {settings_text(self, leave_out=('ratio', 'scope'))}"

    @abstractmethod
    def violations(self, inputs: TermInputs) -> Violations:
        """The tokens (B, T) or sequences (B, 1) that break the rule; they leave the policy loss."""


def is_late(part: Weight | KeepTerm) -> bool:
    """True if the term is decided in the loss step: it reads the current policy, or its scope is a micro-batch."""
    return part.ratio != "old/sampling" or part.scope == "micro_batch"


# ------------------------------------------------------------------------------------------------- words of formulas

RHO: dict[Level, str] = {
    "token": "rho_t",
    "turn": "rho_turn",
    "turn_mean": "rho_turn_geo",
    "prefix": "rho_1:t",
    "sequence": "rho_seq",
    "sequence_mean": "rho_geo",
    "sequence_max": "max_t rho_t",
    "sequence_min": "min_t rho_t",
    "group": "rho_group",
}
"""How a formula writes the ratio at each level."""


def number(value: float) -> str:
    """Shortest text of a number: 2.0 -> 2, 0.0001 -> 0.0001, 0.00001 -> 1e-05."""
    return f"{value:.6g}"


def between(middle: str, low: float | None, high: float | None) -> str:
    """The text ``low <= middle <= high``, without the sides that are open."""
    left = "" if low is None else f"{number(low)} <= "
    right = "" if high is None else f" <= {number(high)}"
    return f"{left}{middle}{right}"


def settings_text(item: Any, *, leave_out: Iterable[str] = ()) -> str:
    """The fields of a dataclass as text, e.g. ``low=0.5, high=2``."""
    return mapping_text({f.name: getattr(item, f.name) for f in fields(item) if f.name not in tuple(leave_out)})


def mapping_text(values: Mapping[str, Any]) -> str:
    """The entries of a mapping as text, e.g. ``low=0.5, high=2``."""
    return ", ".join(f"{key}={number(v) if isinstance(v, float) else v}" for key, v in values.items()) or "-"
