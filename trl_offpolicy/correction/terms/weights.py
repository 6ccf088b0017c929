"""Weights: maps from a ratio to a factor of the policy loss, as small frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_offpolicy.checks import check_number, check_positive, check_proper_fraction
from trl_offpolicy.correction.terms.base import RHO, TermInputs, Weighed, Weight, between, number
from trl_offpolicy.correction.terms.checks import check_level, check_ratio, check_ratio_bounds, check_scope
from trl_offpolicy.functional import weights
from trl_offpolicy.functional.collective import gather_flat
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.functional.log_ratios import ratio_of
from trl_offpolicy.types import Ratio, Scope

__all__ = [
    "BandWeight",
    "ESSWeight",
    "PrefixMinWeight",
    "PrefixWeight",
    "RawWeight",
    "ShapedWeight",
    "TruncateWeight",
]

WEIGHT_LEVELS: tuple[Level, ...] = ("token", "turn", "turn_mean", "prefix", "sequence", "sequence_mean")
_NO_WEIGHT = "a maximum, a minimum or a group has no ratio of its own"


@dataclass(frozen=True, kw_only=True)
class TruncateWeight(Weight):
    """Truncated importance sampling (TIS): min(rho, max_weight), optionally with a floor.

    Without a floor it is the single-side cap of the logit-fusion study. Reference: Yao et al. 2025, TIS; token and
    sequence forms as in SkyRL, verl and TRL.
    """

    type_name: ClassVar[str] = "truncate"
    example: ClassVar[Mapping[str, Any]] = {"max_weight": 2.0}
    max_weight: float
    level: Level = "token"
    min_weight: float | None = None
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        _check(self.level, self.ratio)
        check_number("max_weight", self.max_weight)
        check_ratio_bounds("min_weight", self.min_weight, "max_weight", self.max_weight)

    def bound(self, ratio: Tensor) -> Tensor:
        """``min(max(ratio, min_weight), max_weight)``, the capped ratio."""
        return weights.truncate_weight(ratio, max_weight=self.max_weight, min_weight=self.min_weight)

    @property
    def formula(self) -> str:
        """``w = min(rho_t, 2)``, or with a floor ``w = clip(rho_t, 0.5, 2)``."""
        if self.min_weight is None:
            return f"w = min({RHO[self.level]}, {number(self.max_weight)})"
        return f"w = clip({RHO[self.level]}, {number(self.min_weight)}, {number(self.max_weight)})"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The ratio at ``level``, raw and capped, (B, 1) or (B, T)."""
        ratio = inputs.ratio_at(self.level)
        return Weighed(ratio, self.bound(ratio))


@dataclass(frozen=True, kw_only=True)
class BandWeight(Weight):
    """Masked importance sampling (MIS, IcePop): the raw ratio inside [low, high], weight 0 outside.

    Both bounds must be given; None = open. Reference: Ling team 2025 (IcePop); Liu, Li et al. 2025 (MIS).
    """

    type_name: ClassVar[str] = "band"
    example: ClassVar[Mapping[str, Any]] = {"low": 0.5, "high": 2.0}
    low: float | None
    high: float | None
    level: Level = "token"
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        _check(self.level, self.ratio)
        check_ratio_bounds("low", self.low, "high", self.high)

    def bound(self, ratio: Tensor) -> Tensor:
        """The ratio if it is inside the band, 0 if it is outside."""
        return weights.band_weight(ratio, low=self.low, high=self.high)

    @property
    def formula(self) -> str:
        """``w = rho_t if 0.5 <= rho_t <= 5 else 0``."""
        rho = RHO[self.level]
        return f"w = {rho} if {between(rho, self.low, self.high)} else 0"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The ratio as raw weight; the same with 0 outside the band as bounded weight."""
        ratio = inputs.ratio_at(self.level)
        return Weighed(ratio, self.bound(ratio))


@dataclass(frozen=True, kw_only=True)
class RawWeight(Weight):
    """Vanilla importance sampling: rho itself. Unbiased at sequence level, unbounded variance; for ablation."""

    type_name: ClassVar[str] = "raw"
    level: Level = "token"
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        _check(self.level, self.ratio)

    def bound(self, ratio: Tensor) -> Tensor:
        """The ratio itself, without any bound."""
        return ratio

    @property
    def formula(self) -> str:
        """``w = rho_t`` at level ``token``."""
        return f"w = {RHO[self.level]}"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The ratio as raw and as bounded weight, since nothing bounds it."""
        ratio = inputs.ratio_at(self.level)
        return Weighed(ratio, ratio)


