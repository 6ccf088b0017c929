"""Losses that look at a response beyond one ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trl_offpolicy.checks import (
    check_bool,
    check_fraction,
    check_number,
    check_positive,
    check_positive_or_none,
    check_whole,
)
from trl_offpolicy.functional import policy_losses
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.functional.policy_losses import LossTerms
from trl_offpolicy.objective.losses.base import (
    Field,
    LossInputs,
    PolicyLoss,
    check_reward_scope,
    group_fields,
    own_logps,
    rewards_of_group,
)
from trl_offpolicy.types import Scope


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyLoss):
    """REINFORCE, tapered on negative responses by clip(pi(y) / mu(y), low, high). See ``functional.topr``.

    It contains pi / mu itself, in any mode, so it takes no importance weights. What carries gradient: log pi.

    Reference: Le Roux et al. 2025, TOPR (arXiv:2503.14286).
    """

    type_name: ClassVar[str] = "topr"
    trust_region: ClassVar[str] = "none if R > 0, else truncated pi / mu"
    purpose: ClassVar[str] = "not pushing bad responses down too far"
    low: float = 0.0
    high: float = 1.0
    reads: ClassVar[tuple[Field, ...]] = ("sampling_log_ratios",)
    aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"

    def __post_init__(self) -> None:
        check_number("low", self.low)
        check_positive(high=self.high)
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low must be in [0, high={self.high}], but got {self.low}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-A log pi where A >= 0, else -sg[clip(pi(y) / mu(y), low, high)] A log pi; (B, T)."""
        return policy_losses.topr(
            inputs.need("sampling_log_ratios", self),
            own_logps(inputs),
            inputs.advantages,
            inputs.mask,
            low=self.low,
            high=self.high,
        )


@dataclass(frozen=True, kw_only=True)
class ESPO(PolicyLoss):
    """GSPO-token within entropy groups, each with its own clip range. See ``functional.espo``.

    The epsilon of a group is alpha / log(vocab_size) times its mean entropy. The batch's ``entropies`` are those of the
    current policy. The paper takes pi_old's, which are the same on the first step. What carries gradient: each token's
    own pi_t, where its group is not clipped.

    Reference: Sheng et al. 2025, ESPO (arXiv:2512.00499): alpha 0.02 and 20 % high-entropy tokens are its choice.
    """

    type_name: ClassVar[str] = "espo"
    trust_region: ClassVar[str] = "clip per entropy group, width by entropy"
    purpose: ClassVar[str] = "MoE variance, and tokens of different entropy in one ratio"
    example: ClassVar[Mapping[str, Any]] = {"vocab_size": 1000}
    vocab_size: int
    alpha: float = 0.02
    high_entropy_fraction: float = 0.2
    reads: ClassVar[tuple[Field, ...]] = ("entropies",)
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(alpha=self.alpha)
        check_fraction(high_entropy_fraction=self.high_entropy_fraction)
        check_whole("vocab_size", self.vocab_size, least=2)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(s_t A, clip(s_t, 1 - epsilon_g, 1 + epsilon_g) A) with the ratio s_t of the entropy group g; (B, T)."""
        return policy_losses.espo(
            inputs.log_ratios,
            inputs.advantages,
            inputs.need("entropies", self),
            inputs.mask,
            high_entropy_fraction=self.high_entropy_fraction,
            clip_scale=self.alpha / math.log(self.vocab_size),
        )


@dataclass(frozen=True, kw_only=True)
class STPPO(PolicyLoss):
    """PPO's clip on turn ratios, damped in turns where the token clip sets in. See ``functional.st_ppo``.

    Turns come from ``turn_ids``; without them each run of trainable tokens is a turn. ``normalize=False`` is Turn-PPO.
    What carries gradient: each token's own pi_t, in turns that are not clipped.

    Reference: Li et al. 2025, ST-PPO (arXiv:2511.20718); the normaliser is by turn (see the function).
    """

    type_name: ClassVar[str] = "st_ppo"
    trust_region: ClassVar[str] = "clip per turn, damped where it acts"
    purpose: ClassVar[str] = "several turns with tools"
    low: float = 0.2
    high: float = 0.2
    normalize: bool = True
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)
        check_bool(normalize=self.normalize)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(s_t A, clip(s_t, 1 - low, 1 + high) A) / (1 + c_k) with the ratio s_t of turn k; (B, T)."""
        return policy_losses.st_ppo(
            inputs.log_ratios,
            inputs.advantages,
            inputs.mask,
            inputs.turn_ids,
            low=self.low,
            high=self.high,
            normalize=self.normalize,
        )


@dataclass(frozen=True, kw_only=True)
class OAPL(PolicyLoss):
    """(beta log(pi(y) / mu(y)) - (R - V))^2 with V from the group's rewards. See ``functional.oapl``.

    V = value_beta log mean exp(R / value_beta) over the group; ``value_beta=None`` = beta. ``scope="row"`` reads the
    group from ``group_rewards``, "micro_batch" takes its rows in one call. It reads no advantages and takes no
    importance weights. What carries gradient: log pi(y).

    Reference: Ritter et al. 2026, OAPL (arXiv:2602.19362).
    """

    type_name: ClassVar[str] = "oapl"
    trust_region: ClassVar[str] = "regression of log(pi / mu) on the advantage"
    purpose: ClassVar[str] = "a lag that never ends"
    example: ClassVar[Mapping[str, Any]] = {"beta": 1.0}
    beta: float
    value_beta: float | None = None
    scope: Scope = "row"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        check_positive_or_none(value_beta=self.value_beta)
        check_reward_scope(self.scope)

    @property
    def reads(self) -> tuple[Field, ...]:
        """log(pi / mu), the reward of the row, and the rewards of its group."""
        return tuple(dict.fromkeys(("sampling_log_ratios", "rewards", *group_fields(self.scope))))

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """(beta log(pi(y) / mu(y)) - (R - V))^2 of each response, (B, 1)."""
        own = inputs.need("rewards", self)
        rewards, counted = rewards_of_group(inputs, self, self.scope)
        value = policy_losses.soft_value(rewards, counted, beta=self.value_beta or self.beta)
        own = torch.where(own.isfinite(), own, value)  # a response without a reward gets R - V = 0
        ratios = inputs.need("sampling_log_ratios", self)
        return policy_losses.oapl(ratios, own, value, inputs.mask, beta=self.beta)
