"""Losses that treat each token alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_offpolicy.checks import check_bool, check_number, check_positive, check_positive_or_none
from trl_offpolicy.functional import policy_losses
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.functional.policy_losses import LossTerms
from trl_offpolicy.objective.losses.base import (
    Field,
    LossInputs,
    PolicyLoss,
    RatioLevel,
    at_level,
    check_level,
    own_logps,
)


@dataclass(frozen=True, kw_only=True)
class PPOClip(PolicyLoss):
    """PPO's clipped surrogate. See ``functional.ppo_clip``.

    ``level="sequence_mean"`` is GSPO's ratio. ``level="sequence"`` is the product over the response, which TRL's RLOO
    clips: a long response leaves the clip by small changes of many tokens.

    What carries gradient: the ratio, where the clip is not active. Biased by the clip.

    Reference: Schulman et al. 2017, PPO (arXiv:1707.06347); dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """

    type_name: ClassVar[str] = "ppo_clip"
    trust_region: ClassVar[str] = "clip of r, optional dual clip and upper limit"
    purpose: ClassVar[str] = "general stability, the default"
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    level: RatioLevel = "token"

    def __post_init__(self) -> None:
        check_level(self.level, product=True)
        check_positive(low=self.low, high=self.high)
        check_positive_or_none(dual_clip=self.dual_clip, delta=self.delta)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, but got {self.dual_clip}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(r A, clip(r, 1 - low, 1 + high) A), (B, T), or (B, 1) at the levels of a response."""
        return policy_losses.ppo_clip(
            at_level(inputs, self.level),
            inputs.advantages,
            low=self.low,
            high=self.high,
            dual_clip=self.dual_clip,
            delta=self.delta,
        )


@dataclass(frozen=True, kw_only=True)
class PPOIS(PolicyLoss):
    """PPO's clipped surrogate on pi / mu in any mode: mismatch and staleness under one clip. For ablations.

    -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / mu. What carries gradient: rho, where the clip is not
    active. Biased: the trust region is around mu, so mismatch alone can fill it. The centre is
    ``sampling_per_token_logps``, never old or proximal, and it takes no importance weights.
    ``Objective(mode="bypass", policy_loss=PPOClip())`` is the same loss.

    Vanilla IS needs no special loss: it is ``PPOClip()`` with ``RawWeight()``. The TIS policy gradient is ``GPG()``
    with ``TruncateWeight(ratio="current/sampling")``.

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (PPO-IS,
    vanilla-IS and TIS).
    """

    type_name: ClassVar[str] = "ppo_is"
    trust_region: ClassVar[str] = "clip of pi / mu"
    purpose: ClassVar[str] = "an ablation: mismatch and staleness under one clip"
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    reads: ClassVar[tuple[Field, ...]] = ("sampling_log_ratios",)

    def __post_init__(self) -> None:
        PPOClip(low=self.low, high=self.high, dual_clip=self.dual_clip)  # runs the checks of the settings they share

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-min(rho A, clip(rho, 1 - low, 1 + high) A) with rho = pi / mu; (B, T)."""
        return policy_losses.ppo_clip(
            inputs.need("sampling_log_ratios", self),
            inputs.advantages,
            low=self.low,
            high=self.high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """-clip(r, low, high) A log pi, the ratio detached. ``high`` and ``low`` are the bounds themselves (None = none).

    What carries gradient: log pi, on every token. Biased by the cap. See ``functional.cispo``.

    Reference: MiniMax 2025, CISPO (arXiv:2506.13585).
    """

    type_name: ClassVar[str] = "cispo"
    trust_region: ClassVar[str] = "cap of the detached r"
    purpose: ClassVar[str] = "tokens that a clip would silence (reflection, rare words)"
    high: float = 5.0
    low: float | None = None
    level: RatioLevel = "token"

    def __post_init__(self) -> None:
        check_level(self.level)
        check_positive(high=self.high)
        check_positive_or_none(low=self.low)
        if self.low is not None and self.low > self.high:
            raise ValueError(f"low must be at most high={self.high}, but got {self.low}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-sg[clip(r, low, high)] A log pi, (B, T)."""
        ratio = at_level(inputs, self.level)
        return policy_losses.cispo(ratio, inputs.logps, inputs.advantages, high=self.high, low=self.low)


