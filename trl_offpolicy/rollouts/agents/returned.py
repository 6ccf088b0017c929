"""What a rollout function of the user's returned, checked: the rollouts and the columns for the reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.rollouts.token_ids import SAMPLED_IDS
from trl_offpolicy.rollouts.token_rewards import TOKEN_REWARDS, read_token_rewards

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_MASKS = ("env_mask", "tool_mask")


class Returned(NamedTuple):
    """Rollouts, further columns (by name, one value per completion), and the ids that the engine returned."""

    rollouts: Rollouts
    columns: dict[str, list[Any]]
    sampled_ids: list[list[int]] | None


def read_returned(output: Any, *, rows: int, version: int | None) -> Returned:
    """The rollouts in the result of a rollout function.

    Args:
        output: :class:`Rollouts`, or TRL's mapping: ``prompt_ids``, ``completion_ids`` and ``logprobs`` (one list per
            completion; ``logprobs`` may be None), optionally ``env_mask`` or ``tool_mask`` (1 = sampled by the policy,
            0 = anything else), ``sampled_ids`` and ``token_rewards`` (a number for each token). Other entries are
            columns for the reward functions: a list with a value per completion, or one value for all.
        rows: number of completions that were asked for.
        version: version of the weights.

    Raises:
        TypeError: the result is neither, or a field has another type; the message names the field.
        ValueError: a field is missing or has another length.
    """
    if isinstance(output, Rollouts):
        _check_rows("rollout: prompt_ids", output.prompt_ids, rows)
        _check_rows("rollout: completion_ids", output.completion_ids, rows)
        return Returned(output, {}, None)
    if not isinstance(output, Mapping):
        raise TypeError(f"rollout must return Rollouts or a mapping, but got {type(output).__name__}.")
    if missing := [name for name in _REQUIRED if name not in output]:
        raise ValueError(f"rollout must return {', '.join(_REQUIRED)}, but {', '.join(missing)} is missing.")
    prompts, completions = (_ids(name, output[name], rows) for name in ("prompt_ids", "completion_ids"))
    given = [name for name in _MASKS if output.get(name) is not None]
    if len(given) > 1:
        raise ValueError("rollout must return env_mask or tool_mask, which mean the same, but got both.")
    sampled, by_token = output.get(SAMPLED_IDS), output.get(TOKEN_REWARDS)
    by_token = read_token_rewards(by_token, completions, wanted=by_token is not None, where="rollout function")
    rollouts = Rollouts(
        prompt_ids=prompts,
        completion_ids=completions,
        sampling_per_token_logps=_logps(output["logprobs"], completions),
        policy_versions=[[-1 if version is None else version] * len(ids) for ids in completions],
        finish_reasons=["stop"] * rows,
        tool_mask=_mask(given[0], output[given[0]], completions) if given else None,
        token_rewards=by_token,
    )
    known = {*_REQUIRED, *_MASKS, SAMPLED_IDS, TOKEN_REWARDS}
    columns = {name: _column(name, value, rows) for name, value in output.items() if name not in known}
    return Returned(rollouts, columns, None if sampled is None else _ids(SAMPLED_IDS, sampled, rows))


def _check_rows(name: str, value: Any, rows: int) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list with one entry per completion, but got {type(value).__name__}.")
    if len(value) != rows:
        raise ValueError(f"{name} must have {rows} entries, one per completion, but got {len(value)}.")


def _ids(name: str, value: Any, rows: int) -> list[list[int]]:
    _check_rows(f"rollout: {name}", value, rows)
    for i, row in enumerate(value):
        if not isinstance(row, Sequence) or not all(isinstance(token, Integral) for token in row):
            raise TypeError(f"rollout: {name} must hold lists of token ids, but entry {i} is {_shown(row)}.")
    return [[int(token) for token in row] for row in value]


def _logps(value: Any, completions: Sequence[Sequence[int]]) -> list[list[float]] | None:
    if value is None:
        return None
    found = []
    for i, row in enumerate(_per_token("logprobs", value, completions)):
        if not all(token is None or isinstance(token, Real) for token in row):
            raise TypeError(f"rollout: logprobs must hold lists of numbers (nats), but entry {i} is {_shown(row)}.")
        found.append([math.nan if token is None else float(token) for token in row])
    return found


def _mask(name: str, value: Any, completions: Sequence[Sequence[int]]) -> list[list[int]]:
    found = _per_token(name, value, completions)
    for i, row in enumerate(found):
        if not all(token in (0, 1) for token in row):
            raise ValueError(
                f"rollout: {name} must hold 1 (sampled by the policy) or 0, but entry {i} is {_shown(row)}."
            )
    return [[int(token) for token in row] for row in found]


def _per_token(name: str, value: Any, completions: Sequence[Sequence[int]]) -> list[Sequence[Any]]:
    _check_rows(f"rollout: {name}", value, len(completions))
    for i, (row, ids) in enumerate(zip(value, completions, strict=True)):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"rollout: {name} must hold lists, but entry {i} is {_shown(row)}.")
        if len(row) != len(ids):
            raise ValueError(
                f"rollout: {name} must have one value for each token of completion_ids, but entry {i} has {len(row)} "
                f"for {len(ids)} tokens."
            )
    return list(value)


def _column(name: str, value: Any, rows: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * rows
    _check_rows(f"rollout: {name}", value, rows)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
