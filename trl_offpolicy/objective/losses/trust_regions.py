"""Token losses whose trust region is a divergence, a moment, a covariance, or depends on the prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch

from trl_offpolicy.checks import check_choice, check_fraction, check_number, check_positive
from trl_offpolicy.functional import policy_losses
from trl_offpolicy.functional.policy_losses import BinaryDivergence, CovPenalty, LossTerms
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
class DPPO(PolicyLoss):
    """-min(r, max_ratio) A log pi inside a bound on the binary divergence from pi_old. See ``functional.dppo``.

    What carries gradient: log pi of the tokens inside. Biased by the mask.

    Reference: Qi et al. 2026, DPPO (arXiv:2602.04879). ``low`` and ``high`` are verl's ``clip_ratio`` defaults.
    ``max_ratio`` is the paper's 20; verl reads ``clip_ratio_c`` there, which its configuration sets to 3.
    """

    type_name: ClassVar[str] = "dppo"
    trust_region: ClassVar[str] = "bound on binary TV or KL at the token"
    purpose: ClassVar[str] = "very likely or rare tokens, for which ratios mean little"
    divergence: BinaryDivergence = "tv"
    low: float = 0.2
    high: float = 0.2
    max_ratio: float = 20.0

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, get_args(BinaryDivergence))
        check_positive(low=self.low, high=self.high, max_ratio=self.max_ratio)
        if self.divergence == "tv" and max(self.low, self.high) >= 1:
            raise ValueError(f"low and high must be below 1 with divergence 'tv', but got {self.low} and {self.high}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-sg[min(r, max_ratio)] A log pi, and 0 on the tokens beyond the bound; (B, T)."""
        return policy_losses.dppo(
            inputs.log_ratios,
            inputs.logps,
            inputs.advantages,
            divergence=self.divergence,
            low=self.low,
            high=self.high,
            max_ratio=self.max_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyLoss):
    """-r A without the tokens that break a budget of mean log^2 r. See ``functional.m2po``.

    The budget covers the tokens of one call on this rank, because the current policy moves between micro-batches. What
    carries gradient: log r of the tokens that stay. Biased by the mask.

    Reference: Zheng et al. 2025, M2PO (arXiv:2510.01161); its budget 0.04 is the default. The same trust region as a
    rejection, for any loss: ``SecondMomentBudget(ratio="current/old", scope="micro_batch")``.
    """

    type_name: ClassVar[str] = "m2po"
    trust_region: ClassVar[str] = "budget of mean (log r)^2 over the call"
    purpose: ClassVar[str] = "stale data with heavy tails"
    budget: float = 0.04
    scope: ClassVar[Scope] = "micro_batch"

    def __post_init__(self) -> None:
        check_positive(budget=self.budget)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-r A, and 0 on the tokens that break the budget; (B, T)."""
        return policy_losses.m2po(inputs.log_ratios, inputs.advantages, inputs.mask, budget=self.budget)


@dataclass(frozen=True, kw_only=True)
class P3O(PolicyLoss):
    """-min(r, ESS) A log pi + (1 - ESS) KL(pi || pi_old), with the ESS of the call's ratios. See ``functional.p3o``.

    It has no setting. The ESS covers the tokens of one call on this rank, because the current policy moves between
    micro-batches; ``loss/gate_mean`` shows it. What carries gradient: log pi, on every token, and log r in the KL.
    Biased by the cap. The KL's estimate (k3) is without bias on tokens of pi; on those of pi_old, as here, only to
    second order in r - 1. A weight and a keep term act on the KL too.

    Reference: Fakoor et al. 2026, P3O (arXiv:2605.12380), where r is against the policy that sampled: mode "bypass",
    as in ``paper/p3o``.
    """

    type_name: ClassVar[str] = "p3o"
    trust_region: ClassVar[str] = "ESS of the call caps r, and 1 - ESS weighs a KL"
    purpose: ClassVar[str] = "stale or replayed data of any age, without a setting"
    scope: ClassVar[Scope] = "micro_batch"

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-sg[min(r, ESS)] A log pi + (1 - ESS) (log r + 1 / r - 1), (B, T)."""
        return policy_losses.p3o(inputs.log_ratios, own_logps(inputs), inputs.advantages, inputs.mask)


