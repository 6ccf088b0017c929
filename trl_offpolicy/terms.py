"""Weights and keep terms: what can be asked of a ratio, as small frozen dataclasses.

A weight maps a ratio to a factor of the policy loss; a keep term says which tokens leave it. Both only hold their
settings and check them; :class:`~trl_offpolicy.Correction` runs them on a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, get_args

from torch import Tensor

from trl_offpolicy.functional import masks, weights
from trl_offpolicy.functional.levels import LEVELS, Level, aggregate, aggregate_ratio
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.types import RATIOS, Ratio, Scope, check_number


class Violations(NamedTuple):
    """Where a term's statistic is above or below what it tolerates; bool (B, 1) or (B, T), None = cannot be."""

    above: Tensor | None
    below: Tensor | None


class Weight(Protocol):
    """A map from a ratio to a loss weight."""

    scope: ClassVar[Scope]

    @property
    def level(self) -> Level:
        """Level at which the ratio is aggregated."""

    @property
    def ratio(self) -> Ratio:
        """Which two policies."""

    def bound(self, ratio: Tensor) -> Tensor:
        """The weight of a raw ratio, same shape."""


class KeepTerm(Protocol):
    """A rule that drops tokens or sequences from the policy loss."""

    scope: ClassVar[Scope]

    @property
    def ratio(self) -> Ratio:
        """Which two policies."""

    @property
    def name(self) -> str:
        """Name in the metric ``keep/<name>/dropped_fraction``."""

    def violations(self, log_ratios: Tensor, mask: Tensor, advantages: Tensor) -> Violations:
        """Which units break the rule.

        Args:
            log_ratios: (B, T) float32 of :attr:`ratio`, nats, 0 where not observed.
            mask: (B, T) bool, the tokens to measure.
            advantages: (B, 1) or (B, T).
        """


@dataclass(frozen=True, kw_only=True)
class TruncateWeight:
    """Truncated importance sampling (TIS): min(rho, max_weight), optionally with a floor.

    Reference: Yao et al. 2025, TIS; token and sequence forms as in SkyRL, verl and TRL.
    """

    max_weight: float
    level: Level = "token"
    min_weight: float | None = None
    ratio: Ratio = "old/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio(self.level, self.ratio)
        check_number("max_weight", self.max_weight)
        _check_ratio_bounds("min_weight", self.min_weight, "max_weight", self.max_weight)

    def bound(self, ratio: Tensor) -> Tensor:
        """min(max(ratio, min_weight), max_weight)."""
        return weights.truncate_weight(ratio, max_weight=self.max_weight, min_weight=self.min_weight)


