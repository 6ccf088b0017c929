"""Rewards by token (of a process reward model, say) that a rollout function or an engine of the user's brings along.

They come beside the rewards of the reward functions, as a column of what was sampled: a list for each completion, with
one number for each of its tokens. They enter the advantages of both trainers as the KL in the reward does
(:attr:`~trl_offpolicy.objective.advantages.AdvantageInputs.token_rewards`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

TOKEN_REWARDS = "token_rewards"
"""Name of the column, and of the setting of both trainers that has it read."""


def read_token_rewards(
    value: Any, completions: Sequence[Sequence[int]], *, wanted: bool, where: str
) -> list[list[float]] | None:
    """The column ``token_rewards``, checked; None if it is neither wanted nor there.

    Args:
        value: the column; None = there is none.
        completions: ids of the completions.
        wanted: the setting ``token_rewards``.
        where: who returned them, for messages.

    Raises:
        TypeError: an entry is no list of numbers.
        ValueError: the column is missing, or is not wanted, or has not one number for each token. That a number is not
            finite is :func:`not_finite`'s to say, because one rank alone may have it.

    Example:
        >>> read_token_rewards([[0.5, 0]], [[17, 18]], wanted=True, where="rollout_func")
        [[0.5, 0.0]]
    """
    if not wanted and value is None:
        return None
    if not wanted:
        raise ValueError(
            f"token_rewards must be true to learn from the column token_rewards that the {where} returned, but got "
            "false. Set token_rewards: true, or give the column another name."
        )
    if value is None:
        raise ValueError(
            f"token_rewards must be a column of what the {where} returns (for each completion a list with one number "
            "for each token) with token_rewards: true, but it returned none."
        )
    if not _is_list(value):
        raise TypeError(f"token_rewards must be a list with one list per completion, but got {type(value).__name__}.")
    if len(value) != len(completions):
        raise ValueError(
            f"token_rewards must have {len(completions)} lists, one for each completion, but got {len(value)}."
        )
    return [_row(i, *pair) for i, pair in enumerate(zip(value, completions, strict=True))]


def _row(number: int, value: Any, ids: Sequence[int]) -> list[float]:
    if not _is_list(value) or not all(isinstance(one, Real) and not isinstance(one, bool) for one in value):
        text = repr(value)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise TypeError(f"token_rewards must hold lists of numbers, but row {number} is {shown}.")
    if len(value) != len(ids):
        raise ValueError(
            f"token_rewards must have one number for each token of completion_ids, {len(ids)} in row {number}, but got "
            f"{len(value)}."
        )
    return [float(one) for one in value]


def not_finite(rows: Sequence[Sequence[float]] | None) -> str | None:
    """The first reward that is not finite, in a sentence; None = all are. Given to ``Screen.fail``, it ends all ranks.

    Example:
        >>> not_finite([[0.5], [0.0, float("inf")]])
        'token_rewards must be finite, but token 1 of row 1 has inf'
    """
    for number, row in enumerate(rows or ()):
        for token, reward in enumerate(row):
            if not math.isfinite(reward):
                return f"token_rewards must be finite, but token {token} of row {number} has {reward}"
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def padded_token_rewards(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """(B, T) float32 rewards, 0 on padding, on the device of ``like`` (B, T), the completion ids."""
    width = like.shape[1]
    padded = [[*row, *[0.0] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32, device=like.device)