@dataclass(frozen=True, kw_only=True)
class GPG(PolicyLoss):
    """Plain policy gradient (REINFORCE): -A log pi. It contains no ratio, so weights may hold any ratio.

    What carries gradient: log pi. Unbiased on-policy, and off-policy with ``RawWeight(level="sequence",
    ratio="current/sampling")``. With ``unit_ratio`` the loss is -A pi / sg[pi], of the same gradient: its value is -A,
    and under a weight on pi / mu it is -A pi / mu (prime-rl, NeMo-RL's ``force_on_policy_ratio``).

    Reference: Chu et al. 2025, GPG (arXiv:2504.02546); verl's ``gpg`` and the ``reinforce`` of its bypass mode.
    """

    type_name: ClassVar[str] = "gpg"
    trust_region: ClassVar[str] = "none"
    purpose: ClassVar[str] = "a baseline: weights may contain any ratio"
    uses_ratio: ClassVar[bool] = False
    unit_ratio: bool = False

    def __post_init__(self) -> None:
        check_bool(unit_ratio=self.unit_ratio)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-A log pi, or -A pi / sg[pi]; (B, T)."""
        factor = policy_losses.unit_ratio(own_logps(inputs)) if self.unit_ratio else own_logps(inputs)
        return LossTerms(-inputs.advantages * factor)


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """Soft-gated ratio with a temperature for each sign of the advantage. See ``functional.sapo``.

    What carries gradient: the ratio, with weight 4 sigmoid(1 - sigmoid) of tau (r - 1): 1 at r = 1, falling on both
    sides. Biased by the gate.

    Reference: Gao et al. 2025, SAPO (arXiv:2511.20347).
    """

    type_name: ClassVar[str] = "sapo"
    trust_region: ClassVar[str] = "smooth gate that closes around r = 1"
    purpose: ClassVar[str] = "avoiding the jump of a hard clip"
    temperature_pos: float = 1.0
    temperature_neg: float = 1.05
    level: RatioLevel = "token"
    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    def __post_init__(self) -> None:
        check_level(self.level)
        check_positive(temperature_pos=self.temperature_pos, temperature_neg=self.temperature_neg)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-(4 / tau) sigmoid(tau (r - 1)) A with the tau of A's sign; (B, T), or (B, 1) for sequence ratios."""
        return policy_losses.sapo(
            at_level(inputs, self.level),
            inputs.advantages,
            temperature_pos=self.temperature_pos,
            temperature_neg=self.temperature_neg,
        )


@dataclass(frozen=True, kw_only=True)
class ASPO(PolicyLoss):
    """Flipped ratio min(1/r, C) where A > 0, PPO's lower clip where A < 0. See ``functional.aspo``.

    The lower clip is at 1 - ``low``, and ``max_weight`` is C, a cap that keeps the gradient (None = none). With
    ``high`` the tokens with A > 0 and r above 1 + ``high`` have no gradient, as in the paper. What carries gradient:
    log pi. Heuristic; at r = 1 it is the policy gradient.

    Reference: Wang et al. 2025, ASPO (arXiv:2510.06062); by default without its hard clip where A > 0.
    """

    type_name: ClassVar[str] = "aspo"
    trust_region: ClassVar[str] = "clip; 1 / r instead of r if A > 0"
    purpose: ClassVar[str] = "unlikely tokens with a positive advantage, which a clip wastes"
    low: float = 0.2
    max_weight: float | None = 3.0
    high: float | None = None

    def __post_init__(self) -> None:
        check_positive(low=self.low)
        check_positive_or_none(max_weight=self.max_weight, high=self.high)
        if self.max_weight is not None and self.max_weight <= 1:
            raise ValueError(f"max_weight must be above 1, but got {self.max_weight}.")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-sg[min(1 / r, C)] A log pi where A > 0, else -sg[min(r, C)] A log pi, constant beyond a clip; (B, T)."""
        return policy_losses.aspo(
            inputs.log_ratios,
            inputs.logps,
            inputs.advantages,
            low=self.low,
            max_weight=self.max_weight,
            high=self.high,
        )


@dataclass(frozen=True, kw_only=True)
class DISPO(PolicyLoss):
    """-clip(r, 1 - low, 1 + high) A log pi with its bounds by correctness. See ``functional.dispo``.

    A response is correct if its reward is at least ``correct_threshold``. What carries gradient: log pi, on every
    token. Biased by the clip. All bounds must be given: the paper tunes them for each model.

    Reference: Karaman et al. 2026, DISPO (arXiv:2602.00983).
    """

    type_name: ClassVar[str] = "dispo"
    trust_region: ClassVar[str] = "clip of r with separate bounds for correct and incorrect responses"
    purpose: ClassVar[str] = "failure modes that differ by correctness"
    example: ClassVar[Mapping[str, Any]] = {
        "correct_threshold": 0.5,
        "low_correct": 0.2,
        "high_correct": 1.0,
        "low_incorrect": 0.5,
        "high_incorrect": 0.2,
    }
    correct_threshold: float
    low_correct: float
    high_correct: float
    low_incorrect: float
    high_incorrect: float
    reads: ClassVar[tuple[Field, ...]] = ("rewards",)

    def __post_init__(self) -> None:
        check_number("correct_threshold", self.correct_threshold)
        check_positive(low_correct=self.low_correct, high_correct=self.high_correct)
        check_positive(low_incorrect=self.low_incorrect, high_incorrect=self.high_incorrect)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-sg[clip(r, 1 - low, 1 + high)] A log pi with the bounds of correct or of incorrect responses; (B, T)."""
        return policy_losses.dispo(
            inputs.log_ratios,
            inputs.logps,
            inputs.advantages,
            inputs.need("rewards", self) >= self.correct_threshold,
            low_correct=self.low_correct,
            high_correct=self.high_correct,
            low_incorrect=self.low_incorrect,
            high_incorrect=self.high_incorrect,
        )


@dataclass(frozen=True, kw_only=True)
class DRO(PolicyLoss):
    """-A log pi + beta/2 log(pi / pi_old)^2. See ``functional.dro``.

    What carries gradient: log pi in both terms. ``beta`` has no default, as in verl.

    Reference: Richemond et al. 2024 (arXiv:2405.19107); verl's ``dro``.
    """

    type_name: ClassVar[str] = "dro"
    trust_region: ClassVar[str] = "square penalty on log r"
    purpose: ClassVar[str] = "limiting drift without the edge of a clip"
    example: ClassVar[Mapping[str, Any]] = {"beta": 1.0}
    beta: float

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """-A log pi + beta / 2 (log r)^2, (B, T)."""
        return policy_losses.dro(inputs.log_ratios, inputs.logps, inputs.advantages, beta=self.beta)
