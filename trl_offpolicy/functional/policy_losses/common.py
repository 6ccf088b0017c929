"""What the policy losses share: their result, and ratios that do not overflow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask


class LossTerms(NamedTuple):
    """A loss per token, where its clip was active (bool; None = it does not clip on that side), and its soft gate."""

    loss: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    gate: Tensor | None = None


def unit_ratio(logps: Tensor) -> Tensor:
    """A factor of exactly 1 in value that has the gradient of log pi.

        pi / sg[pi] = exp(x - sg[x])

    where sg stops the gradient.

    Args:
        logps: log pi or a log-ratio; carries gradient.

    Example:
        >>> logps = torch.tensor([-3.0], requires_grad=True)
        >>> unit_ratio(logps)
        tensor([1.], grad_fn=<ExpBackward0>)
    """
    return (logps - logps.detach()).exp()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of (B, T) ``values`` over the True tokens of ``mask``, 0-d; 0 without any."""
    check_mask(mask=mask)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
