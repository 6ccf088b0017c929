"""One shape for every test of a cause: something is changed by a number, and the tokens are scored again.

A test is an :class:`Intervention`; a table of them is searched by ``hypotheses.py``. A new test is one entry of a
table. What is searched is always the same: a few values, then the best of them is refined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Floats

HOPELESS = 0.98
"""Share of the loss that the best value of a grid leaves, above which it is not refined."""
SMALL_TURN, LARGEST_TURN = 0.01, 3.0
"""Steps from the neutral value: the small one that gives a direction, and the largest that is predicted from it."""

Scale = Literal["switch", "linear", "log", "whole"]
"""How the values of a number lie: a switch has no more than those that are given; "whole" ones lie on a log scale."""


@dataclass(frozen=True)
class Intervention:
    """Something that may differ between the two sides, and the scores under it.

    Args:
        cause: what it would mean, a name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`, and so the key of the fix.
        text: a value in words, e.g. "RoPE base 1e+06 for 1e+04".
        score: (value, rows) -> log-probs (B, T) of these completions, NaN elsewhere.
        values: tried first.
        scale: how values lie.
        neutral: the value that changes nothing; None = there is none.
        forwards: False if a value costs no forward of the model.
    """

    cause: str
    text: Callable[[float], str]
    score: Callable[[float, Sequence[int]], Floats]
    values: tuple[float, ...] = (1.0,)
    scale: Scale = "switch"
    neutral: float | None = None
    forwards: bool = True

    def at(self, x: float) -> float:
        """The value at a place of the search's axis."""
        if self.scale == "linear" or self.scale == "switch":
            return x
        value = float(np.exp(x))
        return float(round(value)) if self.scale == "whole" else value

    def place(self, value: float) -> float:
        """The place of a value on the search's axis."""
        return float(np.log(value)) if self.scale in ("log", "whole") else value


def switch(cause: str, detail: str, score: Callable[[Sequence[int]], Floats], *, forwards: bool = True) -> Intervention:
    """Something that is so or not so."""
    return Intervention(cause, lambda _x: detail, lambda _x, rows: score(rows), forwards=forwards)


def minimise(
    loss: Callable[[float], float], grid: Sequence[float], *, neutral: float | None = None, steps: int = 9,
    hopeless: float = HOPELESS, enough: float = 0.0, open_ends: bool = False,
) -> float:  # fmt: skip
    """The value of the least loss: the best of a sorted grid, refined by golden sections between its neighbours.

    Args:
        loss: of one value.
        grid: sorted values.
        neutral: the value of the grid that changes nothing; where nothing is better there is no search.
        steps: golden sections.
        hopeless: share of the neutral value's loss above which nothing is better.
        enough: a loss at which the search ends.
        open_ends: beyond the first and the last value as far as to their neighbours.

    Example:
        >>> round(minimise(lambda x: (x - 0.3) ** 2, (0.0, 0.25, 1.0), steps=40), 4)
        0.3
    """
    values = [loss(x) for x in grid]
    best = int(np.argmin(values))
    if values[best] <= enough or (neutral is not None and values[best] > hopeless * values[grid.index(neutral)]):
        return grid[best]
    low, high = _neighbours(grid, best, open_ends=open_ends)
    golden = (np.sqrt(5) - 1) / 2
    tried = {grid[best]: values[best]}
    left, right = high - golden * (high - low), low + golden * (high - low)
    for x in (left, right):
        tried[x] = loss(x)
    for _ in range(steps):
        if min(tried.values()) <= enough:
            break
        if tried[left] < tried[right]:
            high, right = right, left
            left = high - golden * (high - low)
            tried[left] = loss(left)
        else:
            low, left = left, right
            right = low + golden * (high - low)
            tried[right] = loss(right)
    return float(min(tried, key=lambda x: tried[x]))


def _neighbours(grid: Sequence[float], place: int, *, open_ends: bool) -> tuple[float, float]:
    low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
    if open_ends and len(grid) > 1:
        low = low if place else 2 * grid[0] - grid[1]
        high = high if place + 1 < len(grid) else 2 * grid[-1] - grid[-2]
    return low, high


def round_numbers(value: float) -> list[float]:
    """The value with one, two and three digits: settings are round numbers.

    Example:
        >>> round_numbers(0.69985)
        [0.7, 0.7, 0.7]
    """
    return [float(f"{value:.{digits}g}") for digits in (1, 2, 3)]


def predicted(direction: Any, change: Any) -> float:
    """The step along ``direction`` that fits ``change`` best, by the median of their ratio where it moves much.

    Example:
        >>> predicted(np.array([1.0, -2.0, 0.1]), np.array([0.5, -1.0, 3.0]))
        0.5
    """
    use = np.isfinite(direction) & np.isfinite(change)
    d, c = direction[use], change[use]
    much = np.abs(d) >= np.quantile(np.abs(d), 0.5) if len(d) else np.zeros(0, bool)
    if not much.any():
        return SMALL_TURN
    step = float(np.median(c[much] / np.where(d[much] == 0, 1e-30, d[much])))
    return float(np.clip(step, -LARGEST_TURN, LARGEST_TURN)) or SMALL_TURN
