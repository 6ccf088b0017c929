"""Measures reward, pass@1 and length on held-out prompts over all ranks, or returns what was sampled."""

from __future__ import annotations

import time
from typing import Any

import torch
from torchmetrics import MeanMetric, Metric

from lightning_module.generation import Generation
from lightning_module.host import Host
from lightning_module.metrics import FractionMetric, tool_counts
from lightning_module.state import random_state, seed_random, set_random_state
from lightning_module.streams import HeldOut
from trl_offpolicy.rollouts.agents import Completions
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
        for name in tool_counts([], []) if module.agents.has_tools else ():
            module.add_module(_attribute(name), FractionMetric())
        self.names = names
        self._training: dict[str, Any] | None = None
        self._begun = 0.0

    def begin(self) -> None:
        """Draw from here on what every validation draws. All validations then differ by the weights alone."""
        self._begun = time.monotonic()
        self._training = random_state()
        seed_random(torch.initial_seed() + _SEED)

    def end(self) -> None:
        """Go on with the random numbers of training, as if there had been no validation."""
        if self._training is not None:
            set_random_state(self._training)
            self._module.measuring.leave_out(time.monotonic() - self._begun)
        if self._module.ahead is None:  # else training's tools may run meanwhile, and be counted too
            self._module.agents.guard_stats(self._module.device)  # counted since the last call: not training's
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
        return metrics | self._tool_metrics(sampled.completions, count, prefix)

    def _tool_metrics(self, completions: Completions, count: int, prefix: str) -> dict[str, Metric]:
        """The metrics of tool calls, with those of the first ``count`` completions; empty if there are no tools."""
        if completions.tool_calls is None or completions.tool_failures is None:
            return {}
        found: dict[str, Metric] = {}
        counts = tool_counts(completions.tool_calls[:count], completions.tool_failures[:count])
        for name, (part, whole) in counts.items():
            found[f"{prefix}{name}"] = getattr(self._module, _attribute(name))
            found[f"{prefix}{name}"].update(part, whole)
        return found

    @torch.no_grad()
    def predict(self, batch: HeldOut) -> list[dict[str, Any]]:
        """Sample a batch; one entry per completion of a row that counts, with its reward. All ranks call it."""
        names, sampled = self._module.rewards.names, self._generation.sample(batch.prompts, batch.num_generations)
        answers = zip(sampled.prompts, sampled.completions.completions, sampled.by_function.tolist(), strict=True)
        return [
            {"prompt": prompt, "completion": completion, "rewards": dict(zip(names, rewards, strict=True))}
            for prompt, completion, rewards in list(answers)[: batch.counted * batch.num_generations]
        ]


def _attribute(name: str) -> str:
    return "eval_" + "".join(letter if letter.isalnum() else "_" for letter in name)
