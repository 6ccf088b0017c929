"""Bounds that no ratio reaches (a cap of 1e9), by which other frameworks mean "no bound": left open with a warning.

The terms themselves refuse such bounds, because they never fire. :func:`upper` and :func:`lower` mark an open side by
infinity for the functions that build a term. A None of the framework's own options is passed on to the term.
"""

from __future__ import annotations

import math
from typing import TypeVar

from trl_offpolicy.checks import check_number
from trl_offpolicy.correction.terms import (
    BandWeight,
    DivergenceBand,
    KeepTerm,
    OutlierVeto,
    RatioBand,
    RawWeight,
    TruncateWeight,
)
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.functional.masks import Statistic
from trl_offpolicy.presets.frameworks.options import is_number, tell
from trl_offpolicy.types import Ratio

Bound = float | None
Given = TypeVar("Given", float, Bound)
LARGEST_RATIO = math.exp(LOG_RATIO_CLAMP)
_HIGHEST_CAP = math.nextafter(LARGEST_RATIO, 0.0)
"""A cap that never acts but that a term accepts: it refuses caps at or above what ratios can reach."""
_WHY = f"log-ratios are held within +-{LOG_RATIO_CLAMP:g} nats here, and nothing reaches it"


def check_bound(name: str, value: object) -> None:
    """Raise unless ``value`` is a number; infinity is one more way of saying "no bound"."""
    if value != math.inf:
        check_number(name, value)


def upper(name: str, value: Given, limit: float = LARGEST_RATIO) -> Given:
    """``value``, or infinity with a warning if it is ``limit`` or more.

    Args:
        name: the framework's name of the option, for the warning.
        value: a bound; what is not a number is left to the term to check.
        limit: the most that the bounded quantity can reach; by default that of a ratio.
    """
    if is_number(value) and value is not None and value >= limit:
        tell(f"{name}={value} is taken as no cap: {_WHY}.")
        return math.inf
    return value


def lower(name: str, value: Bound, limit: float = 1 / LARGEST_RATIO) -> Bound:
    """``value``, or minus infinity with a warning if it is ``limit`` or less; a negative ratio is left to the term."""
    if is_number(value) and value is not None and value <= limit and not value < 0 < limit:
        tell(f"{name}={value} is taken as no floor: {_WHY}.")
        return -math.inf
    return value


def truncate(level: Level, low: Bound, high: Bound, ratio: Ratio = "old/sampling") -> TruncateWeight | RawWeight:
    """The weight min(max(rho, low), high); an open side has no bound."""
    low = _closed(low)
    if low is None and high == math.inf:
        return RawWeight(level=level, ratio=ratio)
    cap = _HIGHEST_CAP if high == math.inf else high
    return TruncateWeight(level=level, max_weight=cap, min_weight=low, ratio=ratio)  # type: ignore[arg-type]  # checked


def band(level: Level, low: Bound, high: Bound, ratio: Ratio = "old/sampling") -> BandWeight | RawWeight:
    """The weight that is the ratio inside [low, high] and 0 outside."""
    if _opened(low, high):
        return RawWeight(level=level, ratio=ratio)
    return BandWeight(level=level, low=_closed(low), high=_closed(high), ratio=ratio)


def ratio_band(level: Level, low: Bound, high: Bound, ratio: Ratio = "old/sampling") -> tuple[KeepTerm, ...]:
    """The term that keeps ratios in [low, high]; none if both sides were opened."""
    return () if _opened(low, high) else (RatioBand(level=level, low=_closed(low), high=_closed(high), ratio=ratio),)


def veto(low: Bound, high: Bound) -> tuple[KeepTerm, ...]:
    """The term that drops a response with a token outside [low, high]; none if both sides were opened."""
    return () if _opened(low, high) else (OutlierVeto(low=_closed(low), high=_closed(high)),)


def divergence_band(
    statistic: Statistic, level: Level, low: Bound, high: Bound, ratio: Ratio = "old/sampling"
) -> tuple[KeepTerm, ...]:
    """The term that keeps the statistic in [low, high], nats; none if both sides were opened."""
    if _opened(low, high):
        return ()
    return (DivergenceBand(statistic=statistic, level=level, low=_closed(low), high=_closed(high), ratio=ratio),)


def _closed(bound: Bound) -> Bound:
    return None if bound in (math.inf, -math.inf) else bound


def _opened(low: Bound, high: Bound) -> bool:
    """True if bounds were given and none of them is left."""
    return _closed(low) is None and _closed(high) is None and not (low is None and high is None)
