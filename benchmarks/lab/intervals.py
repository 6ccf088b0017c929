"""Means over seeds with 95 % intervals, and rank correlation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from trl_offpolicy.functional.intervals import t_quantile_975


class Interval(NamedTuple):
    """A mean over seeds and half the width of its 95 % t interval (NaN with one seed)."""

    mean: float
    half: float

    def text(self, digits: int = 3, *, sign: bool = False, scale: float = 1.0) -> str:
        """For a table."""
        mean = f"{self.mean * scale:{'+' if sign else ''}.{digits}f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half * scale:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and half width, Student's t.

    Example:
        >>> interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.484...)
    """
    if len(values) < 2:
        return Interval(statistics.mean(values), math.nan)
    half = t_quantile_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.mean(values), half)


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """(pairs in the same order - pairs in the opposite order) / pairs; 1 = the same ranking, -1 = the reverse (tau-a).

    Example:
        >>> kendall_tau([1.0, 2.0, 3.0], [1.0, 3.0, 2.0])
        0.333...
    """
    pairs = [(a, b) for b in range(len(x)) for a in range(b)]
    products = [(x[b] - x[a]) * (y[b] - y[a]) for a, b in pairs]
    return sum((product > 0) - (product < 0) for product in products) / len(pairs) if pairs else math.nan
