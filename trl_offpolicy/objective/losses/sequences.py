"""Losses on one ratio for a whole response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trl_offpolicy.checks import check_not_negative, check_positive
from trl_offpolicy.functional import policy_losses
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.functional.policy_losses import VESPO_LOG_FLOOR, LossTerms
from trl_offpolicy.objective.losses.base import (
    LossInputs,
    PolicyLoss,
    RatioLevel,
    WeightUse,
    at_level,
    check_level,
    own_logps,
)


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """PPO's clipped surrogate on s = exp(mean_t log r_t), the geometric mean ratio of the response.

    -min(s A, clip(s, 1 - low, 1 + high) A), one loss for the response. What carries gradient: log s, that is every
    token's log r / |y|, where the clip is not active. Biased: s is not the importance weight of the response, which is
    the product. The same as ``PPOClip(level="sequence_mean")``, with the paper's bounds.

    Reference: Zheng et al. 2025, GSPO (arXiv:2507.18071), Eq. 5-7.
    """

    type_name: ClassVar[str] = "gspo"
    trust_region: ClassVar[str] = "clip of the geometric mean ratio"
    purpose: ClassVar[str] = "long responses, and experts that flip"
    low: float = 3e-4
    high: float = 4e-4
    level: ClassVar[RatioLevel] = "sequence_mean"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(s A, clip(s, 1 - low, 1 + high) A) of each response, (B, 1)."""
        return policy_losses.ppo_clip(at_level(inputs, self.level), inputs.advantages, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class GSPOToken(PolicyLoss):
    """GSPO with advantages that may differ from token to token. See ``functional.gspo_token``.

    What carries gradient: each token's own pi_t, with weight sg[s] A_t; s is detached. verl's ``gspo``.

    Reference: Zheng et al. 2025, GSPO (arXiv:2507.18071), section 4.3.
    """

    type_name: ClassVar[str] = "gspo_token"
    trust_region: ClassVar[str] = "clip of the geometric mean ratio, detached"
    purpose: ClassVar[str] = "the same with credit per token"
    low: float = 3e-4
    high: float = 4e-4
    level: ClassVar[RatioLevel] = "sequence_mean"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t) with s_t = sg[s] pi_t / sg[pi_t]; (B, T)."""
        return policy_losses.gspo_token(inputs.log_ratios, inputs.advantages, inputs.mask, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class LUSPO(PolicyLoss):
    """GSPO with each response's loss times its length: length-unbiased. Needs ``aggregation="seq_mean_token_sum"``.

    -|y| min(s A, clip(s) A). What carries gradient: log s, so that every token weighs the same whatever the length of
    its response, where GSPO's tokens weigh 1/|y|. Biased by the geometric mean. The length comes from the aggregation,
    so the objective refuses any other.

    Reference: "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261); TRL's ``luspo`` with
    ``importance_sampling_level="sequence"``.
    """

    type_name: ClassVar[str] = "luspo"
    trust_region: ClassVar[str] = "clip of the geometric mean ratio"
    purpose: ClassVar[str] = "removing GSPO's preference for short responses"
    low: float = 0.2
    high: float = 0.2
    level: ClassVar[RatioLevel] = "sequence_mean"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"
    fixed_aggregation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(s A, clip(s, 1 - low, 1 + high) A) of each response, (B, 1); the aggregation supplies the length."""
        return policy_losses.ppo_clip(at_level(inputs, self.level), inputs.advantages, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyLoss):
    """Geometric mean of token ratios that are clipped one by one first. See ``functional.gmpo``.

    ``low`` and ``high`` are nats. What carries gradient: log r of the tokens that are not clipped. Importance weights
    enter by their geometric mean over the response (weight_use "inside"), as in verl's ``geo_mean``.

    Reference: Zhao et al. 2025, GMPO (arXiv:2507.20673); its range (e^-0.4, e^0.4) is the default.
    """

    type_name: ClassVar[str] = "gmpo"
    trust_region: ClassVar[str] = "sign-aware clamp of log r, then geometric mean"
    purpose: ClassVar[str] = "responses with outlier tokens"
    low: float = 0.4
    high: float = 0.4
    level: ClassVar[RatioLevel] = "sequence_mean"
    weight_use: ClassVar[WeightUse] = "inside"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(low=self.low, high=self.high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-A exp(mean_t c_t) of each response, (B, 1), where c_t is the clipped log-ratio of token t."""
        return policy_losses.gmpo(
            inputs.log_ratios, inputs.advantages, inputs.mask, low=self.low, high=self.high, weights=inputs.weights
        )


@dataclass(frozen=True, kw_only=True)
class VESPO(PolicyLoss):
    """-phi(w) A log pi, where w is the sequence ratio times the importance weights (hence weight_use "inside").

    What carries gradient: log pi; phi is detached. See ``functional.vespo_phi``.

    Reference: Shen et al. 2026, VESPO (arXiv:2602.10693).
    """

    type_name: ClassVar[str] = "vespo"
    trust_region: ClassVar[str] = "kernel phi of the product of ratios"
    purpose: ClassVar[str] = "exact sequence weights with less variance"
    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    level: RatioLevel = "token"
    weight_use: ClassVar[WeightUse] = "inside"

    def __post_init__(self) -> None:
        check_level(self.level)
        check_positive(k_pos=self.k_pos, k_neg=self.k_neg)
        check_not_negative(lambda_pos=self.lambda_pos, lambda_neg=self.lambda_neg)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-phi(w) A log pi with phi(w) = exp(lambda) w^k exp(-lambda w), detached; (B, T)."""
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
        return LossTerms(-phi * inputs.advantages * own_logps(inputs), gate=phi)


@dataclass(frozen=True, kw_only=True)
class TBPO(PolicyLoss):
    """Trust band on the geometric mean ratio: two-sided for negative responses. See ``functional.tbpo``.

    What carries gradient: log s inside the band. Biased.

    Reference: Gu et al. 2026, QaRL (arXiv:2604.07853); the defaults are its experiments'.
    """

    type_name: ClassVar[str] = "tbpo"
    trust_region: ClassVar[str] = "band of the sequence ratio, dual clip where A < 0"
    purpose: ClassVar[str] = "quantised rollouts with long runs of error tokens"
    high: float = 4e-4
    negative_low: float = 3e-4
    negative_high: float = 7e-4
    level: ClassVar[RatioLevel] = "sequence_mean"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_positive(high=self.high, negative_low=self.negative_low, negative_high=self.negative_high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(s, 1 + high) A where A >= 0, else -clip(s, 1 - negative_low, 1 + negative_high) A; (B, 1)."""
        return policy_losses.tbpo(
            at_level(inputs, self.level),
            inputs.advantages,
            high=self.high,
            negative_low=self.negative_low,
            negative_high=self.negative_high,
        )
