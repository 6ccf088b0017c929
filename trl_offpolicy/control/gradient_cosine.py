"""Cosines between gradients, which show stale data in a way that KL, chi-square and ESS do not, and a bound on them.

Under asynchronous training consecutive policy gradients stay aligned; on-policy they are nearly orthogonal (Xu et al.
2026, "GAC: Stabilizing Asynchronous RL Training for LLMs via Gradient Alignment Control", arXiv 2603.01501).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional.collective import sum_ranks


class ConsecutiveCosine:
    """The cosine between the gradients of an optimizer step and the step before it. Keeps a copy of one gradient.

    With ``limit`` c a gradient that is more aligned than that loses the excess of its component along the one before:

        g' = g_orth + min(|g_par|, |g_orth| c / sqrt(1 - c^2)) u    where cos(g, g_prev) > c

    with u the direction of g_prev as it was before its own projection. Then cos(g', g_prev) = c, and g_orth is
    untouched; c = 0 makes g orthogonal to g_prev. GAC projects, too. Its thresholds and its rule for skipped updates
    are not known to us, so this bound is the kit's form of it.

    Args:
        limit: c in [0, 1); None = nothing is changed.

    Gradients may be whole on every rank (one process, DDP), DTensors (FSDP2, tensor parallel) or plain parts of whole
    ones (FSDP1). Where a rank holds a part, all ranks must call :meth:`update`. A parameter without a gradient counts
    as one of gradient 0, and is left without. A gradient that is not finite (a step that a gradient scaler skips) is
    neither compared nor kept. The value stays on the device until :meth:`value` is called.

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
        self._last: dict[int, Tensor] | None = None  # by the place of the parameter
        self._square: Tensor | None = None  # 0-d: its squared norm
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._projected: Tensor | None = None

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor], *, in_parts: bool = False) -> None:
        """Add the gradients of an optimizer step, before the step. Scaling and clipping by norm change nothing.

        Args:
            parameters: the same ones in the same order at every call.
            in_parts: each rank holds plain parts of the gradients (FSDP1), whose sums are added up over the ranks.

        Raises:
            NotImplementedError: no parameter has a gradient, as under DeepSpeed, which steps inside its backward.
        """
        parameters = list(parameters)
        gradients = {place: one.grad for place, one in enumerate(parameters) if one.grad is not None}
        if not gradients and not in_parts:  # with parts, a rank may hold frozen weights alone
            raise NotImplementedError(
                "gradient_cosine must be off where no parameter holds its gradient before the optimizer's step "
                "(DeepSpeed steps inside its backward)."
            )
        last = self._last or {}
        before = {place: kept for place, kept in last.items() if place in gradients}
        dot = _total([_product(kept, gradients[place]) for place, kept in before.items()])
        sums = torch.stack([one.to(parameters[0].device) for one in (dot, _square(before), _square(gradients))])
        dot, square_before, square = sum_ranks(sums) if in_parts else sums
        excess = None
        if self._square is not None:
            valid = square.isfinite() & self._square.isfinite()
            value = _cosine(dot, self._square, square)
            self._note(value, valid)
            excess = None if self._limit is None else self._excess(value, valid, dot, square_before, square)
        self._keep(gradients, excess)
        self._square = square

    def _note(self, value: Tensor, valid: Tensor) -> None:
        """Add a step's cosine to those since the last :meth:`value`, if both gradients are finite."""
        value, count = torch.where(valid, value, 0.0), valid.double()
        self._sum = value if self._sum is None else self._sum + value
        self._count = count if self._count is None else self._count + count

    def _keep(self, gradients: Mapping[int, Tensor], excess: Tensor | None) -> None:
        """Keep the gradients in the place of those before; take ``excess`` times the ones before from them."""
        last, self._last = self._last or {}, {}
        for place, gradient in gradients.items():
            kept = last.get(place)
            if kept is None or kept.shape != gradient.shape:
                self._last[place] = gradient.detach().clone()
                continue
            taken = None
            if excess is not None:
                times = excess.to(kept.device, kept.dtype)
                # what is kept may not be finite, and 0 times infinity is no number
                taken = torch.where(times != 0, _local(kept) * times, 0.0)
            kept.copy_(gradient)  # into the same memory, and before the projection: one copy of a gradient at any time
            self._last[place] = kept
            if taken is not None:
                _local(gradient).sub_(taken)

    def _excess(self, value: Tensor, valid: Tensor, dot: Tensor, square_last: Tensor, square: Tensor) -> Tensor:
        """0-d: how many times the gradient before is taken from this one. Nothing waits for the device.

        Args:
            value: the cosine.
            valid: whether both gradients are finite.
            dot: their inner product.
            square_last: squared norm of the one before, on the parameters that have a gradient now.
            square: squared norm of this one.
        """
        assert self._limit is not None
        is_aligned = valid & (value > self._limit)
        count = is_aligned.double()
        self._projected = count if self._projected is None else self._projected + count
        square_last = square_last.clamp(min=torch.finfo(torch.float64).tiny)
        across = (square - dot.square() / square_last).clamp(min=0.0).sqrt()
        allowed = across * (self._limit / math.sqrt(1.0 - self._limit**2)) / square_last.sqrt()
        return torch.where(is_aligned, dot / square_last - allowed, 0.0)

    def projected(self) -> float | None:
        """Share of the steps since the last :meth:`value` that were projected. Call it first; None without a limit."""
        if self._projected is None or self._count is None:
            return None
        count, share = float(self._count), float(self._projected)
        self._projected = None
        return share / count if count else None

    def value(self) -> float | None:
        """The mean cosine since the last call; None if there were no two steps to compare."""
        if self._sum is None or self._count is None:
            return None
        total, count = float(self._sum), float(self._count)
        self._sum = self._count = None
        return total / count if count else None


def cosine(first: Iterable[Tensor], second: Iterable[Tensor]) -> Tensor:
    """0-d cosine of two gradients given tensor by tensor; 0 if one is zero. With DTensors all ranks call it."""
    one, other = dict(enumerate(first)), dict(enumerate(second))
    dot = _total([_product(a, b) for a, b in zip(one.values(), other.values(), strict=True)])
    return _cosine(dot, _square(one), _square(other))


def _product(first: Tensor, second: Tensor) -> Tensor:
    return (first.detach().float() * second.detach().float()).sum()


def _square(gradient: Mapping[int, Tensor]) -> Tensor:
    """0-d float64: the squared norm."""
    return _total([one.detach().float().square().sum() for one in gradient.values()])


def _cosine(dot: Tensor, square_first: Tensor, square_second: Tensor) -> Tensor:
    norm = square_first.sqrt() * square_second.sqrt()
    return torch.where(norm > 0, dot / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0.0)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of 0-d tensors, in float64: products of two sums fit its range. Sharded ones are added up over ranks."""
    sharded = [part for part in parts if hasattr(part, "full_tensor")]
    whole = [part.double() for part in parts if not hasattr(part, "full_tensor")]
    total = sum(whole, torch.zeros((), dtype=torch.float64))
    if sharded:  # a sum of DTensors holds each rank's part until full_tensor adds them up
        over_ranks: Tensor = sum(sharded[1:], sharded[0]).full_tensor().double()
        return total.to(over_ranks.device) + over_ranks
    return total
