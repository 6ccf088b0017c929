"""Do gradients of stale data point the same way? Cosines that KL, chi-square and ESS do not see.

Under asynchronous training consecutive policy gradients stay aligned, where on-policy ones are nearly orthogonal (Xu et
al. 2026, "GAC: Stabilizing Asynchronous RL Training for LLMs via Gradient Alignment Control", arXiv 2603.01501).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Rows = TypeVar("Rows")


class ConsecutiveCosine:
    """The cosine between the gradients of one optimizer step and the one before; keeps a copy of the last gradient.

    Gradients may be whole on every rank (one process, DDP) or DTensors (FSDP2, tensor parallel); :meth:`update` is then
    collective. The value waits on the device until it is asked for.

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
        """With the gradients of an optimizer step, before it is taken. Scaling and clipping by norm change nothing.

        Raises:
            NotImplementedError: no parameter has a gradient, as under DeepSpeed, whose engine has already stepped.
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
        """The mean since the last call; None without two steps to compare."""
        if self._sum is None:
            return None
        mean = float(self._sum) / self._count
        self._sum, self._count = None, 0
        return mean


def cosine(first: Iterable[Tensor], second: Iterable[Tensor]) -> Tensor:
    """0-d cosine of two gradients given tensor by tensor; 0 where one of them is zero. Collective for DTensors."""
    dots, squares_first, squares_second = [], [], []
    for a, b in zip(first, second, strict=True):
        a, b = a.detach().float(), b.detach().float()
        dots.append((a * b).sum())
        squares_first.append(a.square().sum())
        squares_second.append(b.square().sum())
    dot, norm = _total(dots), (_total(squares_first) * _total(squares_second)).sqrt()
    return torch.where(norm > 0, dot / norm.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def _total(parts: list[Tensor]) -> Tensor:
    """The sum; that of sharded parts is added up over the ranks once, at the end."""
    sharded = [part for part in parts if hasattr(part, "full_tensor")]
    total = sum((part for part in parts if not hasattr(part, "full_tensor")), torch.zeros(()))
    if sharded:  # a sum of DTensors holds each rank's part until full_tensor adds them up
        over_ranks: Tensor = sum(sharded[1:], sharded[0]).full_tensor()
        return total.to(over_ranks.device) + over_ranks
    return total


def cosines_by_version(
    loss: Callable[[Rows], Tensor], parts: Mapping[int, Rows], parameters: Iterable[Tensor]
) -> dict[tuple[int, int], float]:
    """The cosine between the gradients of every two policy versions that a batch holds. One backward a version.

    On demand only: it costs as many forwards and backwards as there are versions, and memory for as many gradients.
    Nothing is left in ``.grad``.

    Args:
        loss: of the rows of one version, with gradient; e.g. ``lambda batch: objective(batch).loss``.
        parts: the rows by the version that sampled them, as ``rows_by_version`` finds them.
        parameters: those that learn.

    Returns:
        ``{(older, newer): cosine}``; near 0 for on-policy data, persistently high where stale gradients align.

    Raises:
        ValueError: fewer than two versions.

    Reference: Xu et al. 2026 (GAC), who compare consecutive gradients; by version it is this kit's.
    """
    if len(parts) < 2:
        raise ValueError(f"parts must hold rows of at least two policy versions, but got {sorted(parts)}.")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = {version: _gradient(loss(rows), trained) for version, rows in sorted(parts.items())}
    versions = list(gradients)
    return {
        (older, newer): float(cosine(gradients[older], gradients[newer]))
        for place, older in enumerate(versions)
        for newer in versions[place + 1 :]
    }


def _gradient(loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, found, strict=True)]


def rows_by_version(policy_versions: Tensor) -> dict[int, Tensor]:
    """``{version: row indices}`` of a (B,) tensor of versions, or of (B, T) by the newest version in a row.

    Example:
        >>> rows_by_version(torch.tensor([3, 2, 3]))
        {2: tensor([1]), 3: tensor([0, 2])}
    """
    versions = policy_versions if policy_versions.dim() == 1 else policy_versions.amax(-1)
    return {int(version): (versions == version).nonzero().squeeze(1) for version in sorted(set(versions.tolist()))}