@dataclass(frozen=True, kw_only=True)
class ClipCov(PolicyLoss):
    """PPO's clip without the loss of a few random tokens of large covariance. See ``functional.clip_cov``.

    The covariance is over the tokens of one call on this rank. What carries gradient: the ratio of the other tokens.

    Reference: Cui et al. 2025 (arXiv:2505.22617); the defaults are verl's.
    """

    type_name: ClassVar[str] = "clip_cov"
    trust_region: ClassVar[str] = "tokens of high covariance of A and log pi drop out"
    purpose: ClassVar[str] = "preventing entropy collapse"
    low: float = 0.2
    high: float = 0.2
    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    scope: ClassVar[Scope] = "micro_batch"

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)
        check_fraction(fraction=self.fraction)
        check_number("cov_low", self.cov_low)
        check_number("cov_high", self.cov_high)
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low must be below cov_high={self.cov_high}, but got {self.cov_low}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(r A, clip(r, 1 - low, 1 + high) A), and 0 on the tokens drawn by their covariance; (B, T)."""
        return policy_losses.clip_cov(
            inputs.log_ratios,
            inputs.logps,
            inputs.advantages,
            inputs.mask,
            low=self.low,
            high=self.high,
            fraction=self.fraction,
            cov_low=self.cov_low,
            cov_high=self.cov_high,
        )


@dataclass(frozen=True, kw_only=True)
class KLCov(PolicyLoss):
    r"""-r A, plus coef \|log r\| on the tokens of largest covariance. See ``functional.kl_cov``.

    The absolute log-ratio is that of the authors' code and of verl, whose numbers ``from_verl`` then gives. With
    ``penalty="k3"`` these tokens have an estimate of the paper's KL(pi_old || pi) instead. The
    covariance is over the tokens of one call on this rank. What carries gradient: log r, on every token.

    Reference: Cui et al. 2025 (arXiv:2505.22617); the defaults are verl's configuration.
    """

    type_name: ClassVar[str] = "kl_cov"
    trust_region: ClassVar[str] = "KL pull on tokens of high covariance"
    purpose: ClassVar[str] = "preventing entropy collapse, softly"
    fraction: float = 2e-4
    coef: float = 0.1
    penalty: CovPenalty = "abs"
    scope: ClassVar[Scope] = "micro_batch"

    def __post_init__(self) -> None:
        check_fraction(fraction=self.fraction)
        check_positive(coef=self.coef)
        check_choice("penalty", self.penalty, get_args(CovPenalty))

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-r A, plus coef times the penalty on the tokens of largest covariance; (B, T)."""
        return policy_losses.kl_cov(
            inputs.log_ratios,
            inputs.logps,
            inputs.advantages,
            inputs.mask,
            fraction=self.fraction,
            coef=self.coef,
            penalty=self.penalty,
        )


@dataclass(frozen=True, kw_only=True)
class R2VPO(PolicyLoss):
    """PPO's clip with a range that depends on the ratio variance of the group. See ``functional.r2vpo``.

    The variance is that of the current policy, so it exists only in the loss step, where TRL has shuffled groups
    apart. It is taken over the rows of the group in one call ("micro_batch"); with one row of a group it is the
    variance of that row's tokens. What carries gradient: the ratio, where the clip is not active.

    Reference: Luo et al. 2026, R2VPO (arXiv:2601.03320), as a clip range; see the function.
    """

    type_name: ClassVar[str] = "r2vpo"
    trust_region: ClassVar[str] = "clip whose width follows the group's ratio variance"
    purpose: ClassVar[str] = "groups that need clips of different width"
    low: float = 0.2
    high: float = 0.2
    variance: float = 0.05
    reads: ClassVar[tuple[Field, ...]] = ("group_ids",)
    scope: ClassVar[Scope] = "micro_batch"

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high, variance=self.variance)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(r A, clip(r, 1 - low_g, 1 + high_g) A) with the range of the group g; (B, T)."""
        return policy_losses.r2vpo(
            inputs.log_ratios,
            inputs.advantages,
            inputs.mask,
            inputs.need("group_ids", self),
            low=self.low,
            high=self.high,
            variance=self.variance,
        )


@dataclass(frozen=True, kw_only=True)
class QUATRO(PolicyLoss):
    """-r A and a KL stabiliser whose multiplier depends on the query. See ``functional.quatro``.

    ``scope="row"`` reads the rewards of the whole group from ``group_rewards``; "micro_batch" takes only the rows of
    the group in one call. Advantages must be in units of reward (``scale_rewards="none"`` in TRL). What carries
    gradient: the ratio, with weight -r (A - lambda_q log r).

    Reference: Lee et al. 2026, QUATRO (arXiv:2602.04620).
    """

    type_name: ClassVar[str] = "quatro"
    trust_region: ClassVar[str] = "multiplier per prompt, from the spread of its rewards"
    purpose: ClassVar[str] = "prompts that tolerate drift differently"
    radius: float = 0.01
    scope: Scope = "row"

    def __post_init__(self) -> None:
        check_positive(radius=self.radius)
        check_reward_scope(self.scope)

    @property
    def reads(self) -> tuple[Field, ...]:
        """The rewards of the row's group, from which the multiplier follows."""
        return group_fields(self.scope)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-r A + lambda_q (r log r - r + 1) with the multiplier lambda_q of the query; (B, T)."""
        rewards, counted = rewards_of_group(inputs, self, self.scope)
        count = counted.sum(-1, keepdim=True).clamp(min=1)
        mean = torch.where(counted, rewards, 0.0).sum(-1, keepdim=True) / count
        variance = torch.where(counted, (rewards - mean).square(), 0.0).sum(-1, keepdim=True) / count
        return policy_losses.quatro(inputs.log_ratios, inputs.advantages, variance.sqrt(), radius=self.radius)
