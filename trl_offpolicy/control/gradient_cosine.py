"""Cosines between gradients, which show stale data in a way that KL, chi-square and ESS do not.

Under asynchronous training consecutive policy gradients stay aligned; on-policy they are nearly orthogonal (Xu et al.
2026, "GAC: Stabilizing Asynchronous RL Training for LLMs via Gradient Alignment Control", arXiv 2603.01501).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ConsecutiveCosine:
    """The cosine between the gradients of an optimizer step and the step before it. Keeps a copy of one gradient.

    Gradients may be whole on every rank (one process, DDP) or DTensors (FSDP2, tensor parallel). With DTensors all
    ranks must call :meth:`update`. The value stays on the device until :meth:`value` is called.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> cosine = ConsecutiveCosine()
        >>> for gradient in ([1.0, 0.0], [1.0, 1.0]):
        ...     weight.grad = torch.tensor(gradient)
        ...     cosine.update([weight])
        >>> round(cosine.value(), 4)
        0.7071
    """

    def __init__(self) -> None:
        self._last: list[Tensor] | None = None
        self._sum: Tensor | None = None
        self._count = 0

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor]) -> None:
        """Add the gradients of an optimizer step, before the step. Scaling and clipping by norm change nothing.

        Raises:
            NotImplementedError: no parameter has a gradient, as under DeepSpeed, which steps inside its backward.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            raise NotImplementedError(
                "gradient_cosine must be off where no parameter holds its gradient before the optimizer's step "
                "(DeepSpeed steps inside its backward)."
            )
        if self._last is not None and len(self._last) == len(gradients):
            value = cosine(self._last, gradients)
            self._sum = value if self._sum is None else self._sum + value
            self._count += 1
            for kept, gradient in zip(self._last, gradients, strict=True):
                kept.copy_(gradient)  # into the same memory: one copy of a gradient at any time
        else:
            self._last = [gradient.detach().clone() for gradient in gradients]

    def value(self) -> float | None:
        """The mean cosine since the last call; None if there were no two steps to compare."""
        if self._sum is None:
            return None
        mean = float(self._sum) / self._count
        self._sum, self._count = None, 0
        return mean


def cosine(first: Iterable[Tensor], second: Iterable[Tensor]) -> Tensor:
    """0-d cosine of two gradients given tensor by tensor; 0 if one is zero. With DTensors all ranks call it."""
    dots, squares_first, squares_second = [], [], []
    for a, b in zip(first, second, strict=True):
        a, b = a.detach().float(), b.detach().float()
        dots.append((a * b).sum())
        squares_first.append(a.square().sum())
        squares_second.append(b.square().sum())
    dot, norm = _total(dots), (_total(squares_first) * _total(squares_second)).sqrt()
    return torch.where(norm > 0, dot / norm.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of 0-d tensors. Sharded ones are added up over the ranks once, at the end."""
    sharded = [part for part in parts if hasattr(part, "full_tensor")]
    total = sum((part for part in parts if not hasattr(part, "full_tensor")), torch.zeros(()))
    if sharded:  # a sum of DTensors holds each rank's part until full_tensor adds them up
        over_ranks: Tensor = sum(sharded[1:], sharded[0]).full_tensor()
        return total.to(over_ranks.device) + over_ranks
    return total
