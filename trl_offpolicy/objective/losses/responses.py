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
    check_within,
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
class CTPO(PolicyLoss):
    """PPO's clip on the product of the ratios up to the token, in bounds that widen with its position.

    R_t = prod_{s <= t} r_s is clipped to [exp(-low sqrt(t)), exp(high sqrt(t))]. See ``functional.ctpo``. What carries
    gradient: the token's own ratio, with weight R_t, where the clip is not active; the prefix is detached. Unbiased for
    the token given its prefix inside the bounds.

    Args:
        low: nats below 1 at which the first token is clipped.
        high: nats above 1 at which the first token is clipped.
        dual_clip: nats above 1 from which on a first token with A < 0 has no gradient; None = no dual clip.

    Reference: Zhang et al. 2026, CTPO (arXiv:2605.07331); the numbers are those of the authors' code. As a weight on
    pi_old / mu for other losses it is ``PrefixWeight``.
    """

    type_name: ClassVar[str] = "ctpo"
    trust_region: ClassVar[str] = "clip of the product up to the token, wider later"
    purpose: ClassVar[str] = "long responses under drift: prefixes count"
    low: float = 0.025
    high: float = 0.05
    dual_clip: float | None = 0.05

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)
        check_positive_or_none(dual_clip=self.dual_clip)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(R_t A, clip(R_t) A), bounded by the dual clip; (B, T)."""
        return policy_losses.ctpo(
            inputs.log_ratios,
            inputs.advantages,
            inputs.mask,
            low=self.low,
            high=self.high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, kw_only=True)
class FIPO(PolicyLoss):
    """PPO's clip on A f_t, where f_t says whether the policy has moved towards what follows the token.

    The factor f_t is detached and in [1 - ``influence_low``, 1 + ``influence_high``]; see
    ``functional.future_influence``. ``loss/gate_mean`` is its mean. What carries gradient: the ratio, where the clip is
    not active. Heuristic: credit by what has become likelier, not an estimate of the advantage. On-policy f is 1.

    Args:
        low: PPO's lower clip, at 1 - low.
        high: PPO's upper clip, at 1 + high.
        half_life: positions after which a later token counts half.
        influence_low: 0 = factors above 1 only, as in the authors' run of 32B; 0.2 as in those of 7B.
        influence_high: the factor is at most 1 + this.
        dual_clip: PPO's dual clip where A < 0. Tokens with a ratio above it leave the sum, too; None = neither.
        safe_ratio: where A < 0, tokens with a ratio above it have a factor of at most 1; None = no limit.

    Reference: Ma et al. 2026, FIPO (arXiv:2603.19835). The authors' code for verl also takes a response out of the loss
    in which more than one token reaches the dual clip; that is not part of this loss, nor of ms-swift's.
    """

    type_name: ClassVar[str] = "fipo"
    trust_region: ClassVar[str] = "clip of r, dual clip"
    purpose: ClassVar[str] = "long reasoning: credit for tokens that steer what follows"
    low: float = 0.2
    high: float = 0.28
    half_life: float = 32.0
    influence_low: float = 0.2
    influence_high: float = 0.2
    dual_clip: float | None = 10.0
    safe_ratio: float | None = 4.0

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high, half_life=self.half_life, influence_high=self.influence_high)
        check_positive_or_none(dual_clip=self.dual_clip, safe_ratio=self.safe_ratio)
        check_within("influence_low", self.influence_low, 0.0, 1.0)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, but got {self.dual_clip}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(r A f, clip(r, 1 - low, 1 + high) A f), bounded by the dual clip; (B, T)."""
        influence = policy_losses.future_influence(
            inputs.log_ratios,
            inputs.advantages,
            inputs.mask,
            half_life=self.half_life,
            low=self.influence_low,
            high=self.influence_high,
            max_ratio=self.dual_clip,
            safe_ratio=self.safe_ratio,
        )
        weighted = inputs.advantages * influence
        terms = policy_losses.ppo_clip(
            inputs.log_ratios, weighted, low=self.low, high=self.high, dual_clip=self.dual_clip
        )
        return terms._replace(gate=influence)


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyLoss):
    """REINFORCE, tapered on negative responses by clip(pi(y) / mu(y), low, high). See ``functional.topr``.

    A response is negative if its advantage is, because every trainer has advantages. With ``baseline`` the reward less
    this number takes the place of the advantage, sign and size, as in the paper (0 is its plain form). Such a loss
    reads no advantages, and a response without a reward counts 0. It contains pi / mu itself, in any mode, so it takes
    no importance weights. What carries gradient: log pi.

    Reference: Le Roux et al. 2025, TOPR (arXiv:2503.14286).
    """

    type_name: ClassVar[str] = "topr"
    trust_region: ClassVar[str] = "none if R > 0, else truncated pi / mu"
    purpose: ClassVar[str] = "not pushing bad responses down too far"
    low: float = 0.0
    high: float = 1.0
    baseline: float | None = None
    aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"

    def __post_init__(self) -> None:
        check_number("low", self.low)
        check_positive(high=self.high)
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low must be in [0, high={self.high}], but got {self.low}.")
        if self.baseline is not None:
            check_number("baseline", self.baseline)

    @property
    def reads(self) -> tuple[Field, ...]:
        """log(pi / mu), and the reward of the row with ``baseline``."""
        return ("sampling_log_ratios",) if self.baseline is None else ("sampling_log_ratios", "rewards")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-A log pi where A >= 0, else -sg[clip(pi(y) / mu(y), low, high)] A log pi; (B, T)."""
        advantages = inputs.advantages
        if self.baseline is not None:
            rewards = inputs.need("rewards", self)
            advantages = torch.where(rewards.isfinite(), rewards - self.baseline, 0.0)
        return policy_losses.topr(
            inputs.need("sampling_log_ratios", self),
            own_logps(inputs),
            advantages,
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
