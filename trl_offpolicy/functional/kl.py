"""KL divergences from sampled tokens.

First comes k3 of any two policies, in both directions: everything in this kit that says k3 means :func:`k3`. Then comes
KL(pi || ref) during training: estimators and the adaptive coefficient.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_positive_or_none
from trl_offpolicy.functional._shapes import check_mask, check_tokens
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, LOG_RATIO_LIMIT, exp_of, expm1_of, ratio_of

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)
K2_GRADIENT: tuple[KLEstimator, ...] = ("k2", "k1+", "k3+")
"""Estimators whose gradient (not their value) is unbiased on tokens of pi. An importance ratio only weights it."""

MAX_KL_ERROR = 0.2
"""Ziegler et al.'s bound on the relative error that an adaptive coefficient reacts to."""


def k3(log_other_over_sampler: Tensor) -> Tensor:
    """KL(sampler || other) of each token, nats: Schulman's k3.

        k3 = exp(l) - 1 - l

    where l = log(other / sampler) of a token that the sampler drew. Unbiased, never negative, of low variance. The sign
    of l decides the direction: a caller that has log(sampler / other) passes its negative.

    Args:
        log_other_over_sampler: any shape, l in nats; clamp it to +-20 first, exp is not clamped here. Gradient flows.

    Reference: Schulman 2020, "Approximating KL divergence".

    Example:
        >>> k3(torch.tensor([0.0, 1.0, -1.0]))
        tensor([0.0000, 0.7183, 0.3679])
    """
    return expm1_of(log_other_over_sampler) - log_other_over_sampler  # exp(l) - 1 would be rounding noise for small l


def reverse_k3(log_other_over_sampler: Tensor) -> Tensor:
    """KL(other || sampler) of each token, nats, from tokens of the same sampler: the other direction of :func:`k3`.

        rho l - rho + 1

    where l = log(other / sampler) of a token that the sampler drew and rho = exp(l) is its importance weight, so that
    this is rho times k3 of -l. Unbiased, never negative.

    Args:
        log_other_over_sampler: as :func:`k3`.

    Example:
        >>> reverse_k3(torch.tensor([0.0, 2.0, -1.0]))
        tensor([0.0000, 8.3891, 0.2642])
    """
    log_ratios = log_other_over_sampler
    return exp_of(log_ratios) * log_ratios - expm1_of(log_ratios)  # not rho - 1, which is rounding noise near 1


def reference_log_ratio(logps: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Log-ratio of policy and reference on the sampled tokens, with the gradient of ``logps``.

        x_t = log pi(y_t) - log ref(y_t)

    Args:
        logps: (B, T) log pi, nats; carries gradient, finite on ``mask``.
        reference: (B, T) log ref; detached here.
        mask: (B, T) bool, True = trainable token.

    Returns:
        (B, T) float32; 0 and without gradient on padding and where the reference is not finite. The reference is held
        within +-10000 nats, so that the lowest float32, which some masks hold, leaves the estimate finite.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, logps=logps, reference=reference)
    reference = reference.detach().float()
    usable = mask & (reference.abs() < torch.inf)
    held = reference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(usable, logps.float(), 0.0) - torch.where(usable, held, 0.0)


