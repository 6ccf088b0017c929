"""Checks of settings that several terms share. Every message names the field, the expected and the actual value."""

from __future__ import annotations

import math
from collections.abc import Collection

from trl_offpolicy.checks import check_choice, check_number
from trl_offpolicy.functional.levels import LEVELS, Level
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.types import RATIOS, Ratio, Scope

WIDE_SCOPES: tuple[Scope, ...] = ("generation_batch", "micro_batch")


def check_level(level: str, allowed: Collection[str] = LEVELS, *, why: str = "") -> None:
    """Raise unless the level exists and has a meaning for this term."""
    check_choice("level", level, LEVELS)
    if level not in allowed:
        raise ValueError(f"level must be one of {list(allowed)} here{why and f' ({why})'}, but got {level!r}.")


def check_ratio(ratio: str) -> None:
    """Raise unless ``ratio`` names one of the known pairs of policies."""
    check_choice("ratio", ratio, RATIOS)


def check_group_level(level: Level, ratio: Ratio) -> None:
    """Raise for level ``group`` on the current policy: groups are whole only before there is a current policy."""
    if level == "group" and ratio != "old/sampling":
        raise ValueError(
            f"ratio must be 'old/sampling' at level 'group' (groups are split up before a current policy exists), "
            f"but got {ratio!r}."
        )


def check_scope(scope: Scope, ratio: Ratio) -> None:
    """Raise unless a term on the current policy has ``scope="micro_batch"``: it sees no more than that."""
    check_choice("scope", scope, WIDE_SCOPES)
    if scope == "generation_batch" and ratio != "old/sampling":
        raise ValueError(
            f"scope must be 'micro_batch' for ratio {ratio!r} (the current policy is known one micro-batch at a time), "
            f"but got {scope!r}."
        )


def check_order(low_field: str, low: float | None, high_field: str, high: float | None) -> None:
    """Raise unless the bounds are finite numbers in order, at most one of them None."""
    if low is None and high is None:
        raise ValueError(
            f"{low_field} and {high_field} must not both be None (such a term can never fire), but got two open sides."
        )
    for field, value in ((low_field, low), (high_field, high)):
        if value is not None:
            check_number(field, value)
    if low is not None and high is not None and low > high:
        raise ValueError(f"{low_field} must be at most {high_field}, but got {low} > {high}.")


def check_ratio_bounds(low_field: str, low: float | None, high_field: str, high: float | None) -> None:
    """Raise unless bounds on a ratio are positive, in order, and inside what a log-ratio clamped to +-20 can reach."""
    check_order(low_field, low, high_field, high)
    largest = math.exp(LOG_RATIO_CLAMP)
    if low is not None and not 1 / largest < low:
        hint = "write None for an open side"
        raise ValueError(f"{low_field} must be a ratio above {1 / largest:.1e} to ever fire ({hint}), but got {low}.")
    if high is not None and not 0 < high < largest:
        raise ValueError(f"{high_field} must be a ratio in (0, {largest:.1e}) to ever fire, but got {high}.")
