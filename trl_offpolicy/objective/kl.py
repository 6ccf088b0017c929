"""The KL term of an objective: which estimate, how it is weighted, and a coefficient that may adapt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_bool, check_choice, check_number, check_positive, check_positive_or_none
from trl_offpolicy.functional.kl import (
    KL_ESTIMATORS,
    KLEstimator,
    adaptive_kl_coef,
    kl_estimate,
    ratio_weighted_kl,
    reference_log_ratio,
)
from trl_offpolicy.parts import Part

Place = Literal["loss", "reward"]
IN_REWARD: tuple[KLEstimator, ...] = ("k1", "abs", "k2", "k3")
"""Estimators that may be taken from a reward: those that differ by more than their gradient."""


class KLController(Part):
    """A coefficient that may move. Subclass it as a frozen, keyword-only dataclass with a field ``coef``.

    A coefficient that moves sets ``adapts`` and overrides :meth:`updated`.
    """

    coef: float
    """The present beta; at the start of training the initial one."""

    adapts: ClassVar[bool] = False
    """Whether it moves in training; ``coef`` then goes into the checkpoints."""

    def updated(self, kl: float, samples: int) -> KLController:
        """The controller with the coefficient of the next step. Every rank passes the same merged ``kl``.

        Args:
            kl: mean estimate per token of the optimizer step, nats.
            samples: responses of the step, over all ranks.
        """
        return self


@dataclass(frozen=True, kw_only=True)
class FixedKL(KLController):
    """A constant coefficient, the same as a plain number."""

    type_name: ClassVar[str] = "fixed"
    example: ClassVar[Mapping[str, Any]] = {"coef": 0.1}
    coef: float

    def __post_init__(self) -> None:
        check_positive(coef=self.coef)


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL(KLController):
    """A coefficient that rises above a target KL and falls below it. See ``functional.kl.adaptive_kl_coef``.

    Args:
        coef: the present beta; at the start of training the initial one.
        target: wanted KL in nats, in the unit of the ``kl`` that :meth:`updated` gets (``loss/kl``: per token).
        horizon: responses over which beta may change by 20 %.

    Example:
        >>> AdaptiveKL(coef=0.5, target=0.01, horizon=1000).updated(kl=0.005, samples=500).coef
        0.45
    """

    type_name: ClassVar[str] = "adaptive"
    example: ClassVar[Mapping[str, Any]] = {"coef": 0.1, "target": 0.01, "horizon": 1000}
    adapts: ClassVar[bool] = True
    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        check_positive(coef=self.coef, target=self.target, horizon=self.horizon)

    def updated(self, kl: float, samples: int) -> AdaptiveKL:
        """The controller with ``adaptive_kl_coef`` as the coefficient of the next step."""
        coef = adaptive_kl_coef(self.coef, kl, target=self.target, samples=samples, horizon=self.horizon)
        return replace(self, coef=coef)


@dataclass(frozen=True, kw_only=True)
class KLPenalty(Part):
    """KL(pi || ref), added to the loss per token or taken from the reward. In the loss it carries gradient.

    To write another penalty, subclass it and override :meth:`__call__`. The coefficient and its controller stay.

    Args:
        coef: beta, or a controller of it.
        estimator: k1, abs, k2, k3, k1+ or k3+; :func:`~trl_offpolicy.functional.kl.kl_estimate` says for each how value
            and gradient are biased and where it belongs. On-policy k2, k1+ and k3+ have the gradient of the KL.
        ratio_weighted: multiply by pi/pi_old, the ratio of the loss at its level. With the ratio of the token this
            makes gradient (all but abs) and value (k1, k3, k1+, k3+) unbiased on tokens of pi_old. The ratio carries
            gradient under k1, abs and k3, and is detached under k2, k1+ and k3+. k3 is then DeepSeek-V3.2's Eq. 7 and
            TRL's ``use_bias_correction_kl``.
        ratio_clip: eps of min(r k, clip(r, 1 - eps, 1 + eps) k), for several epochs on a batch; None = no clip. See
            :func:`~trl_offpolicy.functional.kl.ratio_weighted_kl`.
        max_value: cap on the estimate of a token, nats. Its gradient ends there (except for k1+ and k3+). None = no
            cap. verl: 10 on k3.
        place: "loss", or "reward": each token of the old policy then costs coef times its estimate, before the
            advantages are made (Ziegler et al. 2019, arXiv:1909.08593, Eq. 2; verl's ``use_kl_in_reward``). The policy
            loss with its clip and weights then acts on the KL too. With k1 this is unbiased on-policy. The old policy
            (not in mode "bypass") and the reference are scored once a generation, and the coefficient is fixed.
    """

    example: ClassVar[Mapping[str, Any]] = {"coef": 0.1}
    coef: float | KLController
    estimator: KLEstimator = "k3"
    ratio_weighted: bool = False
    ratio_clip: float | None = None
    max_value: float | None = None
    place: Place = "loss"

    def __post_init__(self) -> None:
        if not isinstance(self.coef, KLController):
            check_number("coef", self.coef)
            if self.coef <= 0:
                raise ValueError(
                    f"coef must be positive and finite (None switches the KL term off), but got {self.coef}."
                )
        check_choice("estimator", self.estimator, KL_ESTIMATORS)
        check_bool(ratio_weighted=self.ratio_weighted)
        check_positive_or_none(max_value=self.max_value)
        if self.ratio_clip is not None:
            check_positive(ratio_clip=self.ratio_clip)
            if not self.ratio_weighted:
                raise ValueError("ratio_weighted must be True with ratio_clip, which clips that ratio, but got False.")
        check_choice("place", self.place, get_args(Place))
        if self.in_reward:
            self._check_in_reward()

    def _check_in_reward(self) -> None:
        if self.ratio_weighted:
            raise ValueError("ratio_weighted must be False with place 'reward', where no ratio is left, but got True.")
        if self.estimator not in IN_REWARD:
            raise ValueError(
                f"estimator must be one of {list(IN_REWARD)} with place 'reward', which has no gradient of its own, "
                f"but got {self.estimator!r}."
            )
        if self.adapts:
            raise NotImplementedError(f"coef must be a number with place 'reward', but got {self.coef!r}.")

    @property
    def in_reward(self) -> bool:
        """True if it is taken from the reward, and is no term of the loss."""
        return self.place == "reward"

    @torch.no_grad()
    def token_rewards(self, logps: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """What each token costs, -coef times its estimate; (B, T) float32, 0 outside ``mask``.

        Added to rewards by token, which are then summed to go, it gives the KL of the whole response. Added to
        advantages, it gives the KL of each token given its prefix: k1 then has the gradient of k2 as a loss.

        Args:
            logps: (B, T) log-probs of the old policy, nats.
            reference: (B, T) log-probs of the reference; where they are not finite nothing is taken.
            mask: (B, T) bool, True = trainable token.
        """
        log_ratios = reference_log_ratio(logps, reference, mask)
        estimate = self(log_ratios, torch.zeros_like(log_ratios))  # of pi_old itself: log(pi / pi_old) = 0
        return torch.where(mask, -self.beta * estimate, 0.0).float()

    @property
    def beta(self) -> float:
        """The present coefficient as a number."""
        return self.coef.coef if isinstance(self.coef, KLController) else self.coef

    def __call__(self, log_ratios: Tensor, policy_log_ratios: Tensor) -> Tensor:
        """The estimate of each token, (B, T), without the coefficient.

        Args:
            log_ratios: (B, T) log(pi / ref), with gradient.
            policy_log_ratios: (B, T) or (B, 1) log(pi / pi_old), with gradient; read if ``ratio_weighted``.
        """
        if not self.ratio_weighted:
            return kl_estimate(log_ratios, self.estimator, max_value=self.max_value)
        return ratio_weighted_kl(
            log_ratios, policy_log_ratios, self.estimator, ratio_clip=self.ratio_clip, max_value=self.max_value
        )

    @property
    def adapts(self) -> bool:
        """True if the coefficient moves in training."""
        return isinstance(self.coef, KLController) and self.coef.adapts

    def updated(self, kl: float, samples: int) -> KLPenalty:
        """The penalty with the coefficient of the next step; unchanged unless it :attr:`adapts`."""
        if not self.adapts or not isinstance(self.coef, KLController):
            return self
        return replace(self, coef=self.coef.updated(kl, samples))

    def state_dict(self) -> dict[str, float]:
        """What changes in training as plain numbers, for a checkpoint."""
        return {"coef": self.beta} if self.adapts else {}

    def restored(self, state: Mapping[str, float]) -> KLPenalty:
        """The penalty with the coefficient of :meth:`state_dict` and the settings of this object.

        Raises:
            ValueError: ``state`` is that of another kind of coefficient.
        """
        if set(state) != set(self.state_dict()):
            kind = type(self.coef).__name__
            raise ValueError(f"state must have the keys {list(self.state_dict())} of {kind}, but got {list(state)}.")
        return replace(self, coef=replace(cast("Any", self.coef), **state)) if self.adapts else self
