"""The optimizer, its schedule, the micro-batches of an optimizer step, and the norm of its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

from trl_offpolicy.functional.collective import sum_ranks

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters that ``transformers.Trainer.get_decay_parameter_names`` leaves out."""


def optimizer_and_schedule(policy: nn.Module, settings: Mapping[str, Any], *, total_steps: float) -> Any:
    """The optimizer and schedule, in the form that ``configure_optimizers`` returns.

    Args:
        policy: the model; what requires a gradient is trained.
        settings: ``optimizer``, ``learning_rate``, ``weight_decay``, ``lr_scheduler``, ``warmup_steps``.
        total_steps: optimizer steps of the run; infinite if it has no end, which some schedules do not allow.

    Raises:
        TypeError: ``optimizer`` made something else than one optimizer.
    """
    from transformers import get_scheduler

    make = settings["optimizer"]
    if make is None:
        groups = decay_groups(policy, settings["weight_decay"])
        optimizer: Any = torch.optim.AdamW(groups, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])
    else:
        optimizer = make(_trained(policy))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer must make one torch.optim.Optimizer for all parameters, but made "
                f"{type(optimizer).__name__}. Parameter groups can have rates of their own."
            )
    schedule = get_scheduler(
        settings["lr_scheduler"],
        optimizer,
        num_warmup_steps=settings["warmup_steps"],
        num_training_steps=None if math.isinf(total_steps) else int(total_steps),
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decay_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters, without decay for norms and biases, as ``transformers.Trainer`` groups them.

    Args:
        policy: the model.
        weight_decay: of the optimizer; with 0 all parameters are one group.
    """
    if not weight_decay:
        return [{"params": _trained(policy)}]
    decaying = set(get_parameter_names(policy, [nn.LayerNorm], _NO_DECAY))
    named = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if name in decaying]},
        {"params": [parameter for name, parameter in named if name not in decaying], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trained(policy: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def window_size(trainer: Any, batch_idx: int) -> int:
    """Micro-batches in the optimizer step of ``batch_idx``. The last optimizer step of an epoch may have fewer."""
    size: int = trainer.accumulate_grad_batches
    batches = trainer.num_training_batches
    left = size if math.isinf(batches) else batches - batch_idx // size * size
    return max(min(size, int(left)), 1)


def gradient_norm(policy: nn.Module, *, flattened: bool = False) -> float:
    """L2 norm of all gradients before clipping, over all shards. All ranks call it.

    Args:
        policy: the model whose parameters have gradients. The norm of a DTensor is that of the whole tensor.
        flattened: True with FSDP1, where every rank holds a plain part of each gradient (as with ZeRO-3).
    """
    trained = _trained(policy)
    in_parts = flattened or any(hasattr(parameter, "ds_id") for parameter in trained)
    gradients = [gradient for parameter in trained if (gradient := _gradient(parameter)) is not None]
    if not gradients and not in_parts:
        return math.nan
    none = torch.zeros((), device=next(policy.parameters()).device)  # a rank may hold frozen weights alone
    norm: Any = torch.nn.utils.get_total_norm(gradients) if gradients else none
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(sum_ranks(norm.square()).sqrt() if in_parts else norm)


def _gradient(parameter: Any) -> Tensor | None:
    """The gradient of a parameter, as far as this rank holds it."""
    if not hasattr(parameter, "ds_id"):
        gradient: Tensor | None = parameter.grad
        return gradient
    from deepspeed.utils import safe_get_local_grad

    part: Tensor | None = safe_get_local_grad(parameter)
    return part
