"""Keep terms that judge a response by itself, as small frozen dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_bool, check_choice, check_number, check_positive, check_whole
from trl_offpolicy.correction.terms.base import RHO, KeepTerm, TermInputs, Violations, between, number
from trl_offpolicy.correction.terms.checks import (
    check_group_level,
    check_level,
    check_order,
    check_ratio,
    check_ratio_bounds,
)
from trl_offpolicy.functional import masks
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, LOG_RATIO_LIMIT
from trl_offpolicy.functional.masks import STATISTICS, Statistic
from trl_offpolicy.functional.shaping import is_unanimous
from trl_offpolicy.types import Ratio, Scope

__all__ = [
    "DivergenceBand",
    "EqualRewards",
    "OffPolicySequenceMask",
    "OutlierVeto",
    "PrefixBudget",
    "ProbabilityDifferenceMask",
    "RatioBand",
    "StalenessBound",
    "SuffixVeto",
]

PrefixStatistic = Literal["binary_tv", "binary_kl"]

_ADDED_UP: tuple[Level, ...] = ("token", "turn", "turn_mean", "sequence", "sequence_mean", "group")
STATISTIC_LEVELS: dict[Statistic, tuple[Level, ...]] = {
    "k1": _ADDED_UP,
    "k2": (*_ADDED_UP, "sequence_max"),
    "k3": (*_ADDED_UP, "sequence_max"),
    "abs": (*_ADDED_UP, "sequence_max"),
    "prob_diff": ("token", "turn_mean", "sequence_mean", "group"),
    "binary_tv": (*_ADDED_UP, "sequence_max"),
    "binary_kl": (*_ADDED_UP, "sequence_max"),
    "binary_kl_both": (*_ADDED_UP, "sequence_max"),
}
"""The levels at which each statistic has a meaning. The extremes of the signed k1 are those of the ratio
(``RatioBand``), signed probability differences do not add up over tokens, and no statistic but the ratio accumulates
along a prefix."""

_OVER: dict[Level, str] = {
    "token": "{}_t",
    "turn": "sum_turn {}",
    "turn_mean": "mean_turn {}",
    "sequence": "sum_t {}",
    "sequence_mean": "mean_t {}",
    "sequence_max": "max_t {}",
    "group": "mean_group {}",
}
_STATISTIC_TEXT = {
    "abs": "|log rho|",
    "prob_diff": "(p - q)",
    "binary_tv": "|p - q|",
    "binary_kl": "KL_binary",
    "binary_kl_both": "max(KL_binary, reverse KL_binary)",
}


def reach(statistic: Statistic, level: Level) -> tuple[float, float]:
    """Least and largest value that a statistic can reach with log-ratios in +-20; a sum over tokens has no limit."""
    c = LOG_RATIO_CLAMP
    largest = {"k1": c, "k2": c * c / 2, "k3": math.expm1(c) - c, "abs": c, "binary_kl": c}
    largest |= {"prob_diff": 1.0, "binary_tv": 1.0}
    # Probabilities 1e-6 and 1 - 1e-6: (1 - 2e-6) log((1 - 1e-6) / 1e-6).
    largest["binary_kl_both"] = (1 - 2e-6) * math.log((1 - 1e-6) / 1e-6)
    most = math.inf if level in ("sequence", "turn") else largest[statistic]
    return (-most if statistic in ("k1", "prob_diff") else 0.0), most


@dataclass(frozen=True, kw_only=True)
class RatioBand(KeepTerm):
    """Keep what has its ratio at ``level`` inside [low, high] (inclusive). Both must be given; None = open.

    ``sequence_mean`` is the geometric mask (length-invariant), ``sequence`` the product mask, ``token`` the token
    mask, ``group`` drops all responses to a prompt together.
    """

    type_name: ClassVar[str] = "ratio_band"
    example: ClassVar[Mapping[str, Any]] = {"low": 0.5, "high": 2.0}
    low: float | None
    high: float | None
    level: Level = "sequence_mean"
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        check_level(self.level)
        check_ratio(self.ratio)
        check_group_level(self.level, self.ratio)
        check_ratio_bounds("low", self.low, "high", self.high)

    @property
    def scope(self) -> Scope:
        """``group`` if the level is ``group``, else ``row``."""
        return "group" if self.level == "group" else "row"

    @property
    def name(self) -> str:
        """Name in the metrics, ``ratio_band_<level>``."""
        return f"ratio_band_{self.level}"

    @property
    def formula(self) -> str:
        """The band, as ``keep if 0.99 <= rho_geo <= 1.01``."""
        return f"keep if {between(RHO[self.level], self.low, self.high)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """Where the ratio at ``level`` is above ``high``, and where it is below ``low``."""
        return _outside(inputs.ratio_at(self.level), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class DivergenceBand(KeepTerm):
    """Keep what has its divergence statistic at ``level`` inside [low, high] (inclusive).

    The statistic (see :func:`~trl_offpolicy.functional.masks.divergence`; nats, or a probability for prob_diff and
    binary_tv) is taken per token, then summed (turn, sequence), averaged (turn_mean, sequence_mean, group) or
    maximised (sequence_max: TRM, one bad token condemns the response). :data:`STATISTIC_LEVELS` lists the pairs.

    Reference: TRM, "trust region masking" (arXiv:2512.23075). Deviation: TRM's divergence is that of the whole
    vocabulary, this one is estimated from the sampled token, because rollouts carry no other log-prob.
    """

    type_name: ClassVar[str] = "divergence_band"
    example: ClassVar[Mapping[str, Any]] = {"statistic": "k3", "high": 0.1}
    statistic: Statistic
    high: float | None
    low: float | None = None
    level: Level = "sequence_mean"
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, STATISTICS)
        check_level(self.level, STATISTIC_LEVELS[self.statistic], why=f"what {self.statistic} has a meaning at")
        check_ratio(self.ratio)
        check_group_level(self.level, self.ratio)
        check_order("low", self.low, "high", self.high)
        self._check_reach()

    def _check_reach(self) -> None:
        """Raise unless the statistic can reach the bounds with log-ratios clamped to +-20."""
        least, largest = reach(self.statistic, self.level)
        signed = least < 0
        if not signed and self.high is not None and self.high <= 0:
            raise ValueError(
                f"high must be positive for {self.statistic}, which is never negative, but got {self.high}."
            )
        if not signed and self.low is not None and self.low <= 0:
            raise ValueError(
                f"low must be positive or None for {self.statistic}, which is never negative, but got {self.low}."
            )
        if self.high is not None and self.high >= largest:
            raise ValueError(
                f"high must be below {largest:.4g} for {self.statistic} to ever fire, but got {self.high}."
            )
        if signed and self.low is not None and self.low <= least:
            raise ValueError(f"low must be above {least} for {self.statistic} to ever fire, but got {self.low}.")

    @property
    def scope(self) -> Scope:
        """``group`` if the level is ``group``, else ``row``."""
        return "group" if self.level == "group" else "row"

    @property
    def name(self) -> str:
        """Name in the metrics, ``divergence_<statistic>_<level>``."""
        return f"divergence_{self.statistic}_{self.level}"

    @property
    def formula(self) -> str:
        """The band, as ``keep if mean_t k3 <= 0.01``. A band on k1 = -log rho is written as a band on rho."""
        if self.statistic == "k1":
            low, high = (None if bound is None else math.exp(-bound) for bound in (self.high, self.low))
            return f"keep if {between(RHO[self.level], low, high)}"
        name = _STATISTIC_TEXT.get(self.statistic, self.statistic)
        return f"keep if {between(_OVER[self.level].format(name), self.low, self.high)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """Where the statistic at ``level`` is above ``high``, and where it is below ``low``."""
        return _outside(inputs.statistic_at(self.statistic, self.level), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class ProbabilityDifferenceMask(KeepTerm):
    """Drop tokens whose probability moved too far in the direction the advantage pushes it (prime-rl).

    A token with positive advantage is dropped where p - q > high, one with negative advantage where p - q < low; p is
    the numerator's probability, q the denominator's. In probabilities, not ratios: rare tokens may move freely.
    """

    type_name: ClassVar[str] = "probability_difference"
    low: float = -0.2
    high: float = 0.2
    ratio: Ratio = "old/sampling"
    reads_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_number("low", self.low)
        check_number("high", self.high)
        if not -1 < self.low < 0 < self.high < 1:
            raise ValueError(f"low and high must be in (-1, 0) and (0, 1), but got {self.low} and {self.high}.")

    @property
    def formula(self) -> str:
        """Both sides, as ``drop if A > 0 and p - q > 0.2, or A < 0 and p - q < -0.2``."""
        return f"drop if A > 0 and p - q > {number(self.high)}, or A < 0 and p - q < {number(self.low)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """Tokens that moved too far up with a positive advantage, and too far down with a negative one."""
        moved = inputs.statistic_at("prob_diff", "token")
        return Violations((moved > self.high) & (inputs.advantages > 0), (moved < self.low) & (inputs.advantages < 0))


@dataclass(frozen=True, kw_only=True)
class PrefixBudget(KeepTerm):
    """CPPO: drop tokens that move on although they, or the prefix before them, are too far from the sampler.

    Two bounds on the divergence of the numerator from the denominator: ``high`` for a token, tighter at the start of
    the response (weights from 1 at the first token to ``min_weight`` at the last), and ``budget`` for the weighted mean
    of every prefix. A token whose advantage pushes it back is kept in any case: A (rho - 1) <= 0. See
    :func:`~trl_offpolicy.functional.masks.prefix_budget`.

    Args:
        high: delta, a probability (binary_tv) or nats (binary_kl). Published for TV: 0.15 for dense models, 0.2 for MoE
            models; for a KL 0.1.
        budget: delta_b. Published for TV: 0.02 with ``adaptive`` (base models), 0.015 without; for a KL 0.002.
        min_weight: w_min.
        statistic: of the sampled token against all others; the KL is that from the denominator to the numerator.
        adaptive: the budget of a response follows its own divergences, between ``budget`` and twice that.
        ratio: the numerator is the policy that is bounded.

    Reference: Mao et al. 2026, CPPO (arXiv:2606.10968), Eq. 8 to 10. The paper's main runs take the divergence over
    the 20 likeliest tokens; its ablation finds the binary one comparable, as here.
    """

    type_name: ClassVar[str] = "prefix_budget"
    high: float = 0.2
    budget: float = 0.02
    min_weight: float = 0.8
    statistic: PrefixStatistic = "binary_tv"
    adaptive: bool = True
    ratio: Ratio = "current/sampling"
    reads_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, get_args(PrefixStatistic))
        check_bool(adaptive=self.adaptive)
        check_ratio(self.ratio)
        check_positive(high=self.high, budget=self.budget, min_weight=self.min_weight)
        if self.min_weight > 1:
            raise ValueError(f"min_weight must be at most 1, the first token's weight, but got {self.min_weight}.")
        largest = reach(self.statistic, "token")[1]
        if self.high >= largest:
            raise ValueError(
                f"high must be below {largest:.4g} for {self.statistic} to ever fire, but got {self.high}."
            )

    @property
    def formula(self) -> str:
        """Both bounds, as ``drop if A (rho_t - 1) > 0 and w_t |p - q| > min(0.2, 0.2 + 0.02 W - S)``."""
        high, name = number(self.high), _STATISTIC_TEXT[self.statistic]
        return f"drop if A (rho_t - 1) > 0 and w_t {name} > min({high}, {high} + {number(self.budget)} W - S)"

    def violations(self, inputs: TermInputs) -> Violations:
        """The tokens that do not fit and move on, above or below a ratio of 1."""
        fits = masks.prefix_budget(
            inputs.statistic_at(self.statistic, "token"),
            inputs.mask,
            high=self.high,
            budget=self.budget,
            min_weight=self.min_weight,
            adaptive=self.adaptive,
        )
        up, down = inputs.log_ratios > 0, inputs.log_ratios < 0
        return Violations(~fits & up & (inputs.advantages > 0), ~fits & down & (inputs.advantages < 0))


@dataclass(frozen=True, kw_only=True)
class OutlierVeto(KeepTerm):
    """Drop a whole sequence if any of its tokens has a ratio outside [low, high]. None = open."""

    type_name: ClassVar[str] = "outlier_veto"
    example: ClassVar[Mapping[str, Any]] = {"low": 0.1, "high": 10.0}
    low: float | None
    high: float | None
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_ratio_bounds("low", self.low, "high", self.high)

    @property
    def formula(self) -> str:
        """The bounds, as ``drop the response unless every 0.0001 <= rho_t <= 100``."""
        return f"drop the response unless every {between('rho_t', self.low, self.high)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """Sequences (B, 1) with a token above ``high``, and with a token below ``low``."""
        veto = partial(masks.outlier_veto, inputs.log_ratios, inputs.mask, zero_outside=inputs.zero_outside)
        above = None if self.high is None else ~veto(low=None, high=self.high)
        below = None if self.low is None else ~veto(low=self.low, high=None)
        return Violations(above, below)


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask(KeepTerm):
    """DeepSeek-V3.2 OPSM: drop negative-advantage sequences with mean log(mu / pi) above ``max_divergence`` nats.

    By default it measures the current policy, so it is decided anew at every step and bounds mismatch and staleness
    together. ``ratio="current/old"`` measures only staleness, ``"old/sampling"`` only mismatch.
    """

    type_name: ClassVar[str] = "off_policy_sequence_mask"
    example: ClassVar[Mapping[str, Any]] = {"max_divergence": 0.1}
    max_divergence: float
    ratio: Ratio = "current/sampling"
    reads_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_number("max_divergence", self.max_divergence)
        if not 0 <= self.max_divergence < LOG_RATIO_LIMIT:
            raise ValueError(
                f"max_divergence must be in [0, {LOG_RATIO_LIMIT:.0f}) nats to ever fire, "
                f"but got {self.max_divergence}."
            )

    @property
    def formula(self) -> str:
        """The bound, as ``drop if A < 0 and -log rho_geo > 0.1``."""
        return f"drop if A < 0 and -log rho_geo > {number(self.max_divergence)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """The dropped sequences, as ``below``: the policy finds the text too unlikely."""
        mean = inputs.log_ratio_at("sequence_mean")
        keep = masks.off_policy_sequence_mask(mean, inputs.advantages, max_divergence=self.max_divergence)
        return Violations(None, ~keep)


@dataclass(frozen=True, kw_only=True)
class SuffixVeto(KeepTerm):
    """mu-GRPO: drop what follows a token with a ratio below ``low``, where the advantage is negative.

    The token itself stays. By default it measures the current policy against the one that sampled. See
    :func:`~trl_offpolicy.functional.masks.suffix_veto`.

    Reference: Tian et al. 2026, mu-GRPO (arXiv:2605.17570), negative-advantage veto. 1e-4 is the ratio of the project
    page's example; we have not seen the paper's own setting.
    """

    type_name: ClassVar[str] = "suffix_veto"
    example: ClassVar[Mapping[str, Any]] = {"low": 0.5}
    low: float = 1e-4
    ratio: Ratio = "current/sampling"
    reads_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_number("low", self.low)
        check_ratio_bounds("low", self.low, "high", None)

    @property
    def formula(self) -> str:
        """The bound, as ``drop if A < 0 and an earlier rho_t < 0.0001``."""
        return f"drop if A < 0 and an earlier rho_t < {number(self.low)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """The tokens after the trigger, as ``below``: the policy finds their prefix too unlikely."""
        keep = masks.suffix_veto(inputs.log_ratios, inputs.mask, inputs.advantages, low=self.low)
        return Violations(None, ~keep)


@dataclass(frozen=True, kw_only=True)
class StalenessBound(KeepTerm):
    """Drop responses that hold a token sampled more than ``max_lag`` weight versions ago.

    Needs ``policy_versions`` and ``current_version`` in the batch.
    """

    type_name: ClassVar[str] = "staleness_bound"
    example: ClassVar[Mapping[str, Any]] = {"max_lag": 2}
    max_lag: int
    ratio: ClassVar[Ratio] = "current/old"
    reads_ratio: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ("policy_versions", "current_version")

    def __post_init__(self) -> None:
        check_whole("max_lag", self.max_lag, least=0)

    @property
    def formula(self) -> str:
        """The oldest version that stays, as ``drop a response older than 4 versions``."""
        return f"drop a response older than {self.max_lag} versions"

    def violations(self, inputs: TermInputs) -> Violations:
        """Sequences (B, 1) whose oldest token has a lag above ``max_lag``."""
        if inputs.version_lags is None:
            raise ValueError(
                "policy_versions and current_version must be given for a staleness bound, but got None: the trainer "
                "must say which weights sampled and which it holds now."
            )
        lags = torch.where(inputs.mask, inputs.version_lags, 0)
        return Violations(lags.amax(-1, keepdim=True) > self.max_lag, None)


@dataclass(frozen=True, kw_only=True)
class EqualRewards(KeepTerm):
    """Drop the responses to a prompt on which all have the same reward: their group's baseline equals it (CompassMax).

    With a baseline of the group they have an advantage of 0: they add nothing to the policy gradient, and without
    ``denominator="kept"`` they make it smaller by counting as tokens. With any other baseline they do teach something,
    and dropping them is a bias. Needs ``group_rewards`` in the batch. A group with one reward stays.

    Args:
        tolerance: rewards that lie within this of each other are equal.

    Reference: CompassMax team 2025 (arXiv:2512.07710), zero-variance elimination; the tolerance is that of SkyRL.
    """

    type_name: ClassVar[str] = "equal_rewards"
    tolerance: float = 1e-6
    reads_ratio: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ("group_rewards",)

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance)
        if self.tolerance < 0:
            raise ValueError(f"tolerance must be at least 0, but got {self.tolerance}.")

    @property
    def formula(self) -> str:
        """The spread that counts as none, as ``drop a prompt with max R - min R <= 1e-06``."""
        return f"drop a prompt with max R - min R <= {number(self.tolerance)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """The rows (B, 1) whose group has at least two rewards and no spread."""
        if inputs.group_rewards is None:
            raise ValueError("group_rewards must be given for equal rewards, but got None.")
        return Violations(is_unanimous(inputs.group_rewards, tolerance=self.tolerance), None)


def _outside(values: Tensor, low: float | None, high: float | None) -> Violations:
    return Violations(None if high is None else values > high, None if low is None else values < low)
