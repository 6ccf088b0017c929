"""Loads prompts in the order of a GRPO run.

One batch of the loader is one micro-step. It carries the prompts of its whole generation batch on this rank, and its
position within that batch, so that nothing must be remembered between batches. The module samples when it meets a
generation that it has no rollouts of, and trains on the slot that the position names. Options that cut a run short
(``limit_train_batches``, ``overfit_batches``, ``fast_dev_run``, a resume in mid-epoch) only change which positions
are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How completions become optimizer steps. All counts are those of one rank.

    Args:
        micro_batch_size: completions per ``training_step``.
        num_generations: completions per prompt.
        steps_per_generation: micro-batches per generation batch.
        num_iterations: passes over a generation batch.

    Raises:
        ValueError: a count is not positive, or a group would be split between generation batches.

    Example:
        >>> BatchPlan(micro_batch_size=4, num_generations=8, steps_per_generation=4).prompts
        2
    """

    micro_batch_size: int
    num_generations: int
    steps_per_generation: int = 1
    num_iterations: int = 1

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{item.name} must be a positive whole number, but got {value!r}.")
        if self.completions % self.num_generations:
            raise ValueError(
                "micro_batch_size x steps_per_generation must be a multiple of num_generations (whole groups on every "
                f"rank), but got {self.micro_batch_size} x {self.steps_per_generation} and {self.num_generations}."
            )

    @property
    def completions(self) -> int:
        """Completions per generation batch: micro_batch_size * steps_per_generation."""
        return self.micro_batch_size * self.steps_per_generation

    @property
    def prompts(self) -> int:
        """Prompts per generation batch: completions / num_generations."""
        return self.completions // self.num_generations

    @property
    def window(self) -> int:
        """Micro-steps per generation batch: steps_per_generation * num_iterations."""
        return self.steps_per_generation * self.num_iterations


class MicroStep:
    """One batch of the training loader. It is a plain object, so that Lightning passes it on unchanged.

    Args:
        generation: (epoch, number within it) of the generation batch.
        position: 0 to ``plan.window`` - 1.
        prompts: rows of the data set: all prompts of this rank's generation batch.
        plan: sizes of the generation batch.
        coming: returns the prompts of the generation batch that comes k later in this epoch; ``coming(0)`` = prompts.
    """

    def __init__(
        self,
        generation: tuple[int, int],
        position: int,
        prompts: list[Row],
        plan: BatchPlan,
        coming: Callable[[int], list[Row]],
    ) -> None:
        self.generation, self.position, self.prompts, self.plan = generation, position, prompts, plan
        self.coming = coming

    @property
    def slot(self) -> int:
        """Number of the micro-batch within the generation batch: position % steps_per_generation."""
        return self.position % self.plan.steps_per_generation

    @property
    def iteration(self) -> int:
        """Number of the pass over the generation batch: position // steps_per_generation."""
        return self.position // self.plan.steps_per_generation


class HeldOut:
    """One batch of the validation loader.

    Args:
        prompts: rows of the data set; every rank has the same number.
        counted: how many of them count; the others only fill the last batch.
        num_generations: completions per prompt.
    """

    def __init__(self, prompts: list[Row], counted: int, num_generations: int) -> None:
        self.prompts, self.counted, self.num_generations = prompts, counted, num_generations


class PromptStream:
    """The training loader: micro-steps of this rank, in whole groups. It can resume in mid-epoch.

    Args:
        rows: the data set.
        plan: sizes of a generation batch.
        rank: number of this process.
        world_size: number of processes.
        shuffle: whether to draw a new order each epoch.
        seed: seed of the order.
        epoch_length: returns how many batches the trainer takes per epoch; called when the state is saved. None = all.

    Raises:
        ValueError: the data set is empty.

    Example:
        >>> stream = PromptStream([{"prompt": "a"}, {"prompt": "b"}], BatchPlan(micro_batch_size=2, num_generations=2))
        >>> [[row["prompt"] for row in step.prompts] for step in stream]
        [['a'], ['b']]
    """

    def __init__(
        self,
        rows: Sequence[Row],
        plan: BatchPlan,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        epoch_length: Callable[[], float] | None = None,
    ) -> None:
        if not len(rows):
            raise ValueError("dataset must hold at least one prompt, but is empty.")
        self.rows, self.plan, self.rank, self.world_size = rows, plan, rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self._epoch_length = epoch_length
        self._epoch, self._position = -1, 0
        self._resumed = False

    @property
    def generations(self) -> int:
        """Generation batches per epoch, at least one. A last one that would not be full is left out."""
        return max(len(self.rows) // (self.plan.prompts * self.world_size), 1)

    def __len__(self) -> int:
        return self.generations * self.plan.window

    def __iter__(self) -> Iterator[MicroStep]:
        if not self._resumed:
            self._epoch, self._position = self._epoch + 1, 0
        self._resumed = False
        epoch, order = self._epoch, self._order(self._epoch)
        for index in range(self._position, len(self)):
            number, position = divmod(index, self.plan.window)
            self._position = index + 1
            coming = partial(self._coming, order, number)
            yield MicroStep((epoch, number), position, coming(0), self.plan, coming)

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.rows)))
        random = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(len(self.rows), generator=random).tolist()
        return order

    def _coming(self, order: list[int], number: int, later: int) -> list[Row]:
        """The prompts of generation batch ``number + later`` on this rank."""
        first = ((number + later) * self.world_size + self.rank) * self.plan.prompts
        return [self.rows[order[i % len(order)]] for i in range(first, first + self.plan.prompts)]

    def state_dict(self) -> dict[str, int]:
        """Epoch and position of the next batch; at the end of an epoch, the start of the next one."""
        length = len(self) if self._epoch_length is None else min(self._epoch_length(), len(self))
        if self._position >= length:
            return {"epoch": self._epoch + 1, "position": 0}
        return {"epoch": max(self._epoch, 0), "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the epoch and position of :meth:`state_dict`."""
        self._epoch, self._position = state["epoch"], state["position"]
        self._resumed = True


class HeldOutStream:
    """The validation loader of this rank. All ranks have the same number of batches; filler rows do not count.

    Args:
        rows: the data set.
        batch_size: prompts per batch.
        num_generations: completions per prompt.
        rank: number of this process.
        world_size: number of processes.
    """

    def __init__(
        self, rows: Sequence[Row], batch_size: int, num_generations: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.rows, self.batch_size, self.num_generations = rows, batch_size, num_generations
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[HeldOut]:
        for number in range(len(self)):
            first = (number * self.world_size + self.rank) * self.batch_size
            places = range(first, first + self.batch_size)
            counted = min(max(len(self.rows) - first, 0), self.batch_size)
            rows = [self.rows[min(place, len(self.rows) - 1)] for place in places]
            yield HeldOut(rows, counted, self.num_generations)
