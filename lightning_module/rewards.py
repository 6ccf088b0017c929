"""Calls reward functions that have TRL's signature."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.parts import imported
from trl_offpolicy.rollouts.agents.background import run_in_background

RewardFunction = Callable[..., Any]
_NOT_PASSED = ("prompt", "completion", "completion_ids")


class Rewards:
    """Calls every reward function on a batch.

    Args:
        functions: one or several functions ``f(prompts=, completions=, completion_ids=, **columns) -> list[float |
            None]``, plain or async, or their import paths ``package.module:name``.
        weights: weight of each function in the total; None = ones.
        further: (name, function) of rewards that environments give, each with weight 1.

    Raises:
        ValueError: there is no function, or the number of weights differs from that of functions.

    Example:
        >>> Rewards(lambda completions, **_: [float(len(text)) for text in completions])(
        ...     [{"prompt": "a"}], ["bcd"], [[5]])
        tensor([[3.]])
    """

    def __init__(
        self,
        functions: RewardFunction | str | Sequence[RewardFunction | str] | None,
        weights: Sequence[float] | None = None,
        further: Sequence[tuple[str, RewardFunction]] = (),
    ) -> None:
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions or ())
        self.functions = [imported(item) if isinstance(item, str) else item for item in listed]
        if not (self.functions or further) or not all(callable(function) for function in self.functions):
            raise ValueError(f"reward_funcs must be one or more functions, but got {functions!r}.")
        weights = [1.0] * len(self.functions) if weights is None else list(weights)
        if len(weights) != len(self.functions):
            raise ValueError(
                f"reward_weights must have one number a function, but got {len(weights)} for {len(self.functions)}."
            )
        self.names = [getattr(function, "__name__", type(function).__name__) for function in self.functions]
        self.names += [name for name, _ in further]
        self.functions += [function for _, function in further]
        self.weights = torch.tensor([*weights, *[1.0] * len(further)], dtype=torch.float32)

    def __call__(
        self,
        rows: Sequence[Mapping[str, Any]],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **context: Any,
    ) -> Tensor:
        """(B, K) float32 rewards; NaN where a function returned None.

        Args:
            rows: rows of the data set, one per completion.
            completions: texts, or lists of one message if the prompts are messages.
            completion_ids: token ids of each completion.
            **context: further keyword arguments of the functions (``trainer_state``, ``log_metric``).
        """
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _NOT_PASSED}
        arguments = {
            "prompts": [row["prompt"] for row in rows],
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            **columns,
            **context,
        }
        answers = [function(**arguments) for function in self.functions]
        waiting = {i: answer for i, answer in enumerate(answers) if inspect.isawaitable(answer)}
        for i, answer in (
            zip(waiting, run_in_background(_together(list(waiting.values()))), strict=True) if waiting else ()
        ):
            answers[i] = answer
        return torch.stack([self._column(*pair, len(rows)) for pair in zip(self.names, answers, strict=True)], dim=1)

    @staticmethod
    def _column(name: str, answer: Any, rows: int) -> Tensor:
        values = [torch.nan if value is None else float(value) for value in answer]
        if len(values) != rows:
            raise ValueError(f"reward function {name} must return {rows} rewards, but got {len(values)}.")
        return torch.tensor(values, dtype=torch.float32)


async def _together(waiting: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*waiting))
