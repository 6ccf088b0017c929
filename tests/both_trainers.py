"""What compares a run of the TRL trainer with one of the Lightning module on the same rollouts."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

GRADIENT_LIMIT, METRIC_LIMIT, MOMENT_LIMIT = 1e-4, 2e-4, 2e-3
"""Largest differences allowed, absolute plus relative. The two sides put the rows into other batches, so float32
products differ in their last digits, by an amount that depends on the CPU. A log-prob of up to 16 nats is known to
1e-6, three optimizer steps carry that on, and a product over a response of six tokens squares and sums it: seen on
AVX-512, on AVX2 and under ``--other-digits`` are 2.5e-6 in gradients, 1.1e-5 in metrics. Chi-square, interval widths
and the squared norm of the gradient are differences of large moments, with 4.3e-5. Each limit is 20 times that or
more, and a hundredth of what a wrong sign gives (``test_equality.py``)."""
LARGE_MOMENTS = ("chi2_token", "chi2_sequence", "_ci95", "gradient/signal", "gradient/noise", "grad_norm")
# of one length: TRL counts positions from the padding on, this kit from the first token, as engines do.
PROMPTS = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(32)]})
NOT_COMPARED = {"step", "time", "step_time", "epoch"}
# Lightning has no tools: nothing is tokenised twice
NOT_COMPARED |= {f"offpolicy/rollout/{name}_fraction" for name in ("noncanonical", "retokenised")}
ENGINE_ONLY = {f"offpolicy/rollout/sync_{name}" for name in ("seconds", "bytes", "changed_fraction")}


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


def assert_same_numbers(ours: dict[str, float], theirs: dict[str, Any]) -> None:
    assert set(ours) - ENGINE_ONLY - NOT_COMPARED == set(theirs) - NOT_COMPARED
    assert sum(key.startswith("offpolicy/") for key in theirs) > 60
    for key in set(theirs) - NOT_COMPARED:
        limit = MOMENT_LIMIT if any(part in key for part in LARGE_MOMENTS) else METRIC_LIMIT
        assert ours[key] == pytest.approx(theirs[key], rel=limit, abs=limit), key
