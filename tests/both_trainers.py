"""What a comparison of the two trainers needs: gradients and weights of TRL's side, a distance, what is left out."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerCallback

NOT_COMPARED = {"step", "time", "step_time", "epoch"}
ENGINE_ONLY = {f"offpolicy/rollout/sync_{name}" for name in ("seconds", "bytes", "changed_fraction")}
ENGINE_ONLY |= {"offpolicy/rollout/retokenised_fraction"}  # what a rollout_func's engine sampled is not known


class WatchTRL(TrainerCallback):
    def __init__(self, model: Any) -> None:
        self.model, self.gradients, self.weights = model, [], []

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters()})

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference, absolute plus relative to the largest entry of all, as in test_trainer_parity."""
    assert one.keys() == other.keys()
    largest = max(float(value.abs().max()) for value in other.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / (1 + largest)
