"""Rewards by token in the TRL trainer: what a ``rollout_func`` returns is kept for the advantages of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trl_offpolicy.rollouts.screening import Screen
from trl_offpolicy.rollouts.token_rewards import TOKEN_REWARDS, not_finite, read_token_rewards


def check_token_rewards(args: Any, given: Mapping[str, Any]) -> None:
    """Raise if rewards by token are wanted, but nothing of this trainer can bring them.

    Args:
        args: the configuration.
        given: keyword arguments of the trainer.

    Raises:
        ValueError: there is no ``rollout_func``.
        NotImplementedError: TRL's loop of tools would go on from what it returned.
    """
    if not args.token_rewards:
        return
    if given.get("rollout_func") is None:
        raise ValueError(
            "token_rewards must be false without a rollout_func, but got true: neither vLLM nor transformers' generate "
            "gives a reward by token."
        )
    if found := [name for name in ("tools", "environment_factory") if given.get(name)]:
        raise NotImplementedError(
            f"token_rewards must be false with {' and '.join(found)}, but got true: TRL's loop appends turns to what "
            "the rollout_func returned, and these have no rewards by token. Call the tools in the rollout_func."
        )


class TrainerTokenRewards:
    """Takes the column ``token_rewards`` out of what a ``rollout_func`` returns, which a reward function need not see.

    Args:
        trainer: the trainer; its ``rollout_func`` is wrapped, after the replies are screened.
        screen: told of a reward that is not finite, so that all ranks end where they agree on the rows.
    """

    def __init__(self, trainer: Any, screen: Screen) -> None:
        self._screen = screen
        self._wanted = bool(trainer.args.token_rewards)
        self._rows: list[list[float]] | None = None
        if trainer.rollout_func is not None:
            trainer.rollout_func = self._watched(trainer.rollout_func)

    def _watched(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = rollout_func(*args, **kwargs)
            if not isinstance(output, Mapping) or "completion_ids" not in output:
                return output  # TRL says what is missing
            rest = dict(output)
            given = rest.pop(TOKEN_REWARDS, None)
            self._rows = read_token_rewards(given, output["completion_ids"], wanted=self._wanted, where="rollout_func")
            if bad := not_finite(self._rows):
                self._screen.fail(bad)
            return rest

        return watched

    def take(self) -> list[list[float]] | None:
        """Those of this rank's rows of the generation batch at hand, once; None = the setting is off."""
        rows, self._rows = self._rows, None
        return rows