@dataclass(frozen=True, kw_only=True)
class ShapedWeight(Weight):
    """r / (r + gamma), the shaped ratio of the logit-fusion study: bounded by 1, smooth, 1 / (1 + gamma) on-policy.

    Reference: Zhang et al. 2026, "Logit fusion".
    """

    type_name: ClassVar[str] = "shaped"
    example: ClassVar[Mapping[str, Any]] = {"gamma": 0.5}
    gamma: float
    level: Level = "token"
    ratio: Ratio = "old/sampling"

    def __post_init__(self) -> None:
        _check(self.level, self.ratio)
        check_positive(gamma=self.gamma)

    @property
    def formula(self) -> str:
        """``w = rho_t / (rho_t + gamma)`` with the value of gamma."""
        rho = RHO[self.level]
        return f"w = {rho} / ({rho} + {number(self.gamma)})"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The ratio as raw weight, ``rho / (rho + gamma)`` as bounded weight; none counts as truncated."""
        ratio = inputs.ratio_at(self.level)
        return Weighed(ratio, weights.shaped_weight(ratio, gamma=self.gamma), shaped=True)


@dataclass(frozen=True, kw_only=True)
class PrefixMinWeight(Weight):
    """MinPRO: rho_t times the smallest ratio strictly before t, optionally capped.

    The paper puts it into the policy ratio (preset ``paper/minpro-policy``). As a weight it goes with every loss.

    Reference: Lei et al. 2026, MinPRO (arXiv:2601.22718).
    """

    type_name: ClassVar[str] = "prefix_min"
    max_weight: float | None = None
    ratio: Ratio = "old/sampling"
    level: ClassVar[Level] = "prefix"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.max_weight is not None:
            check_ratio_bounds("min_weight", None, "max_weight", self.max_weight)

    @property
    def formula(self) -> str:
        """``w = rho_t min_{s<t} rho_s``, or with a cap ``w = min(rho_t min_{s<t} rho_s, 2)``."""
        raw = "rho_t min_{s<t} rho_s"
        return f"w = {raw}" if self.max_weight is None else f"w = min({raw}, {number(self.max_weight)})"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The product rho_t min_{s<t} rho_s, raw and capped at ``max_weight``, (B, T)."""
        raw = ratio_of(weights.prefix_min_weight(inputs.log_ratios, inputs.mask))
        return Weighed(raw, weights.truncate_weight(raw, max_weight=self.max_weight))


@dataclass(frozen=True, kw_only=True)
class PrefixWeight(Weight):
    """CTPO: the product of the ratios up to t, held in [low^sqrt(t), high^sqrt(t)].

    Where the bounds do not act it is the unbiased correction of a token given its prefix. The paper bounds the policy
    ratio, as the loss :class:`~trl_offpolicy.losses.CTPO` does. As a weight it goes with every loss.

    Reference: Zhang et al. 2026, CTPO (arXiv:2605.07331).
    """

    type_name: ClassVar[str] = "prefix"
    low: float = 0.8
    high: float = 1.25
    ratio: Ratio = "old/sampling"
    level: ClassVar[Level] = "prefix"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_number("low", self.low)
        check_number("high", self.high)
        check_ratio_bounds("low", self.low, "high", self.high)
        if not self.low < 1 < self.high:
            raise ValueError(f"low and high must lie on both sides of 1, but got {self.low} and {self.high}.")

    @property
    def formula(self) -> str:
        """The widening bounds, as ``w = clip(rho_1:t, 0.5^sqrt(t), 2^sqrt(t))``."""
        return f"w = clip(rho_1:t, {number(self.low)}^sqrt(t), {number(self.high)}^sqrt(t))"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The product of the ratios up to t, raw and held inside the bounds, (B, T)."""
        walk = inputs.log_ratio_at("prefix")
        low, high = weights.prefix_bounds(inputs.mask, low=self.low, high=self.high)
        held = torch.minimum(torch.maximum(walk, low), high)
        return Weighed(ratio_of(walk), ratio_of(held))


@dataclass(frozen=True, kw_only=True)
class ESSWeight(Weight):
    """Truncation whose cap is chosen so that the effective sample size reaches ``target``.

    The cap follows the batch: there is none while the weights are healthy, and a tight one when a few dominate. With
    ``scope="micro_batch"`` it looks only at the rows of one call. Units are tokens at the token levels, else sequences.
    """

    type_name: ClassVar[str] = "ess"
    target: float = 0.5
    level: Level = "token"
    ratio: Ratio = "old/sampling"
    scope: Scope = "generation_batch"

    def __post_init__(self) -> None:
        _check(self.level, self.ratio)
        check_proper_fraction(target=self.target)
        check_scope(self.scope, self.ratio)

    @property
    def formula(self) -> str:
        """``w = min(rho_t, C), the largest C with ESS >= 0.5``."""
        return f"w = min({RHO[self.level]}, C), the largest C with ESS >= {number(self.target)}"

    def weigh(self, inputs: TermInputs) -> Weighed:
        """The ratio at ``level``, raw and capped, (B, 1) or (B, T)."""
        ratio = inputs.ratio_at(self.level)
        unit = inputs.mask.any(-1, keepdim=True) if ratio.shape[-1] == 1 else inputs.mask
        units = torch.where(unit, ratio, torch.inf)
        everyone = gather_flat(units, padding=torch.inf) if self.scope == "generation_batch" else units.flatten()
        return Weighed(ratio, torch.minimum(ratio, weights.ess_cap(everyone, target=self.target)))


def _check(level: str, ratio: str) -> None:
    check_level(level, WEIGHT_LEVELS, why=_NO_WEIGHT)
    check_ratio(ratio)
