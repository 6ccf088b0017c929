"""Shaping of the advantages in the loss step: what depends on the tokens' probabilities or entropies.

An advantage estimator makes the advantages from rewards, before the first step on a batch. A shaping changes them at
each step, before correction and loss see them: ``Objective(shaping=(DiscrepancyPenalty(), ZeroVariance(...)))``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_choice, check_not_negative, check_number, check_positive
from trl_offpolicy.functional import shaping
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.masks import divergence
from trl_offpolicy.parts import Part, overridable
from trl_offpolicy.types import PolicyBatch

__all__ = ["AdvantageShaping", "DiscrepancyPenalty", "Shaped", "ZeroVariance"]

Discrepancy = Literal["binary_tv", "abs", "k2", "k3", "binary_kl"]
BatchField = Literal["entropies", "rewards", "group_rewards"]


class Shaped(NamedTuple):
    """The advantages (B, T) float32; ``measured`` (B, T), what an adapting shaping holds down, or None."""

    advantages: Tensor
    measured: Tensor | None = None


class AdvantageShaping(Part):
    """A change of the advantages by token. Subclass it as a frozen, keyword-only dataclass.

    A subclass must write :meth:`__call__`. One that moves in training sets ``adapts``, has a field ``coef``, returns
    what it measures and overrides :meth:`updated`.
    """

    adapts: ClassVar[bool] = False
    """Whether it measures, and its ``coef`` can move in training. Of the shapings of an objective only one may."""

    @overridable
    def needs_sampling(self) -> bool:
        """True if it reads the log-probs of the policy that sampled."""
        return False

    @overridable
    def reads(self) -> tuple[BatchField, ...]:
        """Fields of the batch that it needs besides the log-probs."""
        return ()

    @overridable
    def moves(self) -> bool:
        """True if its coefficient moves in this run."""
        return self.adapts

    def updated(self, measured: float) -> AdvantageShaping:
        """The shaping of the next step. Every rank passes the same mean over the trainable tokens of the step."""
        return self

    @abstractmethod
    def __call__(self, batch: PolicyBatch) -> Shaped:
        """The shaped advantages. The batch's tensors may hold anything on padding; nothing may carry gradient."""


@dataclass(frozen=True, kw_only=True)
class DiscrepancyPenalty(AdvantageShaping):
    """DCMDP: the discrepancy of trainer and engine is taken from the advantage, at a price that adapts.

    A'_t = A_t - coef d_t. d_t compares the trainer's old policy with the engine's at the sampled token; where one of
    the two is not known it is 0. After each optimizer step coef' = clip(coef + rate (mean_t d_t - target), 0,
    max_coef). So the policy is free while the mean discrepancy is within ``target``, and drawn to tokens on which both
    sides agree while it is not. See ``functional.shaping``.

    Args:
        coef: the price lambda; with a target the one at the start.
        target: bound on the mean discrepancy, in the unit of ``statistic``; None = the price stays. Measure first
            (``offpolicy/mismatch/prob_diff_mean`` for binary_tv): a bound below what the precision makes is never met.
        rate: step of the price for each unit of violation.
        max_coef: the largest price.
        statistic: binary_tv, the absolute difference in probability; or abs, k2, k3 or binary_kl, in nats
            (:func:`~trl_offpolicy.functional.masks.divergence`).

    Raises:
        ValueError: a value is out of range.

    Reference: Liu et al. 2026, DCMDP (arXiv:2606.08779). The form A - lambda |p - q| and its dual ascent are those of a
    public implementation; we have read the paper's summary, not its equations.
    """

    type_name: ClassVar[str] = "discrepancy"
    adapts: ClassVar[bool] = True
    needs_sampling: ClassVar[bool] = True
    coef: float = 0.05
    target: float | None = 0.02
    rate: float = 1.0
    max_coef: float = 1.0
    statistic: Discrepancy = "binary_tv"

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, get_args(Discrepancy))
        check_not_negative(coef=self.coef)
        check_positive(rate=self.rate, max_coef=self.max_coef)
        if self.target is not None:
            check_positive(target=self.target)
        elif self.coef == 0:
            raise ValueError("coef must be positive without a target, else the shaping does nothing, but got 0.")
        if self.coef > self.max_coef:
            raise ValueError(f"coef must be at most max_coef ({self.max_coef}), but got {self.coef}.")

    @property
    def moves(self) -> bool:
        """True if there is a target, which the coefficient follows."""
        return self.target is not None

    def updated(self, measured: float) -> DiscrepancyPenalty:
        """One step of dual ascent: the price rises while ``measured`` is above the target."""
        if self.target is None:
            return self
        coef = shaping.dual_ascent(
            self.coef, measured, target=self.target, rate=self.rate, largest=self.max_coef
        )  # fmt: skip
        return replace(self, coef=coef)

    def __call__(self, batch: PolicyBatch) -> Shaped:
        """The advantages less the price of each token, (B, T), and the discrepancies."""
        sampling = batch.logps("sampling")
        mask, lags = batch.mask, batch.version_lags
        if batch.old_per_token_logps is None and lags is not None:
            mask = mask & (lags <= 0)  # the current policy is the old one only of rows that it sampled itself
        ratio = log_ratio(batch.logps("old"), sampling, mask)
        known = torch.where(ratio.observed, sampling.float().clamp(max=0.0), 0.0)
        found = divergence(ratio.values, self.statistic, known)
        discrepancy = torch.where(ratio.observed, found, 0.0)
        advantages = shaping.penalised_advantages(
            batch.token_advantages, discrepancy, batch.mask, coef=self.coef
        )  # fmt: skip
        return Shaped(advantages, discrepancy)


