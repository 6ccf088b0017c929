"""What a run logs, as torchmetrics: sums, extremes and rows as states, merged over micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from trl_offpolicy.functional.intervals import ClusterRows
from trl_offpolicy.functional.moments import Moments
from trl_offpolicy.stats import Group, Stats


class StatsMetric(Metric):
    """All diagnostics of an objective: a shell over :class:`~trl_offpolicy.Stats`.

    The moments of all groups are two states, so that a whole set costs two collectives (and one for the rows of each
    group with intervals), however many numbers come of it. All ranks update it with the same groups.
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor
    maxima: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._known: dict[str, Group] = {}
        self.add_state("sums", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("maxima", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, stats: Stats) -> None:
        """Add the stats of a micro-batch."""
        merged = self.stats.merge(stats) if self._known else stats
        self._known = merged.groups
        self.sums = torch.cat([group.moments.sums for group in merged.groups.values()])
        self.maxima = torch.cat([group.moments.maxima for group in merged.groups.values()])
        for name, group in merged.groups.items():
            if group.rows is not None:
                if _state(name) not in self._defaults:
                    self.add_state(_state(name), [], dist_reduce_fx="cat")
                setattr(self, _state(name), [_table(group.rows)])

    def has(self, group: str) -> bool:
        """True if the group was added since the last reset."""
        return group in self._known

    @property
    def stats(self) -> Stats:
        """What the states hold."""
        sums = iter(torch.split(self.sums, [len(group.moments.sums) for group in self._known.values()]))
        maxima = iter(torch.split(self.maxima, [len(group.moments.maxima) for group in self._known.values()]))
        held = {}
        for name, group in self._known.items():
            moments = Moments(group.moments.layout, next(sums), next(maxima))
            rows = None if group.rows is None else _rows(getattr(self, _state(name)), group.rows)
            held[name] = group._replace(moments=moments, rows=rows)
        return Stats(held)

    def compute(self) -> dict[str, float]:
        """``offpolicy/<group>/<quantity>`` to number, over all ranks."""
        return self.stats.compute() if self._known else {}

    def reset(self) -> None:
        """Forget what was added."""
        super().reset()
        self._known = {}


def _state(group: str) -> str:
    return "rows_" + "".join(letter if letter.isalnum() else "_" for letter in group)


def _table(rows: ClusterRows) -> Tensor:
    """(N, 1 + S): group id and moments of each response."""
    ids = torch.zeros_like(rows.values[:, 0]) if rows.ids is None else rows.ids.to(rows.values.dtype)
    return torch.cat([ids.unsqueeze(1), rows.values], dim=1)


def _rows(state: list[Tensor] | Tensor, like: ClusterRows) -> ClusterRows:
    table = torch.cat(state) if isinstance(state, list) else state
    return ClusterRows(like.layout, table[:, 1:], None if like.ids is None else table[:, 0].long())


class CompletionMetric(Metric):
    """Rewards and lengths of completions, under TRL's names. Every completion counts once.

    Args:
        names: of the reward functions.
        num_generations: completions of a group; groups are whole.
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
        """Add a generation batch of whole groups, group after group.

        Args:
            by_function: (B, K) rewards; NaN = none.
            total: (B,) reward.
            lengths: (B,) tokens.
            terminated: (B,) bool: ended by itself.
            num_generations: completions of a group.
        """
        self.num_generations = num_generations
        columns = [total.unsqueeze(1), lengths.unsqueeze(1), terminated.unsqueeze(1), by_function]
        self.rows.append(torch.cat([column.to(torch.float64) for column in columns], dim=1))

    def compute(self) -> dict[str, float]:
        """Means, spreads and extremes over all ranks; nothing where there was no completion."""
        rows = torch.cat(self.rows) if isinstance(self.rows, list) and self.rows else self.rows
        if isinstance(rows, list):
            return {}
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
    """Standard deviation (n - 1) of what is there."""
    present = values[~values.isnan()]
    return present.std() if len(present) > 1 else present.new_tensor(torch.nan)
