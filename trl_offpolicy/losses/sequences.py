"""Policy losses as small frozen dataclasses, usable in :class:`~trl_offpolicy.Objective` and in YAML.

Each takes a :class:`LossInputs` and returns the loss per token. ``weight_use`` says how importance weights enter:
"multiply" (the objective multiplies the loss by them) or "inside" (the loss reads them itself); ``uses_ratio`` whether
the loss holds the ratio of the current policy to the centre of its trust region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from trl_offpolicy.functional import policy_losses
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.functional.policy_losses import VESPO_LOG_FLOOR, LossTerms
from trl_offpolicy.types import Scope, check_number

WeightUse = Literal["multiply", "inside"]
RatioLevel = Literal["token", "sequence_mean"]


class LossInputs(NamedTuple):
    """What a policy loss sees. ``logps`` and ``log_ratios`` carry gradient, nothing else does.

    ``logps`` (B, T) log pi; ``log_ratios`` (B, T) log(pi / proximal), 0 on padding; ``advantages`` (B, 1) or
    (B, T); ``mask`` (B, T) bool; ``weights`` (B, 1) or (B, T) importance weights or None.
    """

    logps: Tensor
    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None


class PolicyLoss(Protocol):
    """A loss per token."""

    weight_use: ClassVar[WeightUse]
    uses_ratio: ClassVar[bool]
    scope: ClassVar[Scope]

    @property
    def level(self) -> RatioLevel:
        """Level of the policy ratio."""

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss (B, T) or (B, 1)."""


def _at_level(inputs: LossInputs, level: RatioLevel) -> Tensor:
    return inputs.log_ratios if level == "token" else aggregate(inputs.log_ratios, inputs.mask, level)


def _check_level(level: str) -> None:
    if level not in ("token", "sequence_mean"):
        raise ValueError(f"level must be 'token' or 'sequence_mean' (GSPO), but got {level!r}.")


def _check_positive(**values: float | None) -> None:
    for field, value in values.items():
        if value is not None:
            check_number(field, value)
            if value <= 0:
                raise ValueError(f"{field} must be positive and finite, but got {value}.")


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """PPO's clipped surrogate; ``level="sequence_mean"`` is GSPO's ratio. See ``functional.ppo_clip``."""

    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    level: RatioLevel = "token"
    weight_use: ClassVar[WeightUse] = "multiply"
    uses_ratio: ClassVar[bool] = True
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level(self.level)
        _check_positive(low=self.low, high=self.high, dual_clip=self.dual_clip, delta=self.delta)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, but got {self.dual_clip}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(r A, clip(r) A)."""
        return policy_losses.ppo_clip(
            _at_level(inputs, self.level),
            inputs.advantages,
            low=self.low,
            high=self.high,
            dual_clip=self.dual_clip,
            delta=self.delta,
        )


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """-min(r, high) A log pi with the capped ratio detached. ``high`` is the cap itself."""

    high: float = 5.0
    level: RatioLevel = "token"
    weight_use: ClassVar[WeightUse] = "multiply"
    uses_ratio: ClassVar[bool] = True
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level(self.level)
        _check_positive(high=self.high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss per token."""
        return policy_losses.cispo(_at_level(inputs, self.level), inputs.logps, inputs.advantages, high=self.high)


@dataclass(frozen=True, kw_only=True)
class GPG:
    """Plain policy gradient (REINFORCE): -A log pi. No ratio of its own, so weights may hold any ratio.

    Reference: Chu et al. 2025, GPG (arXiv:2504.02546); verl's ``gpg`` and the ``reinforce`` of its bypass mode.
    """

    level: ClassVar[RatioLevel] = "token"
    weight_use: ClassVar[WeightUse] = "multiply"
    uses_ratio: ClassVar[bool] = False
    scope: ClassVar[Scope] = "row"

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss per token."""
        return LossTerms(-inputs.advantages * torch.where(inputs.mask, inputs.logps, 0.0))


@dataclass(frozen=True, kw_only=True)
class SAPO:
    """Soft-gated ratio with a temperature for each sign of the advantage."""

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05
    level: RatioLevel = "token"
    weight_use: ClassVar[WeightUse] = "multiply"
    uses_ratio: ClassVar[bool] = True
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level(self.level)
        _check_positive(temperature_pos=self.temperature_pos, temperature_neg=self.temperature_neg)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss per token."""
        return policy_losses.sapo(
            _at_level(inputs, self.level),
            inputs.advantages,
            temperature_pos=self.temperature_pos,
            temperature_neg=self.temperature_neg,
        )


@dataclass(frozen=True, kw_only=True)
class VESPO:
    """-phi(w) A log pi with w the sequence ratio, importance weights included (hence weight_use "inside")."""

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    level: RatioLevel = "token"
    weight_use: ClassVar[WeightUse] = "inside"
    uses_ratio: ClassVar[bool] = True
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _check_level(self.level)
        _check_positive(k_pos=self.k_pos, k_neg=self.k_neg)
        check_number("lambda_pos", self.lambda_pos)
        check_number("lambda_neg", self.lambda_neg)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss per token."""
        log_w = aggregate(inputs.log_ratios.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), inputs.mask, "sequence")
        if inputs.weights is not None:
            log_weights = inputs.weights.log().clamp(VESPO_LOG_FLOOR, LOG_RATIO_CLAMP)
            by_token = log_weights.shape[-1] > 1
            log_w = log_w + (aggregate(log_weights, inputs.mask, "sequence") if by_token else log_weights)
        phi = policy_losses.vespo_phi(
            log_w,
            inputs.advantages,
            k_pos=self.k_pos,
            lambda_pos=self.lambda_pos,
            k_neg=self.k_neg,
            lambda_neg=self.lambda_neg,
        )
        return LossTerms(-phi * inputs.advantages * torch.where(inputs.mask, inputs.logps, 0.0), gate=phi)
