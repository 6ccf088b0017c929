"""Optimizer, schedule and what belongs to an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def optimizer_and_schedule(parameters: list[nn.Parameter], settings: Mapping[str, Any], *, total_steps: int) -> Any:
    """What ``configure_optimizers`` returns.

    Args:
        parameters: those that learn.
        settings: ``optimizer``, ``learning_rate``, ``weight_decay``, ``lr_scheduler``, ``warmup_steps``.
        total_steps: optimizer steps of the run.
    """
    from transformers import get_scheduler

    make = settings["optimizer"]
    if make is None:
        optimizer: Any = torch.optim.AdamW(
            parameters, lr=settings["learning_rate"], weight_decay=settings["weight_decay"]
        )
    else:
        optimizer = make(parameters)
    schedule = get_scheduler(
        settings["lr_scheduler"], optimizer, num_warmup_steps=settings["warmup_steps"], num_training_steps=total_steps
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def window_size(trainer: Any, batch_idx: int) -> int:
    """Micro-batches of the optimizer step that ``batch_idx`` belongs to; the last one of an epoch may have fewer."""
    size: int = trainer.accumulate_grad_batches
    batches = trainer.num_training_batches
    left = size if math.isinf(batches) else batches - batch_idx // size * size
    return max(min(size, int(left)), 1)


def gradient_norm(policy: nn.Module) -> float:
    """Norm of all gradients before clipping, over all shards."""
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    if not gradients:
        return math.nan  # ZeRO-3 keeps them to itself
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
