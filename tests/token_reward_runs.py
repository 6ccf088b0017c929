"""Rewards by token for the tiny models: a rule that judges words by their ids and places, and a ``rollout_func``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_runs import Engine


def judged(ids: Sequence[int]) -> list[float]:
    """A reward for each token, between -0.3 and 0.45; it grows along the completion."""
    return [((7 * token) % 5 - 2) * 0.05 * (1 + place / 2) for place, token in enumerate(ids)]


class Judged(Engine):
    """A ``rollout_func`` that also returns the column ``token_rewards``.

    Args:
        masked: whether the second token of each completion is marked as no token of the model.
        mismatch: shift and noise, as of :class:`~trainer_runs.Engine`.
    """

    def __init__(self, *, masked: bool = False, **mismatch: float) -> None:
        super().__init__(**mismatch)
        self.masked = masked

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        output["token_rewards"] = [judged(ids) for ids in output["completion_ids"]]
        if self.masked:
            output["env_mask"] = [[int(place != 1) for place in range(len(ids))] for ids in output["completion_ids"]]
        return output
