"""Log-ratios of two policies on the sampled tokens, safe against padding and non-finite values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import as_float, both, row_blocks

LOG_RATIO_CLAMP = 20.0
"""Log-ratios (token or aggregated) are clamped to +-20 nats before ``exp``, as verl and SkyRL do.

Sums and means over tokens are of the log-ratios as they are: +30 and -25 nats in one response make a product of e^5.
"""
LOG_RATIO_LIMIT = 1e4
"""nats: where a token's log-ratio itself ends. vLLM writes -9999 for a log-prob of minus infinity; a lowest float32,
which some masks hold, would leave nothing of a sum."""


class LogRatio(NamedTuple):
    """A log-ratio and where it could be observed.

    ``values`` (B, T) float32 is 0 wherever ``observed`` is False; ``observed`` (B, T) bool is True on trainable
    tokens whose two log-probs are finite.
    """

    values: Tensor
    observed: Tensor


@torch.no_grad()
def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> LogRatio:
    """Log-ratio ``numerator - denominator`` on trainable tokens, held within +-10000 nats.

    Args:
        numerator: (B, T) log-probs in nats, any float dtype; cast to float32 before subtracting.
        denominator: (B, T) log-probs in nats.
        mask: (B, T) bool, True = trainable token.

    Returns:
        :class:`LogRatio`; carries no gradient.

    Example:
        >>> ratio = log_ratio(torch.tensor([[-1.0, float("nan")]]), torch.tensor([[-1.5, -1.0]]),
        ...                   torch.tensor([[True, True]]))
        >>> ratio.values, ratio.observed
        (tensor([[0.5000, 0.0000]]), tensor([[ True, False]]))
    """
    if torch.compiler.is_compiling():
        part = numerator.float() - denominator.float()
        observed = mask & (part.abs() < torch.inf)
        return LogRatio(torch.where(observed, part.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0), observed)
    values = torch.empty_like(mask, dtype=torch.float32)
    observed = torch.empty_like(mask)
    for rows in row_blocks(mask.shape, mask.device):
        part = torch.sub(numerator[rows].float(), denominator[rows].float(), out=values[rows])
        observed[rows] = both(mask[rows], part.abs() < torch.inf)
        torch.nan_to_num_(part, nan=0.0, posinf=0.0, neginf=0.0)  # so that 0 * x below is 0
        part.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul_(as_float(mask[rows]))
    return LogRatio(values, observed)


def finite_or_zero(values: Tensor) -> Tensor:
    """0 for NaN and infinity."""
    if torch.compiler.is_compiling():  # where inductor looks for NaN one by one
        return torch.where(values.abs() < torch.inf, values, 0.0)
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def ratio_of(log_ratios: Tensor) -> Tensor:
    """The ratios: exp of the log-ratios clamped to +-20 nats; carries their gradient where they are inside."""
    return exp_of(log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def exp_of(values: Tensor) -> Tensor:
    """exp, elementwise."""
    if not torch.compiler.is_compiling():
        return values.exp()
    return torch.exp2(values * _LOG2_E)  # on a CPU inductor writes every exp that is read twice to memory, but no exp2


_LOG2_E = 1.4426950408889634


def excess_of(log_ratios: Tensor) -> Tensor:
    """The ratios less 1, of log-ratios clamped to +-20 nats; exact where the policies nearly agree."""
    log_ratios = log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    if not torch.compiler.is_compiling():
        return log_ratios.expm1_()
    series = torch.ones_like(log_ratios)  # inductor's own expm1 is exp - 1 on a CPU
    for k in range(_SERIES_TERMS, 1, -1):
        series = 1 + log_ratios / k * series
    return torch.where(log_ratios.abs() < _SERIES_LIMIT, log_ratios * series, exp_of(log_ratios) - 1)


_SERIES_TERMS, _SERIES_LIMIT = 8, 0.5
"""x + x^2/2! + ... + x^8/8!: below 0.5 nats what is left out is less than half a unit in float32's last place."""
