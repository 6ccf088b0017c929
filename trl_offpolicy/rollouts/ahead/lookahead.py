"""Reads ahead the batches that a training loop will take next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any


class Lookahead:
    """An iterator whose next items can be seen before they are taken. Items come once each, in order.

    It belongs to one epoch's iterator and never looks beyond its end.

    Args:
        items: the items of the epoch.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._taken: list[Any] = []
        self._seen: deque[Any] = deque()

    def __iter__(self) -> Lookahead:
        return self

    def __next__(self) -> Any:
        item = self._seen.popleft() if self._seen else next(self._items)
        self._taken.append(item)
        return item

    def forget(self) -> None:
        """Restart the count: the next item that is taken has position 0."""
        self._taken.clear()

    def at(self, position: int) -> Any | None:
        """The item at ``position``, counted from the last :meth:`forget`; None beyond the end of the epoch."""
        if position < len(self._taken):
            return self._taken[position]
        ahead = position - len(self._taken)
        self._seen.extend(islice(self._items, max(0, ahead + 1 - len(self._seen))))
        return self._seen[ahead] if ahead < len(self._seen) else None


def positions_ahead(*, position: int, every: int, count: int, left: int) -> list[int]:
    """Positions of the next generation batches, including the present one.

    Args:
        position: position of the present micro-batch in its optimizer step.
        every: micro-batches from one generation to the next.
        count: number of generations wanted.
        left: micro-batches until the end of training, including the present one.

    Returns:
        Positions counted like ``position``, at most ``count``; none of them after the end of training.
    """
    return [position + offset for offset in range(0, every * count, every) if offset < left]


def generations_admitted(*, lag: float, every: int, in_step: int, accumulation: int) -> float:
    """How many generation batches may be requested by now, the one that is due included (AReaL's bound).

    Where an optimizer step learns from several generations, the lag counts optimizer steps: all batches of the present
    step may be requested at its start, also at lag 0. Otherwise it counts generations.

    With a fraction (ROLL Flash's asynchronous ratio) a part of the next whole lag's batches may be requested as well:
    1 + alpha batches if a step learns from one. What is requested early is ceil(alpha) generations old when it is
    learned from, the rest at most floor(alpha).

    Args:
        lag: AReaL's eta, or ROLL Flash's alpha.
        every: micro-batches from one generation to the next.
        in_step: micro-batches left of the present optimizer step, including the one that is due.
        accumulation: micro-batches of a later optimizer step.

    Example:
        >>> generations_admitted(lag=0, every=1, in_step=4, accumulation=4)  # periodic asynchrony
        4
        >>> generations_admitted(lag=1, every=4, in_step=4, accumulation=4)
        2

        >>> generations_admitted(lag=1.5, every=4, in_step=4, accumulation=4)
        2.5

    Reference: Fu et al. 2025, AReaL (arXiv:2505.24298), equation 3; Lu 2025, periodic asynchrony (arXiv:2511.18871);
    Lu et al. 2025, ROLL Flash (arXiv:2510.11345).
    """

    def whole(lag: int) -> int:
        micro_batches = in_step + lag * accumulation
        return max(lag + 1, -(-micro_batches // every))

    least = whole(math.floor(lag))
    if lag == math.floor(lag):
        return least
    return least + (lag - math.floor(lag)) * (whole(math.ceil(lag)) - least)
