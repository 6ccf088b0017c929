"""Rewards and lengths of completions as a torchmetric. Its state is the rows, merged over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class FractionMetric(Metric):
    """A sum over another one, over all ranks; 0 if the latter is 0, as in TRL."""

    is_differentiable = False
    full_state_update = False
    part: Tensor
    whole: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("part", "whole"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, part: float, whole: float) -> None:
        """Add to both sums."""
        self.part = self.part + part
        self.whole = self.whole + whole

    def compute(self) -> Tensor:
        """The fraction."""
        return torch.where(self.whole > 0, self.part / self.whole.clamp(min=1.0), 0.0)


def tool_counts(calls: Sequence[int], failures: Sequence[int]) -> dict[str, tuple[int, int]]:
    """TRL's numbers of tool calls, as (part, whole) by name: calls per completion, and failures per call.

    Args:
        calls: number of tool calls of each completion.
        failures: number of these that ended in an error.
    """
    return {
        "tools/call_frequency": (sum(calls), len(calls)),
        "tools/failure_frequency": (sum(failures), sum(calls)),
    }


class CompletionMetric(Metric):
    """Rewards and lengths of completions, under TRL's names and with TRL's meaning.

    Every number is computed on the completions of one generation batch over all ranks. Several generation batches
    between two logging steps give the mean of their numbers. One whose number is NaN (a reward function that gave
    nothing) is left out.

    Args:
        names: names of the reward functions.
        num_generations: completions per group; groups are whole.
    """

    is_differentiable = False
    full_state_update = False
    rows: list[Tensor]

    def __init__(self, names: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names = names
        self.num_generations = 1
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(
        self, by_function: Tensor, total: Tensor, lengths: Tensor, terminated: Tensor, num_generations: int
    ) -> None:
        """Add a generation batch of whole groups, group after group. All ranks add the same number of them.

        Args:
            by_function: (B, K) reward of each function; NaN = the function gave none.
            total: (B,) total reward.
            lengths: (B,) number of tokens.
            terminated: (B,) bool; True = the completion ended by itself.
            num_generations: completions per group.
        """
        self.num_generations = num_generations
        batch = torch.full_like(total, len(self.rows))  # its number, by which compute finds the rows of all ranks
        columns = [column.unsqueeze(1) for column in (batch, total, lengths, terminated)]
        self.rows.append(torch.cat([column.to(torch.float64) for column in (*columns, by_function)], dim=1))

    def compute(self) -> dict[str, float]:
        """Means, standard deviations and extremes over all ranks; empty if there was no completion."""
        rows = torch.cat(self.rows) if isinstance(self.rows, list) and self.rows else self.rows
        if isinstance(rows, list):
            return {}
        count = int(rows[:, 0].max()) + 1
        batches = [self._of_batch(rows[rows[:, 0] == number, 1:]) for number in range(count)]
        by_name = {name: [one[name] for one in batches if not math.isnan(one[name])] for name in batches[0]}
        return {name: fmean(values) if values else math.nan for name, values in by_name.items()}

    def _of_batch(self, rows: Tensor) -> dict[str, float]:
        """The numbers of one generation batch: rows of total, length, terminated, reward by function."""
        total, lengths, terminated = rows[:, 0], rows[:, 1], rows[:, 2].bool()
        of_group = total.view(-1, self.num_generations)
        spread = of_group.std(dim=1) if self.num_generations > 1 else torch.zeros(len(of_group))
        ended = lengths[terminated] if terminated.any() else torch.zeros(1, dtype=rows.dtype)
        values = {
            "reward": total.nanmean(),
            "reward_std": _nanstd(total),
            "frac_reward_zero_std": torch.isclose(spread, torch.zeros_like(spread)).double().mean(),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": 1.0 - terminated.double().mean(),
            "completions/mean_terminated_length": ended.mean(),
            "completions/min_terminated_length": ended.min(),
            "completions/max_terminated_length": ended.max(),
        }
        for name, column in zip(self.names, rows[:, 3:].T, strict=True):
            values |= {f"rewards/{name}/mean": column.nanmean(), f"rewards/{name}/std": _nanstd(column)}
        return {name: float(value) for name, value in values.items()}


def _nanstd(values: Tensor) -> Tensor:
    """Standard deviation (divided by n - 1) of the values that are not NaN."""
    present = values[~values.isnan()]
    return present.std() if len(present) > 1 else present.new_tensor(torch.nan)
