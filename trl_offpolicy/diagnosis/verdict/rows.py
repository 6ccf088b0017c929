"""Means and intervals over logged rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from trl_offpolicy.functional.intervals import t_quantile_975

Row = dict[str, float]
FEWEST = 5
"""Steps without which no interval and no baseline is formed."""


def values_of(rows: Iterable[Row], key: str) -> list[float]:
    """The finite values of a metric."""
    return [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; the sum is exact."""
    return math.fsum(values) / len(values)


def wobble(values: Sequence[float]) -> float:
    """Half-width of the 95 % interval of the mean, from how much neighbours differ: a trend is no noise."""
    count = len(values)
    if count < FEWEST:
        return 0.0
    steps = math.fsum((b - a) ** 2 for a, b in pairwise(values)) / (count - 1)
    return t_quantile_975(count - 1) * math.sqrt(steps / 2 / count)


def scatter(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % interval of the mean, from how much the steps differ; None with fewer than five steps."""
    count = len(values)
    if count < FEWEST:
        return None
    middle = mean(values)
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    return t_quantile_975(count - 1) * math.sqrt(variance / count)