def kl_estimate(log_ratios: Tensor, estimator: KLEstimator = "k3", *, max_value: float | None = None) -> Tensor:
    """KL(pi || ref) per token, nats, for tokens sampled from pi.

    With x = log(pi / ref), which is -l of :func:`k3`:

    ===== ==================== =========== ============ ======== =================================================
    name  value                expectation its gradient variance place
    ===== ==================== =========== ============ ======== =================================================
    k1    x                    unbiased    biased       high     in the reward; in the loss its mean gradient is 0
    abs   abs(x)               biased      biased       low      a distance to watch, or a pull of constant size
    k2    x^2 / 2              biased      unbiased     low      in the loss, on-policy
    k3    exp(-x) - 1 + x      unbiased    biased       low      in the loss weighted by the ratio; to be logged
    k1+   x                    unbiased    unbiased     high     in the loss: value of k1, gradient of k2
    k3+   exp(-x) - 1 + x      unbiased    unbiased     low      in the loss: value of k3, gradient of k2
    ===== ==================== =========== ============ ======== =================================================

    The column "its gradient" compares the gradient of the loss term with that of the token's KL given its prefix, which
    is x grad log pi in expectation. None of them includes what a token does to the KL of later tokens: the KL in the
    reward does. The mean gradient of k3 is that of KL(ref || pi).

    Args:
        log_ratios: (B, T) float32, log(pi / ref); carries gradient.
        estimator: one of the names above. The exponential of k3 is clamped to +20 nats, where its gradient ends; k1,
            abs and k2 are not clamped.
        max_value: cap on the estimate, nats. A capped token has no gradient, except under k1+ and k3+, whose gradient
            is that of k2 everywhere. None = no cap.

    Returns:
        Shape of ``log_ratios``, with the gradient of the table; 0 where the log-ratio is 0.

    Reference: Schulman 2020, "Approximating KL divergence"; the straight-through forms and the cap (10 on k3) as in
    verl's ``kl_penalty``.

    Example:
        >>> kl_estimate(torch.tensor([0.0, 1.0]), "k2"), kl_estimate(torch.tensor([0.0, 1.0]), "k3")
        (tensor([0.0000, 0.5000]), tensor([0.0000, 0.3679]))
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {list(KL_ESTIMATORS)}, but got {estimator!r}.")
    check_positive_or_none(max_value=max_value)
    if estimator in ("k1+", "k3+"):
        value = kl_estimate(log_ratios.detach(), "k1" if estimator == "k1+" else "k3", max_value=max_value)
        gradient = log_ratios.square() / 2
        return value + (gradient - gradient.detach())  # straight through: adds 0, with the gradient of k2
    if estimator == "k1":
        value = log_ratios
    elif estimator == "abs":
        value = log_ratios.abs()
    elif estimator == "k2":
        value = log_ratios.square() / 2
    else:
        value = k3((-log_ratios).clamp(max=LOG_RATIO_CLAMP))  # pi is the sampler here, ref the other policy
    return value if max_value is None else value.clamp(max=max_value)


def ratio_weighted_kl(
    log_ratios: Tensor,
    policy_log_ratios: Tensor,
    estimator: KLEstimator = "k3",
    *,
    ratio_clip: float | None = None,
    max_value: float | None = None,
) -> Tensor:
    """KL(pi || ref) per token from tokens of another policy: the estimate times the importance ratio.

        r k, or min(r k, clip(r, 1 - eps, 1 + eps) k) with ``ratio_clip`` = eps

    where r = pi / pi_old and k is the estimate. Under k1, abs and k3 the ratio carries gradient, which together gives
    the gradient of E_pi[estimate]; it is exact for k1 and k3. Under k2, k1+ and k3+ the ratio is detached and weights
    the gradient of k2, which is exact as well. The clip cuts r at 1 + eps where k >= 0 (all but k1 and k1+) and raises
    it to 1 - eps where k < 0. The result is then biased, with bounded variance. A cut ratio has no gradient, but the
    estimate keeps its own.

    Args:
        log_ratios: (B, T) float32, log(pi / ref); carries gradient.
        policy_log_ratios: (B, T) or (B, 1) float32, log(pi / pi_old); carries gradient; clamped to +-20 nats.
        estimator: see :func:`kl_estimate`.
        ratio_clip: eps, or None.
        max_value: cap on the estimate before the ratio multiplies it, see :func:`kl_estimate`.

    Returns:
        (B, T).

    Reference: DeepSeek-V3.2 (arXiv:2512.02556), Eq. 7, which is k3 without clip, and TRL's
    ``use_bias_correction_kl``. The clip: Liu et al. 2025 (arXiv:2510.01555) as a survey of off-policy corrections
    quotes it, "min(rho k', clip(rho) k')" for the KL as loss. The quotation does not say what carries gradient; here k'
    is the estimate. Read with k' as a detached coefficient and as PPO's pessimism, it would be a maximum.

    Example:
        >>> x, r = torch.tensor([1.0]), torch.tensor([3.0]).log()
        >>> ratio_weighted_kl(x, r, "k2"), ratio_weighted_kl(x, r, "k2", ratio_clip=0.2)
        (tensor([1.5000]), tensor([0.6000]))
    """
    if policy_log_ratios.dim() != log_ratios.dim():  # (B,) beside (B, T) would be read as (1, T)
        expected = f"{log_ratios.dim()} dimensions, as log_ratios has"
        raise ValueError(f"policy_log_ratios must have {expected}, but got {tuple(policy_log_ratios.shape)}.")
    estimate = kl_estimate(log_ratios, estimator, max_value=max_value)
    if estimator in K2_GRADIENT:
        policy_log_ratios = policy_log_ratios.detach()
    ratio = ratio_of(policy_log_ratios)
    if ratio_clip is not None:
        ratio = torch.where(estimate >= 0, ratio.clamp(max=1 + ratio_clip), ratio.clamp(min=1 - ratio_clip))
    return estimate * ratio


def adaptive_kl_coef(coef: float, kl: float, *, target: float, samples: int, horizon: float) -> float:
    """Next coefficient of the KL term, moved towards the one that holds the KL at its target.

        beta (1 + clip(KL / target - 1, -0.2, 0.2) n / H)

    where n responses were seen since the last update and H is the horizon.

    Args:
        coef: beta so far.
        kl: observed KL(pi || ref), averaged over all ranks, in the unit of ``target``.
        target: wanted KL, positive.
        samples: n, responses since the last update.
        horizon: H, responses over which beta may change by 20 %.

    Raises:
        ValueError: ``kl`` is not finite, or ``samples`` at least 5 horizons (beta would not stay positive).

    Reference: Ziegler et al. 2019 (arXiv:1909.08593), Section 2.2.

    Example:
        >>> round(adaptive_kl_coef(0.1, 12.0, target=6.0, samples=50, horizon=100), 6)
        0.11
    """
    if not math.isfinite(kl):
        raise ValueError(f"kl must be finite, but got {kl}.")
    if MAX_KL_ERROR * samples >= horizon:
        raise ValueError(f"samples must be below 5 * horizon = {horizon / MAX_KL_ERROR:g}, but got {samples}.")
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1 + error * samples / horizon)
