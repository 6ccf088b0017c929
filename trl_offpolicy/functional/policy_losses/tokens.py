"""Policy losses that treat each token alone. Gradient flows through ``log_ratios`` and ``logps`` only, as each says.

Shapes: tokens (B, T), sequence-level ratios (B, 1); advantages (B, 1) or (B, T). In the formulas r = pi / pi_old is the
ratio of a token, ``log_ratios`` its log, and A its advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_broadcast
from trl_offpolicy.functional.log_ratios import ratio_of
from trl_offpolicy.functional.policy_losses.common import LossTerms, unit_ratio


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    low: float | Tensor,
    high: float | Tensor,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> LossTerms:
    """PPO's clipped surrogate.

        -min(r A, clip(r, 1 - low, 1 + high) A)

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient.
        low: epsilon_low; the clip is at 1 - low. A tensor where it differs from token to token.
        high: epsilon_high; the clip is at 1 + high, likewise.
        dual_clip: for A < 0 bound the loss by -dual_clip A (Ye et al. 2020, Eq. 5); > 1.
        delta: INTELLECT-2's two-sided clip: r is capped at delta before it meets A (> 1 + high to matter).

    Reference: Schulman et al. 2017, Eq. 7.

    Example:
        >>> ppo_clip(torch.tensor([[1.5]]).log(), torch.ones(1, 1), low=0.2, high=0.2).loss
        tensor([[-1.2000]])
    """
    check_broadcast(log_ratios=log_ratios, advantages=advantages)
    ratio = ratio_of(log_ratios)
    clipped = ratio.clamp(1 - low, 1 + high)  # type: ignore[arg-type]
    capped = ratio if delta is None else ratio.clamp(max=delta)
    surrogate = torch.minimum(capped * advantages, clipped * advantages)
    if dual_clip is not None:
        bound = dual_clip * advantages  # on the bound itself the token keeps its gradient, as on the other bounds
        surrogate = torch.where((advantages < 0) & (surrogate < bound), bound, surrogate)
    clipped_low = (ratio < 1 - low) & (advantages < 0)
    clipped_high = (ratio > 1 + high) & (advantages > 0)
    return LossTerms(-surrogate, clipped_low, clipped_high)


def qurl(
    log_ratios: Tensor,
    mismatch_log_ratios: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    max_weight: float,
) -> LossTerms:
    """QuRL's adaptive clip: PPO's upper clip opens where the importance weight of the token is cut.

        -min(r A, clip(r, 1 - low, (1 + high) / c) A),  c = min(rho, C) / rho = min(1, C / rho)

    where rho = pi_old / mu is the mismatch of the token and C the cap of its weight. A cut weight is rho c instead of
    rho. Weight times ratio can then reach rho (1 + high), as without the cut, only if r may grow to (1 + high) / c.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient.
        mismatch_log_ratios: (B, T) log(pi_old / mu), no gradient.
        advantages: (B, 1) or (B, T), no gradient.
        low: epsilon_low.
        high: epsilon_high.
        max_weight: C, that of the truncated weight beside this loss.

    Reference: Li et al. 2026, QuRL (arXiv:2602.13953), adaptive clipping range.

    Example:
        >>> log_ratios, mismatch = torch.tensor([[2.0]]).log(), torch.tensor([[6.0]]).log()
        >>> qurl(log_ratios, mismatch, torch.ones(1, 1), low=0.2, high=0.2, max_weight=3.0).loss
        tensor([[-2.]])
        >>> qurl(log_ratios, torch.zeros(1, 1), torch.ones(1, 1), low=0.2, high=0.2, max_weight=3.0).loss
        tensor([[-1.2000]])
    """
    check_broadcast(log_ratios=log_ratios, mismatch_log_ratios=mismatch_log_ratios, advantages=advantages)
    opening = (ratio_of(mismatch_log_ratios.detach()) / max_weight).clamp(min=1.0)
    upper = (1 + high) * opening - 1
    return ppo_clip(log_ratios, advantages, low=torch.full_like(upper, low), high=upper)


def cispo(log_ratios: Tensor, logps: Tensor, advantages: Tensor, *, high: float, low: float | None = None) -> LossTerms:
    """CISPO: the policy gradient with a clipped weight; every token keeps its gradient.

        -sg[clip(r, low, high)] A log pi

    where sg stops the gradient.

    Args:
        log_ratios: log(pi / pi_old); its gradient is stopped.
        logps: log pi, carries gradient.
        advantages: no gradient.
        high: the cap itself (not 1 + epsilon), as TRL reads ``epsilon_high``.
        low: the floor itself; None = none (TRL, and the paper's own runs).

    Reference: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585). Biased: the weight is capped; no trust region.
    """
    check_broadcast(log_ratios=log_ratios, logps=logps, advantages=advantages)
    ratio = ratio_of(log_ratios.detach())
    weight = ratio.clamp(min=low, max=high)
    clipped_low = None if low is None else (ratio < low) & (advantages < 0)
    return LossTerms(-weight * advantages * logps, clipped_low, (ratio > high) & (advantages > 0))


def sapo(log_ratios: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> LossTerms:
    """SAPO: a soft gate in the place of PPO's clip.

        -(4 / tau) sigmoid(tau (r - 1)) A

    where the temperature tau depends on the sign of A.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient.
        temperature_pos: tau where A > 0.
        temperature_neg: tau elsewhere.

    Reference: "Soft adaptive policy optimization", arXiv:2511.20347.
    """
    check_broadcast(log_ratios=log_ratios, advantages=advantages)
    ratio = ratio_of(log_ratios)
    temperature = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return LossTerms(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages)


def aspo(
    log_ratios: Tensor,
    logps: Tensor,
    advantages: Tensor,
    *,
    low: float,
    max_weight: float | None,
    high: float | None = None,
) -> LossTerms:
    """ASPO: the ratio is flipped where the advantage is positive, and PPO's lower clip stays where it is negative.

        -min(1 / min(r, 1 + high), C) A where A > 0, else -max(min(r, C), 1 - low) A

    What carries gradient: log pi, with weight min(1/r, C) where A > 0, min(r, C) where A < 0, and 0 beyond a clip: A <
    0 and r < 1 - low, or A > 0 and r > 1 + high. The cap is soft: it bounds the weight and keeps the gradient.
    Heuristic: weights are not those of importance sampling where A > 0.

    Args:
        log_ratios: log(pi / pi_old); its gradient is stopped.
        logps: log pi, carries gradient.
        advantages: no gradient.
        low: the lower clip of negative advantages is at 1 - low.
        max_weight: the soft cap C; None = none.
        high: the upper clip of positive advantages is at 1 + high; None = none.

    Reference: Wang et al. 2025, ASPO (arXiv:2510.06062). The paper keeps PPO's hard upper clip where A > 0, as
    ``high`` does. The default leaves it out and clips hard on the negative side only.
    """
    check_broadcast(log_ratios=log_ratios, logps=logps, advantages=advantages)
    ratio = ratio_of(log_ratios.detach())
    weight = torch.where(advantages > 0, 1 / ratio, ratio)
    weight = weight if max_weight is None else weight.clamp(max=max_weight)
    clipped_low = (ratio < 1 - low) & (advantages < 0)
    loss = torch.where(clipped_low, -(1 - low) * advantages, -weight * unit_ratio(logps) * advantages)
    if high is None:
        return LossTerms(loss, clipped_low)
    clipped_high = (ratio > 1 + high) & (advantages > 0)
    return LossTerms(torch.where(clipped_high, -advantages / (1 + high), loss), clipped_low, clipped_high)


def dispo(
    log_ratios: Tensor,
    logps: Tensor,
    advantages: Tensor,
    correct: Tensor,
    *,
    low_correct: float,
    high_correct: float,
    low_incorrect: float,
    high_incorrect: float,
) -> LossTerms:
    """DISPO: the policy gradient with a clipped weight whose bounds depend on correctness.

        -sg[clip(r, 1 - low, 1 + high)] A log pi

    where sg stops the gradient, and low and high are those of correct or of incorrect responses. What carries gradient:
    log pi alone, on every token. Biased: the weight is clipped.

    Args:
        log_ratios: log(pi / pi_old); its gradient is stopped.
        logps: log pi, carries gradient.
        advantages: no gradient.
        correct: (B, 1) bool, the response is correct.
        low_correct: bound below 1 of correct responses (a smaller one distils less).
        high_correct: bound above 1 of correct responses (for exploration).
        low_incorrect: bound below 1 of incorrect responses.
        high_incorrect: bound above 1 of incorrect responses.

    Reference: Karaman et al. 2026, DISPO (arXiv:2602.00983). The regimes are correctness x side of 1; with outcome
    rewards and a group baseline the sign of A is correctness, so the sign adds no regime.
    """
    check_broadcast(log_ratios=log_ratios, logps=logps, advantages=advantages, correct=correct)
    ratio = ratio_of(log_ratios.detach())
    of_correct = ratio.clamp(1 - low_correct, 1 + high_correct)
    weight = torch.where(correct, of_correct, ratio.clamp(1 - low_incorrect, 1 + high_incorrect))
    return LossTerms(-weight * advantages * logps, ratio < weight, ratio > weight)


def dro(log_ratios: Tensor, logps: Tensor, advantages: Tensor, *, beta: float) -> LossTerms:
    """DRO: the policy gradient without a weight, and a quadratic pull to the old policy.

        -A log pi + beta / 2 (log r)^2

    What carries gradient: log pi in both terms: -(A - beta log r) per unit of log pi. No importance weight: off-policy
    the first term is biased, the second draws pi back to pi_old.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        logps: log pi, carries gradient.
        advantages: no gradient.
        beta: strength of the quadratic penalty.

    Reference: Richemond et al. 2024, "Offline regularised RL for LLM alignment" (arXiv:2405.19107), with the group
    baseline in place of the learned value and per token, as verl's ``dro``.
    """
    check_broadcast(log_ratios=log_ratios, logps=logps, advantages=advantages)
    return LossTerms(-advantages * logps + 0.5 * beta * log_ratios.square())
