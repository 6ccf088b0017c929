"""Per-token policy losses. Gradient flows through ``log_ratios`` and ``logps`` only, as each docstring says.

Shapes: tokens (B, T), sequence-level ratios (B, 1); advantages (B, 1) or (B, T). Log-ratios are log(pi / pi_old).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP


class LossTerms(NamedTuple):
    """A loss per token, where its clip was active (bool, None = it does not clip on that side), and its soft gate."""

    loss: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    gate: Tensor | None = None


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> LossTerms:
    """PPO's clipped surrogate: -min(r A, clip(r, 1-low, 1+high) A).

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient.
        low: epsilon_low; the clip is at 1 - low.
        high: epsilon_high; the clip is at 1 + high.
        dual_clip: for A < 0 bound the loss by -dual_clip A (Ye et al. 2020, Eq. 5); > 1.
        delta: INTELLECT-2's two-sided clip: r is capped at delta before it meets A (> 1 + high to matter).

    Reference: Schulman et al. 2017, Eq. 7.

    Example:
        >>> ppo_clip(torch.tensor([[1.5]]).log(), torch.ones(1, 1), low=0.2, high=0.2).loss
        tensor([[-1.2000]])
    """
    ratio = log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    surrogate = torch.minimum(capped * advantages, clipped * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    clipped_low = (ratio < 1 - low) & (advantages < 0)
    clipped_high = (ratio > 1 + high) & (advantages > 0)
    return LossTerms(-surrogate, clipped_low, clipped_high)


def cispo(log_ratios: Tensor, logps: Tensor, advantages: Tensor, *, high: float) -> LossTerms:
    """CISPO: -min(r, high) A log pi, the capped ratio detached; every token keeps its gradient.

    Args:
        log_ratios: log(pi / pi_old); its gradient is stopped.
        logps: log pi, carries gradient.
        advantages: no gradient.
        high: the cap itself (not 1 + epsilon), as TRL reads ``epsilon_high``.

    Reference: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), without its lower bound.
    """
    ratio = log_ratios.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return LossTerms(-ratio.clamp(max=high) * advantages * logps, None, (ratio > high) & (advantages > 0))


def sapo(log_ratios: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> LossTerms:
    """SAPO: a soft gate, -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    Args:
        log_ratios: log(pi / pi_old), carries gradient.
        advantages: no gradient.
        temperature_pos: tau where A > 0.
        temperature_neg: tau elsewhere.

    Reference: "Soft adaptive policy optimization", arXiv:2511.20347.
    """
    ratio = log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    temperature = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return LossTerms(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages)


VESPO_LOG_FLOOR = math.log(1e-8)


def vespo_phi(
    sequence_log_ratio: Tensor, advantages: Tensor, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float
) -> Tensor:
    """VESPO's Gamma weight phi(w) = exp(lambda) w^k exp(-lambda w), normalised so that phi(1) = 1. No gradient.

    Args:
        sequence_log_ratio: (B, 1) sum over tokens of log(pi / mu), nats.
        advantages: (B, 1) or (B, T); picks (k, lambda) by sign.
        k_pos: shape where A >= 0; ``lambda_pos`` its rate.
        lambda_pos: see ``k_pos``.
        k_neg: shape where A < 0; ``lambda_neg`` its rate.
        lambda_neg: see ``k_neg``.

    Reference: "VESPO: variational sequence-level soft policy optimization", arXiv:2602.10693, section 3.4.
    """
    log_w = sequence_log_ratio.detach().clamp(VESPO_LOG_FLOOR, LOG_RATIO_CLAMP)
    shape = torch.where(advantages >= 0, k_pos, k_neg)
    rate = torch.where(advantages >= 0, lambda_pos, lambda_neg).clamp(min=1e-4)
    return (rate + shape * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
