"""Held-out numbers of an evaluation with TRL, counted over prompts.

TRL logs the mean of the means of its batches. The last batch may hold fewer prompts, and on several ranks it is filled
up with the first ones again: its prompts then count more, and those twice. Here each completion of the held-out set
counts once, as in the Lightning module's validation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trl_offpolicy.rollouts.batches import is_correct


class HeldOutMeans:
    """Means over the completions of one evaluation.

    Args:
        names: names of the K reward functions.
        threshold: total reward of a correct answer; None = there is no pass@1.
    """

    def __init__(self, names: Sequence[str], threshold: float | None) -> None:
        self._names, self._threshold = names, threshold
        self.begin(None)

    def begin(self, rows: int | None) -> None:
        """Begin an evaluation.

        Args:
            rows: completions of the held-out set; what comes after them is repeated. None = nothing is.
        """
        self._left = rows
        self._columns: dict[str, list[Tensor]] = {}
        self._lengths = torch.empty(0)

    def sampled(self, completion_ids: Sequence[Sequence[int]], tool_mask: Sequence[Sequence[int]] | None) -> None:
        """Keep the lengths of this rank's completions, without tool output."""
        counts = map(len, completion_ids) if tool_mask is None else map(sum, tool_mask)
        self._lengths = torch.tensor(list(counts), dtype=torch.float32)

    def add(self, by_function: Tensor, total: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Add a batch whose completions were kept by :meth:`sampled`. All ranks call it.

        Args:
            by_function: (N, K) rewards of all ranks, in rank order.
            total: (N,) their weighted sums.
            gather: all-gathers the lengths of each rank, in rank order.
        """
        count = len(total) if self._left is None else min(self._left, len(total))
        self._left = None if self._left is None else self._left - count
        values = {"reward": total, "completions/mean_length": gather(self._lengths.to(total.device))}
        values |= {f"rewards/{name}/mean": column for name, column in zip(self._names, by_function.T, strict=True)}
        if self._threshold is not None:
            values["pass@1"] = is_correct(total, self._threshold)
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value[:count].float())

    def close(self) -> dict[str, float]:
        """The means over all that is not NaN, by TRL's names; NaN where nothing is. Empty if nothing was added."""
        means = {name: float(torch.cat(parts).nanmean()) for name, parts in self._columns.items()}
        self.begin(None)
        return means
