"""Cosines between gradients, which show stale data in a way that KL, chi-square and ESS do not, and a bound on them.

Under asynchronous training consecutive policy gradients stay aligned; on-policy they are nearly orthogonal (Xu et al.
2026, "GAC: Stabilizing Asynchronous RL Training for LLMs via Gradient Alignment Control", arXiv 2603.01501).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class ConsecutiveCosine:
    """The cosine between the gradients of an optimizer step and the step before it. Keeps a copy of one gradient.

    With ``limit`` c a gradient that is more aligned than that loses the excess of its component along the one before:

        g' = g_orth + min(|g_par|, |g_orth| c / sqrt(1 - c^2)) u    where cos(g, g_prev) > c

    with u the direction of g_prev as it was before its own projection. Then cos(g', g_prev) = c, and g_orth is
    untouched; c = 0 makes g orthogonal to g_prev. GAC projects, too. Its thresholds and its rule for skipped updates
    are not known to us, so this bound is the kit's form of it.

    Args:
        limit: c in [0, 1); None = nothing is changed.

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

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit
        self._last: list[Tensor] | None = None
        self._sum: Tensor | None = None
        self._projected: Tensor | None = None
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
        if self._last is None or len(self._last) != len(gradients):
            self._last = [gradient.detach().clone() for gradient in gradients]
            return
        sums = _products(self._last, gradients)
        value = _cosine(*sums)
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1
        excess = None if self._limit is None else self._excess(value, *sums)
        for kept, gradient in zip(self._last, gradients, strict=True):
            taken = None if excess is None else _local(kept) * excess.to(kept.device, kept.dtype)
            kept.copy_(gradient)  # into the same memory, and before the projection: one copy of a gradient at any time
            if taken is not None:
                _local(gradient).sub_(taken)

    def _excess(self, value: Tensor, dot: Tensor, square_last: Tensor, square: Tensor) -> Tensor:
        """0-d: how many times the gradient before is taken from this one. Nothing waits for the device."""
        assert self._limit is not None
        is_aligned = value > self._limit
        count = is_aligned.double()
        self._projected = count if self._projected is None else self._projected + count
        square_last = square_last.clamp(min=torch.finfo(torch.float32).tiny)
        across = (square - dot.square() / square_last).clamp(min=0.0).sqrt()
        allowed = across * (self._limit / math.sqrt(1.0 - self._limit**2)) / square_last.sqrt()
        return torch.where(is_aligned, dot / square_last - allowed, 0.0)

    def projected(self) -> float | None:
        """Share of the steps since the last :meth:`value` that were projected. Call it first; None without a limit."""
        if self._projected is None or self._count == 0:
            return None
        share = float(self._projected) / self._count
        self._projected = None
        return share

    def value(self) -> float | None:
        """The mean cosine since the last call; None if there were no two steps to compare."""
        if self._sum is None:
            return None
        mean = float(self._sum) / self._count
        self._sum, self._count = None, 0
        return mean


def cosine(first: Iterable[Tensor], second: Iterable[Tensor]) -> Tensor:
    """0-d cosine of two gradients given tensor by tensor; 0 if one is zero. With DTensors all ranks call it."""
    return _cosine(*_products(first, second))


def _products(first: Iterable[Tensor], second: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """0-d: the inner product of two gradients, and the squared norms of both."""
    dots, squares_first, squares_second = [], [], []
    for a, b in zip(first, second, strict=True):
        a, b = a.detach().float(), b.detach().float()
        dots.append((a * b).sum())
        squares_first.append(a.square().sum())
        squares_second.append(b.square().sum())
    return _total(dots), _total(squares_first), _total(squares_second)


def _cosine(dot: Tensor, square_first: Tensor, square_second: Tensor) -> Tensor:
    norm = (square_first * square_second).sqrt()
    return torch.where(norm > 0, dot / norm.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of 0-d tensors. Sharded ones are added up over the ranks once, at the end."""
    sharded = [part for part in parts if hasattr(part, "full_tensor")]
    total = sum((part for part in parts if not hasattr(part, "full_tensor")), torch.zeros(()))
    if sharded:  # a sum of DTensors holds each rank's part until full_tensor adds them up
        over_ranks: Tensor = sum(sharded[1:], sharded[0]).full_tensor()
        return total.to(over_ranks.device) + over_ranks
    return total
