"""Rewards by token in Lightning: which settings can bring them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_module.engines import engine_type
from trl_offpolicy.checks import check_bool


def check_token_rewards(given: Mapping[str, Any]) -> None:
    """Raise if rewards by token are wanted, but nothing that samples can bring them.

    Args:
        given: the settings of a module.

    Raises:
        ValueError: the setting is no bool; or there is neither a ``rollout`` nor an engine of the user's.
        NotImplementedError: the batches are sampled ahead.
    """
    check_bool(token_rewards=given["token_rewards"])
    if not given["token_rewards"]:
        return
    if given["async_rollouts"] is not None:
        raise NotImplementedError(
            "token_rewards must be false with async_rollouts, but got true: what is in flight are replies of a server, "
            "which gives no reward by token."
        )
    kind = engine_type(given["engine"])
    if given["rollout"] is None and kind != "own":
        raise ValueError(
            f"token_rewards must be false with engine {kind!r} and without a rollout, but got true: that engine gives "
            "no reward by token. Take a rollout function, or an engine of your own."
        )
