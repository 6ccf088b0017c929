"""What TRL's fused LM head can say beside log-probs, asked for only where it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head


class SumSqProbs:
    """Collects sum_v pi_v^2 of the forwards inside :func:`sum_sq_probs`."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, log_values: Tensor) -> None:
        """One forward's (b, L - 1) logs."""
        self._parts.append(log_values)

    def completions(self, length: int) -> Tensor | None:
        """(B, length) float32 of the last positions, rows in the order of the forwards; None if none was asked for."""
        return torch.cat([part[:, -length:] for part in self._parts]).float().exp() if self._parts else None


@contextmanager
def sum_sq_probs(model: Any, *, wanted: bool, temperature: float, cast_lm_head_to_fp32: bool) -> Iterator[SumSqProbs]:
    """While open, the fused head of ``model`` also computes the sum over the vocabulary of its probabilities squared.

    TRL's scoring drops all but log-probs and entropies, so the output is read off the model's own ``forward`` (a module
    hook would not fire under PEFT, which calls ``forward`` itself). Outside nothing costs more than before.

    Args:
        model: the unwrapped model; TRL has patched its ``forward``, or that of the base model under PEFT.
        wanted: False changes nothing.
        temperature: as TRL's head has it.
        cast_lm_head_to_fp32: likewise.
    """
    collected = SumSqProbs()
    if not wanted:
        yield collected
        return
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    patched = model.forward
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, ("log_probs", "entropy", "log_sum_sq_probs"))
    with_sums = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = with_sums(*args, **kwargs)
        if kwargs.get("fused_lm_head"):
            collected.add(output.log_sum_sq_probs.detach())
        return output

    model.forward = forward
    try:
        yield collected
    finally:
        model.forward = patched


def is_aligned(args: Any) -> bool:
    """One optimizer step serves whole generation batches: the old policy is the current one, detached."""
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0)


@contextmanager
def as_if_aligned(args: Any) -> Iterator[None]:
    """While open, TRL's generation leaves out its own pass for the old log-probs.

    It makes that pass unless :func:`is_aligned`, and reads ``gradient_accumulation_steps`` for nothing else there.
    """
    accumulation = args.gradient_accumulation_steps
    args.gradient_accumulation_steps = args.steps_per_generation * args.num_iterations
    try:
        yield
    finally:
        args.gradient_accumulation_steps = accumulation
