"""A factor on the learning rate that is invisible to the schedule, the optimizer state and the checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class LearningRateScale:
    """Multiplies the learning rate of every parameter group inside ``step`` and restores it right after.

    So it works with any schedule, and a run that continues without it has the learning rate of its schedule.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scale = LearningRateScale(); scale.attach(optimizer); scale.value = 0.5
        >>> optimizer.step()
        >>> weight.item(), optimizer.param_groups[0]["lr"]
        (-0.5, 1.0)
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._whole: list[Any] | None = None
        self._handles: list[Any] = []

    def attach(self, optimizer: Any) -> None:
        """Hook into the optimizer that steps, inside any wrappers, and leave an earlier one."""
        self.detach()
        # accelerate, DeepSpeed and Lightning wrap the optimizer: a hook on a wrapper would not see its step
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer or wrap one, but got {type(optimizer).__name__}.")
        self._handles = [
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._restore),
        ]

    def detach(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._whole = [], None

    def in_force(self, optimizer: Any) -> float:
        """The learning rate that a step uses for the first group; may be called inside a step or between steps."""
        rate = float(optimizer.param_groups[0]["lr"])
        return rate if self._whole is not None else rate * self.value

    def _lower(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # an earlier step may have raised before it was restored
        if self.value != 1.0:
            self._whole = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.value

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        if self._whole is not None:
            for group, whole in zip(optimizer.param_groups, self._whole, strict=True):
                group["lr"] = whole
            self._whole = None