@dataclass(frozen=True, kw_only=True)
class BandWeight:
    """Masked importance sampling (MIS, IcePop): the raw ratio inside [low, high], weight 0 outside.

    Both bounds must be said; None = open.
    """

    low: float | None
    high: float | None
    level: Level = "token"
    ratio: Ratio = "old/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio(self.level, self.ratio)
        _check_ratio_bounds("low", self.low, "high", self.high)

    def bound(self, ratio: Tensor) -> Tensor:
        """Ratio inside the band, 0 outside."""
        return weights.band_weight(ratio, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class RawWeight:
    """Vanilla importance sampling: rho itself. Unbiased at sequence level, unbounded variance; for ablation."""

    level: Level = "token"
    ratio: Ratio = "old/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio(self.level, self.ratio)

    def bound(self, ratio: Tensor) -> Tensor:
        """The ratio unchanged."""
        return ratio


@dataclass(frozen=True, kw_only=True)
class RatioBand:
    """Keep what has its ratio at ``level`` inside [low, high] (inclusive). Both must be said; None = open.

    ``sequence_mean`` is the geometric mask (length-invariant), ``sequence`` the product mask, ``token`` the token
    mask.
    """

    low: float | None
    high: float | None
    level: Level = "sequence_mean"
    ratio: Ratio = "old/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio(self.level, self.ratio)
        _check_ratio_bounds("low", self.low, "high", self.high)

    @property
    def name(self) -> str:
        """``ratio_band_<level>``."""
        return f"ratio_band_{self.level}"

    def violations(self, log_ratios: Tensor, mask: Tensor, advantages: Tensor) -> Violations:
        """Ratio above ``high``, below ``low``."""
        ratio = aggregate_ratio(log_ratios, mask, self.level)
        return _outside(ratio, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class DivergenceBand:
    """Keep what has its divergence statistic at ``level`` inside [low, high], in nats.

    The statistic (k1, k2 or k3) is taken per token, then averaged (sequence_mean) or summed (sequence).
    """

    statistic: str
    high: float | None
    low: float | None = None
    level: Level = "sequence_mean"
    ratio: Ratio = "old/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio(self.level, self.ratio)
        if self.statistic not in ("k1", "k2", "k3"):
            raise ValueError(f"statistic must be one of 'k1', 'k2', 'k3', but got {self.statistic!r}.")
        _check_order("low", self.low, "high", self.high)
        if self.statistic != "k1" and self.high is not None and self.high <= 0:
            raise ValueError(
                f"high must be positive for {self.statistic}, which is never negative, but got {self.high}."
            )
        if self.statistic != "k1" and self.low is not None and self.low <= 0:
            raise ValueError(f"low can never fire for {self.statistic}, which is never negative, but got {self.low}.")
        if self.level != "sequence":
            self._check_reach()

    def _check_reach(self) -> None:
        """Bounds inside what the statistic of one log-ratio clamped to +-20 can reach (a sum has no such limit)."""
        c = LOG_RATIO_CLAMP
        largest = {"k1": c, "k2": c * c / 2, "k3": math.expm1(c) - c}[self.statistic]
        if self.high is not None and self.high >= largest:
            raise ValueError(
                f"high must be below {largest:.4g} nats for {self.statistic} to ever fire, but got {self.high}."
            )
        if self.low is not None and self.low <= -c:
            raise ValueError(f"low must be above {-c} nats for {self.statistic} to ever fire, but got {self.low}.")

    @property
    def name(self) -> str:
        """``divergence_<statistic>_<level>``."""
        return f"divergence_{self.statistic}_{self.level}"

    def violations(self, log_ratios: Tensor, mask: Tensor, advantages: Tensor) -> Violations:
        """Statistic above ``high``, below ``low``."""
        value = aggregate(masks.divergence(log_ratios, self.statistic), mask, self.level)
        return _outside(value, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class OutlierVeto:
    """Drop a whole sequence if any of its tokens has a ratio outside [low, high]. None = open."""

    low: float | None
    high: float | None
    ratio: Ratio = "old/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio("token", self.ratio)
        _check_ratio_bounds("low", self.low, "high", self.high)

    @property
    def name(self) -> str:
        """``outlier_veto``."""
        return "outlier_veto"

    def violations(self, log_ratios: Tensor, mask: Tensor, advantages: Tensor) -> Violations:
        """Sequences with a token above ``high``, below ``low``."""
        above = below = None
        if self.high is not None:
            above = ~masks.outlier_veto(log_ratios, mask, low=None, high=self.high)
        if self.low is not None:
            below = ~masks.outlier_veto(log_ratios, mask, low=self.low, high=None)
        return Violations(above, below)


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask:
    """DeepSeek-V3.2 OPSM: drop negative-advantage sequences with mean log(mu / pi) above ``max_divergence`` nats.

    Measures the current policy, so it is taken anew at every step. ``ratio="current/old"`` measures staleness only.
    """

    max_divergence: float
    ratio: Ratio = "current/sampling"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level_and_ratio("sequence_mean", self.ratio)
        check_number("max_divergence", self.max_divergence)
        if not 0 <= self.max_divergence < LOG_RATIO_CLAMP:
            raise ValueError(
                f"max_divergence must be in [0, {LOG_RATIO_CLAMP}) nats to ever fire, but got {self.max_divergence}."
            )

    @property
    def name(self) -> str:
        """``off_policy_sequence_mask``."""
        return "off_policy_sequence_mask"

    def violations(self, log_ratios: Tensor, mask: Tensor, advantages: Tensor) -> Violations:
        """Reported as ``below``: the policy finds the text too unlikely."""
        mean = aggregate(log_ratios, mask, "sequence_mean")
        keep = masks.off_policy_sequence_mask(mean, advantages, max_divergence=self.max_divergence)
        return Violations(None, ~keep)


def _outside(values: Tensor, low: float | None, high: float | None) -> Violations:
    return Violations(None if high is None else values > high, None if low is None else values < low)


def _check_level_and_ratio(level: str, ratio: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"level must be one of {list(get_args(Level))}, but got {level!r}.")
    if ratio not in RATIOS:
        raise ValueError(f"ratio must be one of {list(RATIOS)}, but got {ratio!r}.")


def _check_order(low_field: str, low: float | None, high_field: str, high: float | None) -> None:
    if low is None and high is None:
        raise ValueError(f"{low_field} and {high_field} must not both be None (such a term can never fire).")
    for field, value in ((low_field, low), (high_field, high)):
        if value is not None:
            check_number(field, value)
    if low is not None and high is not None and low > high:
        raise ValueError(f"{low_field} must be at most {high_field}, but got {low} > {high}.")


def _check_ratio_bounds(low_field: str, low: float | None, high_field: str, high: float | None) -> None:
    """Bounds on a ratio: positive, ordered, and inside what a log-ratio clamped to +-20 can reach."""
    _check_order(low_field, low, high_field, high)
    largest = math.exp(LOG_RATIO_CLAMP)
    if low is not None and not 1 / largest < low:
        hint = "write None for an open side"
        raise ValueError(f"{low_field} must be a ratio above {1 / largest:.1e} to ever fire ({hint}), but got {low}.")
    if high is not None and not 0 < high < largest:
        raise ValueError(f"{high_field} must be a ratio in (0, {largest:.1e}) to ever fire, but got {high}.")
