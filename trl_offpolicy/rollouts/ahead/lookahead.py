"""Reads ahead the batches that a training loop will take next."""

from __future__ import annotations

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