@dataclass(frozen=True, kw_only=True)
class ZeroVariance(AdvantageShaping):
    """RL-ZVP: responses to a prompt on which all have the same reward learn by the entropy of their tokens.

    alpha H_t where all are correct, -alpha (max_k H_k - H_t) where all are wrong; other prompts keep their advantages.
    See :func:`~trl_offpolicy.functional.shaping.zero_variance_advantages`.

    Args:
        correct_threshold: a response is correct if its reward is at least this.
        alpha: scale of the advantages, which have the size of a normalised one at alpha H = 1.

    Raises:
        ValueError: a value is out of range.

    Reference: Le et al. 2025, "No prompt left behind", RL-ZVP (arXiv:2509.21880), Eq. 5, as two public implementations
    have it. The entropy is that of the policy now; at the first step on a batch that is the policy that sampled. The
    default of alpha is this kit's starting point. CompassMax (arXiv:2512.07710) names the same problem.
    """

    type_name: ClassVar[str] = "zero_variance"
    example: ClassVar[Mapping[str, Any]] = {"correct_threshold": 0.5}
    reads: ClassVar[tuple[BatchField, ...]] = ("entropies", "rewards", "group_rewards")
    correct_threshold: float
    alpha: float = 0.1

    def __post_init__(self) -> None:
        check_number("correct_threshold", self.correct_threshold)
        check_positive(alpha=self.alpha)

    def __call__(self, batch: PolicyBatch) -> Shaped:
        """The advantages, (B, T)."""
        entropies, rewards, of_group = needed(batch, self)
        own = rewards.unsqueeze(-1)
        advantages = shaping.zero_variance_advantages(
            batch.token_advantages,
            entropies.detach(),
            batch.mask,
            shaping.is_unanimous(of_group) & own.isfinite(),
            own >= self.correct_threshold,
            alpha=self.alpha,
        )
        return Shaped(advantages)


def needed(batch: PolicyBatch, shaped: AdvantageShaping) -> tuple[Tensor, ...]:
    """The tensors that ``shaped.reads`` names, float32.

    Raises:
        ValueError: the batch lacks one of them.
    """
    for name in shaped.reads:
        if getattr(batch, name) is None:
            raise ValueError(f"{name} must be given for {type(shaped).__name__}, but got None.")
    return tuple(getattr(batch, name).float() for name in shaped.reads)
