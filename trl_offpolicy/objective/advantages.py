"""Advantage estimators as small frozen dataclasses: from the rewards of a generation batch to (B,) or (B, T).

They read whole prompt groups, so they run before a trainer shuffles and splits the batch, and all ranks call them
together. Each names what it ``requires`` of :class:`AdvantageInputs`. A response that is not ``counted`` (rejected, or
without a reward) gets 0 and does not move the others. A group of one has nothing to compare: its reward minus its own
mean is 0. (verl compares with 0 and leaves it its whole reward: ``alone="return"``.) That stays 0 and moves no other
response, with these exceptions:

- ``GRPO(scale="batch")``: it gets 0, and its reward counts in the batch's standard deviation.
- ``GDPO``: it gets 0 up to rounding, and this 0 counts in the batch's standard deviation.
- ``REINFORCEPlusPlusBaseline``: its 0 is normalised with the batch and counts in the mean and the standard deviation of
  the batch's tokens. It gets - mean / std, which is 0 only if that mean is 0.
- ``OptimalTokenBaseline(alone="return")``: it gets its return.
- ``GPG``: it gets 0, and counts in the share of responses with a reward.
- ``REINFORCEPlusPlus`` has no groups: every response is compared with the batch.
- ``ReMax`` has none either: every response is compared with the greedy one to its prompt.

"Unbiased" means on-policy.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_bool, check_choice, check_positive
from trl_offpolicy.functional.advantages import (
    OTHERS_EPSILON,
    STD_EPSILON,
    Alone,
    ScaleRewards,
    best_of_group,
    discounted_returns,
    group_advantages,
    in_company,
    leave_one_out,
    normalised_by_function,
    normalised_by_response,
    optimal_token_baseline,
    returns_to_go,
    reward_if_alone,
    scaled_by_rewarded,
    scaled_by_the_others,
    score_energy,
    weighted_baseline,
    whitened_by_token,
    whitened_tokens,
)
from trl_offpolicy.parts import Part, overridable
from trl_offpolicy.types import Scope

Weigh = Literal["token", "path"]
_ENERGY = ("mask", "per_token_logps", "sum_sq_probs")


_HINTS = {
    "sum_sq_probs": " Ask the fused head of the trainer's forward for it.",
    "weights": " Take them from a Correction's output.",
    "greedy_rewards": " Both trainers sample a greedy completion of each prompt for it.",
}


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator sees of a generation batch. Fields are (B, T) by default, None where absent, without gradient.

    Args:
        rewards: (B,), or (B, K) with a column for each reward function; NaN = no reward.
        group_ids: (B,) integer id of the prompt.
        reward_weights: (K,), the weight of each function in the sum; None = ones.
        counted: (B,) bool, responses that belong to the baseline; None = all.
        mask: bool, True = trainable token.
        token_rewards: rewards by token besides the outcome, e.g. those of :class:`~trl_offpolicy.KLPenalty`. A response
            with one that is not finite on ``mask`` counts as one without a reward.
        per_token_logps: log-probs of the policy at rollout weights (old), nats.
        sum_sq_probs: sum over the vocabulary of its probabilities squared.
        weights: (B, 1) or (B, T) importance weights.
        greedy_rewards: (B,) total reward of the greedy completion of each row's prompt; not finite = it has none.
        squared_grad_norms: (B,) squared norm of each response's gradient, if a trainer has it.

    Raises:
        ValueError: a field's shape does not fit.
        TypeError: a field is not a tensor.
    """

    rewards: Tensor
    group_ids: Tensor
    reward_weights: Tensor | None = None
    counted: Tensor | None = None
    mask: Tensor | None = None
    token_rewards: Tensor | None = None
    per_token_logps: Tensor | None = None
    sum_sq_probs: Tensor | None = None
    weights: Tensor | None = None
    squared_grad_norms: Tensor | None = None
    greedy_rewards: Tensor | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            required = item.name in ("rewards", "group_ids")
            if not isinstance(value, Tensor) and (required or value is not None):
                raise TypeError(f"{item.name} must be a tensor, but got {type(value).__name__}.")
        if self.rewards.dim() not in (1, 2):
            raise ValueError(f"rewards must have shape (B,) or (B, K), but got {tuple(self.rewards.shape)}.")
        rows, functions = self.by_function.shape
        shapes: dict[str, list[tuple[int, ...]]] = {"reward_weights": [(functions,)]}
        shapes |= {name: [(rows,)] for name in ("group_ids", "counted", "squared_grad_norms", "greedy_rewards")}
        if self.mask is not None:
            length = self.mask.shape[-1]
            by_token = ("mask", "token_rewards", "per_token_logps", "sum_sq_probs")
            shapes |= {name: [(rows, length)] for name in by_token}
            shapes["weights"] = [(rows, 1), (rows, length)]
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and item.name in shapes and tuple(value.shape) not in shapes[item.name]:
                expected = " or ".join(str(shape) for shape in shapes[item.name])
                raise ValueError(f"{item.name} must have shape {expected}, but got {tuple(value.shape)}.")

    @property
    def by_function(self) -> Tensor:
        """(B, K) float32 rewards, one column per reward function."""
        return self.rewards.unsqueeze(1) if self.rewards.dim() == 1 else self.rewards

    @property
    def outcome(self) -> Tensor:
        """(B,) float32, the weighted sum of the reward functions that give a finite reward; NaN where none does."""
        rewards = self.by_function.float()
        rewards = torch.where(rewards.isfinite(), rewards, torch.nan)
        weighted = rewards if self.reward_weights is None else rewards * self.reward_weights.to(rewards)
        return torch.where(rewards.isnan().all(-1), torch.nan, weighted.nansum(-1))

    @property
    def total(self) -> Tensor:
        """(B,) float32, the outcome plus the rewards by token."""
        if self.token_rewards is None:
            return self.outcome
        return self.outcome + torch.where(self.need("mask", "token_rewards"), self.token_rewards.float(), 0.0).sum(-1)

    @property
    def present(self) -> Tensor:
        """(B,) bool: the responses that are counted and have a reward, whose total is finite."""
        rewarded = self.total.isfinite()
        return rewarded if self.counted is None else rewarded & (self.counted != 0)

    def need(self, name: str, reader: str) -> Tensor:
        """The tensor of the field ``name``; a mask comes as bool.

        Raises:
            ValueError: it is absent.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} must be given for {reader}, but got None.{_HINTS.get(name, '')}")
        return value != 0 if name == "mask" else value

    def energy(self, reader: str, weights: Tensor | None) -> Tensor:
        """(B, T) :func:`~trl_offpolicy.functional.advantages.score_energy`."""
        mask, logps = self.need("mask", reader), self.need("per_token_logps", reader)
        return score_energy(logps, self.need("sum_sq_probs", reader), mask, weights)


class AdvantageEstimator(Part):
    """Rewards to advantages. Subclass it as a frozen, keyword-only dataclass.

    A subclass must write :meth:`__call__`. Everything else has the default below. A field, a class attribute or a
    property of the same name in the subclass replaces it.
    """

    by_token: ClassVar[bool] = False
    """Whether tokens of one response may have different advantages."""

    formula: ClassVar[str] = "-"
    """The formula in one line, for the map in the docs."""

    bias: ClassVar[str] = "-"
    """How it is biased on-policy, for the same map."""

    @overridable
    def requires(self) -> tuple[str, ...]:
        """Fields of :class:`AdvantageInputs` that it reads besides rewards and groups."""
        return ()

    @overridable
    def scope(self) -> Scope:
        """What it must see at once: the prompt group or the whole generation batch."""
        return "group"

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """The advantages, (B,) float32, or (B, T) if ``by_token``."""


@dataclass(frozen=True, kw_only=True)
class GRPO(AdvantageEstimator):
    """(r - mean) / (std + epsilon) of the group; biased towards prompts of small spread.

    Args:
        scale: standard deviation of the "group" or of the whole "batch" (groups of one count in it, too), or "none".
        epsilon: added to the standard deviation; TRL 1e-4, verl 1e-6.
        alone: what a group of one gets, "zero" or its reward ("return", verl; not with scale "batch").

    Reference: Shao et al. 2024 (arXiv:2402.03300). See :func:`~trl_offpolicy.functional.advantages.group_advantages`.

    Example:
        >>> inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]))
        >>> GRPO(scale="none")(inputs)
        tensor([ 0.5000, -0.5000])
    """

    type_name: ClassVar[str] = "grpo"
    formula: ClassVar[str] = "(r - mean) / (std + 1e-4)"
    bias: ClassVar[str] = "towards prompts of small spread"
    scale: ScaleRewards = "group"
    epsilon: float = STD_EPSILON
    alone: Alone = "zero"

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, get_args(ScaleRewards))
        check_positive(epsilon=self.epsilon)
        check_choice("alone", self.alone, get_args(Alone))
        if self.scale == "batch" and self.alone != "zero":
            raise ValueError(f"alone must be 'zero' with scale 'batch', but got {self.alone!r}.")

    @property
    def scope(self) -> Scope:
        """The generation batch if its standard deviation is used, else the group."""
        return "generation_batch" if self.scale == "batch" else "group"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """(r - mean) / (std + epsilon), or r - mean with ``scale="none"``; (B,) float32."""
        advantages = group_advantages(
            inputs.total, inputs.group_ids, inputs.present, scale_rewards=self.scale, epsilon=self.epsilon
        )
        return _with_alone(self.alone, advantages, inputs)


def _with_alone(alone: Alone, advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """The advantages as they are (groups of one have 0), or with the reward of groups of one."""
    if alone == "zero":
        return advantages
    return reward_if_alone(advantages, inputs.total, inputs.group_ids, inputs.present)


@dataclass(frozen=True, kw_only=True)
class DrGRPO(AdvantageEstimator):
    """r - mean of the group: unbiased up to the factor (n - 1) / n. Liu et al. 2025 (arXiv:2503.20783)."""

    type_name: ClassVar[str] = "dr_grpo"
    formula: ClassVar[str] = "r - mean"
    bias: ClassVar[str] = "none but the factor (n - 1) / n"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """(B,) float32: r - mean of the group."""
        return group_advantages(inputs.total, inputs.group_ids, inputs.present, scale_rewards="none")


@dataclass(frozen=True, kw_only=True)
class RLOO(AdvantageEstimator):
    """r - mean of the others: unbiased. See :func:`~trl_offpolicy.functional.advantages.leave_one_out`.

    Args:
        scale: "none"; or "others", over the standard deviation of the other responses, as NeMo-RL does by default
            (biased: :func:`~trl_offpolicy.functional.advantages.scaled_by_the_others`).
        epsilon: added to that standard deviation.
        normalize: then (A - mean) / (std + 1e-4) over the responses of the batch that were compared, as TRL's
            ``normalize_advantages`` does. This scales all of them by one number, up to a small mean.
        alone: what a group of one gets, "zero" or its reward ("return", verl; not with ``normalize``).

    Example:
        >>> inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]))
        >>> RLOO()(inputs)
        tensor([ 1., -1.])
    """

    type_name: ClassVar[str] = "rloo"
    formula: ClassVar[str] = "r - mean of the others"
    bias: ClassVar[str] = "none"
    scale: Literal["none", "others"] = "none"
    epsilon: float = OTHERS_EPSILON
    normalize: bool = False
    alone: Alone = "zero"

    def __post_init__(self) -> None:
        check_bool(normalize=self.normalize)
        check_choice("alone", self.alone, get_args(Alone))
        check_choice("scale", self.scale, ("none", "others"))
        check_positive(epsilon=self.epsilon)
        if self.normalize and self.scale != "none":
            raise ValueError(f"scale must be 'none' with normalize, but got {self.scale!r}.")
        if self.normalize and self.alone != "zero":
            raise ValueError(f"alone must be 'zero' with normalize, but got {self.alone!r}.")

    @property
    def scope(self) -> Scope:
        """The generation batch if it is normalised over it, else the group."""
        return "generation_batch" if self.normalize else "group"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """(B,) float32: r - mean of the other responses of the group, or that over their standard deviation."""
        if self.scale == "others":
            scaled = scaled_by_the_others(inputs.total, inputs.group_ids, inputs.present, epsilon=self.epsilon)
            return _with_alone(self.alone, scaled, inputs)
        advantages = leave_one_out(inputs.total, inputs.group_ids, inputs.present)
        if not self.normalize:
            return _with_alone(self.alone, advantages, inputs)
        return normalised_by_response(advantages, in_company(inputs.group_ids, inputs.present))


@dataclass(frozen=True, kw_only=True)
class OPO(AdvantageEstimator):
    """r - length-weighted mean: see :func:`~trl_offpolicy.functional.advantages.weighted_baseline`.

    Args:
        alone: what a group of one gets, "zero" or its reward ("return", verl).
    """

    type_name: ClassVar[str] = "opo"
    formula: ClassVar[str] = "r - mean weighted by length"
    bias: ClassVar[str] = "order 1 / n"
    requires: ClassVar[tuple[str, ...]] = ("mask",)
    alone: Alone = "zero"

    def __post_init__(self) -> None:
        check_choice("alone", self.alone, get_args(Alone))

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """(B,) float32: r - mean of the group weighted by length."""
        lengths = inputs.need("mask", "OPO").sum(-1)
        advantages = weighted_baseline(inputs.total, inputs.group_ids, inputs.present, lengths)
        return _with_alone(self.alone, advantages, inputs)


@dataclass(frozen=True, kw_only=True)
class GDPO(AdvantageEstimator):
    """Each reward function by its own spread, then the batch's; biased. A group of one gets 0, up to rounding.

    See ``functional.advantages.normalised_by_function``.
    """

    type_name: ClassVar[str] = "gdpo"
    formula: ClassVar[str] = "each reward function by its spread, then by the batch's"
    bias: ClassVar[str] = "as grpo, per function"
    scope: ClassVar[Scope] = "generation_batch"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """The weighted sum of the rewards normalised in the group, normalised over the batch; (B,) float32."""
        if inputs.token_rewards is not None:
            raise NotImplementedError(
                "token_rewards must be None with GDPO (add a column to rewards), but got a tensor."
            )
        return normalised_by_function(inputs.by_function, inputs.group_ids, inputs.present, inputs.reward_weights)


@dataclass(frozen=True, kw_only=True)
class REINFORCEPlusPlusBaseline(AdvantageEstimator):
    """r - mean of the group, then normalised over the batch's tokens: one scale for all prompts, with little bias.

    A group of one enters as 0 and leaves as - mean / std of the batch's tokens, as in the paper's formula. That is 0
    only if the mean is 0, e.g. with responses of equal length. See
    :func:`~trl_offpolicy.functional.advantages.whitened_by_token`.

    Args:
        scale: "group" divides by the group's standard deviation first (AReaL's examples), "none" does not.
        epsilon: added to that standard deviation.
        alone: what a group of one has before it is normalised, "zero" or its reward ("return", verl).
    """

    type_name: ClassVar[str] = "reinforce_plus_plus_baseline"
    formula: ClassVar[str] = "r - mean, then (A - mean) / std of the batch's tokens"
    bias: ClassVar[str] = "little: one scale for all"
    requires: ClassVar[tuple[str, ...]] = ("mask",)
    scope: ClassVar[Scope] = "generation_batch"
    scale: Literal["group", "none"] = "none"
    epsilon: float = STD_EPSILON
    alone: Alone = "zero"

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("group", "none"))
        check_positive(epsilon=self.epsilon)
        check_choice("alone", self.alone, get_args(Alone))

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """(B,) float32: r - mean of the group, normalised over the tokens of the batch."""
        mask = inputs.need("mask", "REINFORCEPlusPlusBaseline")
        centred = group_advantages(
            inputs.total, inputs.group_ids, inputs.present, scale_rewards=self.scale, epsilon=self.epsilon
        )
        centred = _with_alone(self.alone, centred, inputs)
        return whitened_by_token(centred, torch.where(inputs.present, mask.sum(-1), 0))


@dataclass(frozen=True, kw_only=True)
class REINFORCEPlusPlus(AdvantageEstimator):
    """The return of each token, normalised over the batch's tokens; prompts are not compared within their group.

    It does not need groups, so ``num_generations`` may be small. Easy and hard prompts share one baseline, which has
    more variance than a group's.

    Args:
        discount: gamma, the factor for each trainable token between a token and its reward.

    Reference: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), as verl computes it. See
    ``functional.advantages.discounted_returns``.

    Example:
        >>> mask = torch.tensor([[True], [True]])
        >>> inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 1]), mask=mask)
        >>> REINFORCEPlusPlus()(inputs)
        tensor([[ 0.7071],
                [-0.7071]])
    """

    type_name: ClassVar[str] = "reinforce_plus_plus"
    formula: ClassVar[str] = "per token: (return - mean) / std of the batch's tokens"
    bias: ClassVar[str] = "little: one scale for all"
    requires: ClassVar[tuple[str, ...]] = ("mask",)
    scope: ClassVar[Scope] = "generation_batch"
    by_token: ClassVar[bool] = True
    discount: float = 1.0

    def __post_init__(self) -> None:
        check_positive(discount=self.discount)
        if self.discount > 1:
            raise ValueError(f"discount must lie in (0, 1], but got {self.discount}.")

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """The normalised return of each token; (B, T) float32."""
        mask = inputs.need("mask", "REINFORCEPlusPlus") & inputs.present.unsqueeze(1)
        outcome = torch.where(inputs.present, inputs.outcome, 0.0)
        return whitened_tokens(discounted_returns(outcome, mask, inputs.token_rewards, discount=self.discount), mask)


@dataclass(frozen=True, kw_only=True)
class PassK(AdvantageEstimator):
    """Only the best response of a group counts, by its lead: see ``functional.advantages.best_of_group``.

    Args:
        scale: divide by the standard deviation of the "group", or "none".
        epsilon: added to the standard deviation; verl 1e-6.

    Example:
        >>> inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]))
        >>> PassK(scale="none")(inputs)
        tensor([1., 0.])
    """

    type_name: ClassVar[str] = "grpo_passk"
    formula: ClassVar[str] = "(r - best of the others)+ / (std + 1e-4)"
    bias: ClassVar[str] = "towards the best response of a group, by design"
    scale: Literal["group", "none"] = "group"
    epsilon: float = STD_EPSILON

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("group", "none"))
        check_positive(epsilon=self.epsilon)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """The lead of the best response of each group, 0 for all others; (B,) float32."""
        return best_of_group(
            inputs.total, inputs.group_ids, inputs.present, scale_rewards=self.scale, epsilon=self.epsilon
        )


@dataclass(frozen=True, kw_only=True)
class GPG(AdvantageEstimator):
    """B / m (r - mean): see :func:`~trl_offpolicy.functional.advantages.scaled_by_rewarded`.

    Args:
        alone: what a group of one has before the factor B / m, "zero" or its reward ("return", verl).

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
        >>> GPG()(AdvantageInputs(rewards=rewards, group_ids=ids))
        tensor([ 2., -2.,  0.,  0.])
    """

    type_name: ClassVar[str] = "gpg"
    formula: ClassVar[str] = "(r - mean) / share of the batch's rewards that are not 0"
    bias: ClassVar[str] = "a factor that is one for the whole batch"
    scope: ClassVar[Scope] = "generation_batch"
    alone: Alone = "zero"

    def __post_init__(self) -> None:
        check_choice("alone", self.alone, get_args(Alone))

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """The reward less the mean of its group, divided by the share of rewards that are not 0; (B,) float32."""
        return scaled_by_rewarded(inputs.total, inputs.group_ids, inputs.present, alone=self.alone)


@dataclass(frozen=True, kw_only=True)
class ReMax(AdvantageEstimator):
    """r - r_greedy: the baseline is the reward of the greedy completion of the same prompt; not scaled.

    Unbiased: the greedy completion does not depend on the one that is sampled. A group of one has a baseline, too, so
    it learns. A response whose prompt has no greedy reward gets 0. A KL penalty in the reward is not in the baseline.

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1])
        >>> ReMax()(AdvantageInputs(rewards=rewards, group_ids=ids, greedy_rewards=torch.tensor([0.5, 0.5, 1.0])))
        tensor([ 0.5000, -0.5000, -0.5000])

    Reference: Li et al. 2023, ReMax (arXiv:2310.10505), Algorithm 1; verl's ``remax``. Deviation: with a KL in the
    reward every token gets the whole response's, where verl counts from the token on.
    """

    type_name: ClassVar[str] = "remax"
    formula: ClassVar[str] = "r - reward of the prompt's greedy completion"
    bias: ClassVar[str] = "none"
    requires: ClassVar[tuple[str, ...]] = ("greedy_rewards",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """The reward less that of the greedy completion; (B,) float32."""
        baseline = inputs.need("greedy_rewards", "ReMax").detach().float()
        return torch.where(inputs.present & baseline.isfinite(), inputs.total - baseline, 0.0)


@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(AdvantageEstimator):
    """OTB, a baseline for every token: see ``functional.advantages.optimal_token_baseline``.

    Args:
        is_aware: weigh the energy by the importance weight squared; needs ``weights``.
        weigh: which energy: "token", each token's before the sum, by its own weight (verl's code); or "path", the sum
            up to a token, by the weight of that token (verl's documentation). Read with ``is_aware``.
        multi_turn: t counts trainable tokens (TIR-OTB), not positions.
        alone: what a token gets that no other response of the group reaches, "zero" or its "return" (verl).
    """

    type_name: ClassVar[str] = "optimal_token_baseline"
    formula: ClassVar[str] = "per token: return - energy-weighted mean of those that reach it"
    bias: ClassVar[str] = "order 1 / n"
    is_aware: bool = False
    multi_turn: bool = False
    alone: Alone = "zero"
    weigh: Weigh = "token"
    by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("alone", self.alone, get_args(Alone))
        check_choice("weigh", self.weigh, get_args(Weigh))
        check_bool(is_aware=self.is_aware, multi_turn=self.multi_turn)
        if self.weigh == "path" and not self.is_aware:
            raise ValueError("weigh must be 'token' unless is_aware is True, but got 'path'.")

    @property
    def requires(self) -> tuple[str, ...]:
        """Mask, log-probs and sums of squares, and the weights if ``is_aware``."""
        return (*_ENERGY, "weights") if self.is_aware else _ENERGY

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """G_t - B_t, the return from token t on minus its baseline; (B, T) float32."""
        name = "OptimalTokenBaseline"
        weights = inputs.need("weights", f"{name}(is_aware=True)") if self.is_aware else None
        by_path = self.weigh == "path"
        mask, energy = inputs.need("mask", name), inputs.energy(name, None if by_path else weights)
        return optimal_token_baseline(
            returns_to_go(inputs.outcome, mask, inputs.token_rewards),
            energy,
            mask,
            inputs.group_ids,
            inputs.present,
            multi_turn=self.multi_turn,
            alone=self.alone,
            path_weights=weights if by_path else None,
        )


@dataclass(frozen=True, kw_only=True)
class OPOB(AdvantageEstimator):
    """VCPO's off-policy baseline: sum w^2 ||g||^2 r / sum w^2 ||g||^2 over the group.

    ||g||^2 is ``squared_grad_norms`` if the inputs have it; the weights are then (B, 1). Otherwise w^2 ||g||^2 is the
    sum of the tokens' w^2 (1 - 2 pi + sum pi^2). That needs only the forward (mask, log-probs and sums of squares) and
    takes the scores of different tokens as uncorrelated. See
    :func:`~trl_offpolicy.functional.advantages.weighted_baseline`.

    Reference: Huang et al. 2026 (arXiv:2602.17616).
    """

    type_name: ClassVar[str] = "opob"
    formula: ClassVar[str] = "r - mean weighted by w^2 times the gradient's energy"
    bias: ClassVar[str] = "order 1 / n"
    requires: ClassVar[tuple[str, ...]] = (*_ENERGY, "weights")

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """(B,) float32: r - mean of the group weighted by w^2 times the squared gradient norm."""
        weights, norms = inputs.need("weights", "OPOB"), inputs.squared_grad_norms
        if norms is None:
            importance = inputs.energy("OPOB", weights).sum(-1)
        elif tuple(weights.shape) == (len(norms), 1):
            importance = weights.squeeze(1).float().square() * norms.float()
        else:
            raise ValueError(
                f"weights must have shape {(len(norms), 1)} with squared_grad_norms, but got {tuple(weights.shape)}."
            )
        return weighted_baseline(inputs.total, inputs.group_ids, inputs.present, importance)


__all__ = [
    "GDPO",
    "GPG",
    "GRPO",
    "OPO",
    "OPOB",
    "RLOO",
    "AdvantageEstimator",
    "AdvantageInputs",
    "DrGRPO",
    "OptimalTokenBaseline",
    "PassK",
    "REINFORCEPlusPlus",
    "REINFORCEPlusPlusBaseline",
    "ReMax",
]
