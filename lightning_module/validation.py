"""Measures reward, pass@1 and length on held-out prompts over all ranks, or returns what was sampled."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import MeanMetric, Metric

from lightning_module.generation import Generation
from lightning_module.host import Host
from lightning_module.state import random_state, seed_random, set_random_state
from lightning_module.streams import HeldOut
from trl_offpolicy.rollouts.batches import is_correct

_SEED = 1 << 20
"""What the seed of validations is above that of training: more than there are ranks."""


class Validation:
    """Samples batches of held-out prompts at the current weights.

    Args:
        module: the module whose reward functions and threshold are used.
        generation: the object that samples for it.
    """

    def __init__(self, module: Host, generation: Generation) -> None:
        self._module, self._generation = module, generation
        names = ["reward", "completions/mean_length", *(f"rewards/{name}/mean" for name in module.rewards.names)]
        if module.settings["correct_threshold"] is not None:
            names.append("pass@1")
        # They are submodules of the LightningModule, so Lightning synchronises and resets them.
        for name in names:
            module.add_module(_attribute(name), MeanMetric())
        self.names = names
        self._training: dict[str, Any] | None = None

    def begin(self) -> None:
        """Draw from here on what every validation draws. All validations then differ by the weights alone."""
        self._training = random_state()
        seed_random(torch.initial_seed() + _SEED)

    def end(self) -> None:
        """Go on with the random numbers of training, as if there had been no validation."""
        if self._training is not None:
            set_random_state(self._training)
        self._training = None

    @torch.no_grad()
    def observe(self, batch: HeldOut, prefix: str) -> dict[str, Metric]:
        """Sample a batch; the updated metrics by the name to log them under. All ranks call it.

        Args:
            batch: the prompts.
            prefix: beginning of the names, ``eval_`` or ``test_``.
        """
        module, count = self._module, batch.counted * batch.num_generations
        sampled = self._generation.sample(batch.prompts, batch.num_generations)
        total = sampled.total[:count]
        values = {"reward": total, "completions/mean_length": sampled.lengths[:count].float()}
        for name, column in zip(module.rewards.names, sampled.by_function[:count].T, strict=True):
            values[f"rewards/{name}/mean"] = column
        threshold = module.settings["correct_threshold"]
        if threshold is not None:
            values["pass@1"] = is_correct(total, threshold)
        metrics: dict[str, Metric] = {}
        for name, value in values.items():
            metric: Metric = getattr(module, _attribute(name))
            metric.update(value[~value.isnan()])
            metrics[f"{prefix}{name}"] = metric
        return metrics

    @torch.no_grad()
    def predict(self, batch: HeldOut) -> list[dict[str, Any]]:
        """Sample a batch; one entry per completion of a row that counts, with its reward. All ranks call it."""
        names, sampled = self._module.rewards.names, self._generation.sample(batch.prompts, batch.num_generations)
        repeated = [row for row in batch.prompts for _ in range(batch.num_generations)]
        counted = list(zip(repeated, sampled.completions, sampled.by_function.tolist(), strict=True))
        return [
            {"prompt": row["prompt"], "completion": completion, "rewards": dict(zip(names, rewards, strict=True))}
            for row, completion, rewards in counted[: batch.counted * batch.num_generations]
        ]


def _attribute(name: str) -> str:
    return "eval_" + "".join(letter if letter.isalnum() else "_" for letter in name)
