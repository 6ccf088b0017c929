"""Stats: the diagnostics of a batch as mergeable moments, one packed vector for the whole set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.moments import Moments

PREFIX = "offpolicy/"


class Stat(NamedTuple):
    """One diagnostic: moments that add up, and the function that turns them into the number."""

    moments: Moments
    finalize: Finalizer

    @property
    def value(self) -> Tensor:
        """0-d float64."""
        return self.finalize(self.moments)

    def merge(self, other: Stat) -> Stat:
        """The diagnostic of the union of both samples; nothing is divided before."""
        return Stat(self.moments.merge(other.moments), self.finalize)

    def __float__(self) -> float:
        return float(self.value)


class Group(NamedTuple):
    """Diagnostics that share one set of moments."""

    moments: Moments
    finalizers: Mapping[str, Finalizer]


class Stats(Mapping[str, Stat]):
    """Read-only mapping ``offpolicy/<group>/<quantity>`` -> :class:`Stat` (the prefix may be left out).

    ``groups`` is keyed by ``<group>``, or ``<group>#<part>`` where one group has several sets of moments.

    Example:
        >>> Stats({}).compute()
        {}
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups = dict(groups)

    @cached_property
    def _index(self) -> dict[str, Stat]:
        return {
            f"{PREFIX}{name.partition('#')[0]}/{quantity}": Stat(group.moments, finalize)
            for name, group in self.groups.items()
            for quantity, finalize in group.finalizers.items()
        }

    def __getitem__(self, key: str) -> Stat:
        return self._index[PREFIX + key.removeprefix(PREFIX)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def union(self, other: Stats) -> Stats:
        """Both sets of groups side by side (of the same batch)."""
        return Stats({**self.groups, **other.groups})

    def merge(self, other: Stats) -> Stats:
        """Stats of the union of both samples; a group known to one side only is kept as it is."""
        merged = dict(self.groups)
        for name, group in other.groups.items():
            mine = self.groups.get(name)
            merged[name] = group if mine is None else Group(mine.moments.merge(group.moments), mine.finalizers)
        return Stats(merged)

    def all_reduce(self, gather: Callable[[Tensor], Tensor]) -> Stats:
        """Merge over ranks with one collective.

        Args:
            gather: all-gathers a (N,) float64 tensor to (world * N,) or (world, N), e.g. ``accelerator.gather``.
        """
        if not self.groups:
            return self
        parts = [part for group in self.groups.values() for part in (group.moments.sums, group.moments.maxima)]
        ranks = gather(torch.cat(parts)).view(-1, sum(len(part) for part in parts))
        columns = iter(torch.split(ranks, [len(part) for part in parts], dim=1))
        reduced = {}
        for name, group in self.groups.items():
            sums, maxima = next(columns).sum(0), next(columns).amax(0)
            reduced[name] = Group(Moments(group.moments.layout, sums, maxima), group.finalizers)
        return Stats(reduced)

    def compute(self) -> dict[str, float]:
        """All values as floats, with a single transfer to the host."""
        if not self.groups:
            return {}
        values: list[float] = torch.stack([stat.value for stat in self.values()]).tolist()
        return dict(zip(self, values, strict=True))
