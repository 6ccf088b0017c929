"""Log-ratios of two policies on the sampled tokens, safe against padding and non-finite values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import as_float, row_blocks
from trl_offpolicy.functional._shapes import check_mask, check_tokens

LOG_RATIO_CLAMP = 20.0
"""Log-ratios (token or aggregated) are clamped to +-20 nats before ``exp``, as verl and SkyRL do.

Sums and means over tokens take unclamped log-ratios: +30 and -25 nats in one response make a product of e^5.
"""
LOG_RATIO_LIMIT = 1e4
"""Limit of a single token's log-ratio, nats. vLLM writes -9999 for a log-prob of minus infinity. The lowest float32,
which some masks hold, would drown every other token in a sum."""


class LogRatio(NamedTuple):
    """A log-ratio and where it could be observed.

    ``values`` (B, T) float32 is 0 wherever ``observed`` is False; ``observed`` (B, T) bool is True on trainable
    tokens whose two log-probs are finite.
    """

    values: Tensor
    observed: Tensor


@torch.no_grad()
def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> LogRatio:
    """Log-ratio of the sampled tokens under two policies, held within +-10000 nats.

        l_t = log p(y_t) - log q(y_t)

    where p is the numerator and q the denominator.

    Args:
        numerator: (B, T) log p in nats, any float dtype; cast to float32 before subtracting.
        denominator: (B, T) log q in nats.
        mask: (B, T) bool, True = trainable token.

    Returns:
        :class:`LogRatio`; carries no gradient.

    Example:
        >>> ratio = log_ratio(torch.tensor([[-1.0, float("nan")]]), torch.tensor([[-1.5, -1.0]]),
        ...                   torch.tensor([[True, True]]))
        >>> ratio.values, ratio.observed
        (tensor([[0.5000, 0.0000]]), tensor([[ True, False]]))
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, numerator=numerator, denominator=denominator)
    if torch.compiler.is_compiling():
        part = numerator.float() - denominator.float()
        observed = mask & (part.abs() < torch.inf)
        return LogRatio(torch.where(observed, part.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0), observed)
    # The same in place and in blocks: no temporary tensor of the size of the batch.
    values = torch.empty_like(mask, dtype=torch.float32)
    observed = torch.empty_like(mask)
    for rows in row_blocks(mask.shape, mask.device):
        here = as_float(mask[rows])
        part = torch.sub(numerator[rows].float(), denominator[rows].float(), out=values[rows])
        finite = part.abs().lt_(torch.inf)  # 1.0 or 0.0: a comparison that writes booleans is several times slower
        torch.nan_to_num_(part, nan=0.0, posinf=0.0, neginf=0.0)  # so that 0 * x below is 0
        part.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul_(here)
        observed.view(torch.uint8)[rows] = finite.mul_(here)
    return LogRatio(values, observed)


def finite_or_zero(values: Tensor) -> Tensor:
    """Replace NaN and infinity by 0."""
    if torch.compiler.is_compiling():  # inductor's own nan_to_num looks for NaN one by one
        return torch.where(values.abs() < torch.inf, values, 0.0)
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def ratio_of(log_ratios: Tensor) -> Tensor:
    """The ratios rho = exp(l) with l clamped to +-20 nats; carries the gradient of l inside that range."""
    return exp_of(log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def excess_of(log_ratios: Tensor) -> Tensor:
    """The ratios minus 1, expm1(l) with l clamped to +-20 nats; exact where the policies nearly agree."""
    held = log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    # In place where that is possible: this runs over every token of every diagnostic.
    return expm1_of(held) if torch.compiler.is_compiling() else held.expm1_()


def probability_difference(
    logps: Tensor, probabilities: Tensor, log_ratios: Tensor, excess: Tensor, *, largest: Tensor | None = None
) -> Tensor:
    """Difference p - q of the sampled tokens, exact where the policies nearly agree and where q excludes the token.

        q (rho - 1), or exp(log q + l) - q where l is above 20 nats

    where l is the unclamped log-ratio and rho is held at e^20, which would leave nothing of p where q is below e^-20.

    Args:
        logps: log q, nats; any shape, float32.
        probabilities: q.
        log_ratios: l, not clamped.
        excess: rho - 1 of the clamped l (:func:`excess_of`).
        largest: the largest l of each row, where they are known: this saves a pass.
    """
    near = probabilities * excess
    # On a CPU it costs less to look than to compute what is hardly ever needed. Elsewhere looking waits for the device.
    by_looking = log_ratios.device.type == "cpu" and not torch.compiler.is_compiling()
    if by_looking and not bool(((log_ratios if largest is None else largest) > LOG_RATIO_CLAMP).any()):
        return near
    far = exp_of((logps + log_ratios).clamp(max=0.0)) - probabilities
    return torch.where(log_ratios > LOG_RATIO_CLAMP, far, near)


def exp_of(values: Tensor) -> Tensor:
    """Elementwise exp(x) that torch.compile makes quick on a CPU as well."""
    if not torch.compiler.is_compiling():
        return values.exp()
    return torch.exp2(values * _LOG2_E)  # on a CPU inductor writes every exp that is read twice to memory, but no exp2


_LOG2_E = 1.4426950408889634


def expm1_of(values: Tensor) -> Tensor:
    """Elementwise exp(x) - 1 without the rounding of that difference, under torch.compile as well."""
    if not torch.compiler.is_compiling():
        return torch.expm1(values)
    # inductor's own expm1 is exp - 1 on a CPU. Near 0 take x (1 + x/2 (1 + x/3 (1 + ...))) instead.
    series = torch.ones_like(values)
    for k in range(_SERIES_TERMS, 1, -1):
        series = 1 + values / k * series
    return torch.where(values.abs() < _SERIES_LIMIT, values * series, exp_of(values) - 1)


_SERIES_TERMS, _SERIES_LIMIT = 8, 0.5
"""Terms of x + x^2/2! + ... + x^8/8!. Below 0.5 nats the rest is less than half a unit in float32's last place."""
