"""Stats: the diagnostics of a batch as mergeable moments, one packed vector for the whole set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.intervals import ClusterRows, half_width_95
from trl_offpolicy.functional.moments import Moments

PREFIX = "offpolicy/"


class Stat(NamedTuple):
    """One diagnostic: moments that add up, and the function that turns them into the number."""

    moments: Moments
    finalize: Finalizer

    @property
    def value(self) -> Tensor:
        """The number itself, 0-d float64, computed from the moments."""
        return self.finalize(self.moments)

    def merge(self, other: Stat) -> Stat:
        """The diagnostic of the union of both samples: moments are added before anything is divided."""
        return Stat(self.moments.merge(other.moments), self.finalize)

    def __float__(self) -> float:
        return float(self.value)


class Group(NamedTuple):
    """Diagnostics that share one set of moments.

    ``rows`` holds the same moments for each response. The diagnostics named in ``intervals`` get their intervals from
    them. A ``sparse`` group is left out of the logged numbers if its sample is empty (its first sum is 0).
    """

    moments: Moments
    finalizers: Mapping[str, Finalizer]
    rows: ClusterRows | None = None
    intervals: tuple[str, ...] = ()
    sparse: bool = False

    def merge(self, other: Group) -> Group:
        """The group of the union of both samples."""
        rows = None if self.rows is None or other.rows is None else self.rows.merge(other.rows)
        return self._replace(moments=self.moments.merge(other.moments), rows=rows)


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
        """Both sets of groups side by side; both must be of the same batch."""
        return Stats({**self.groups, **other.groups})

    def merge(self, other: Stats) -> Stats:
        """Stats of the union of both samples; a group that only one side has is kept as it is."""
        merged = dict(self.groups)
        for name, group in other.groups.items():
            mine = self.groups.get(name)
            merged[name] = group if mine is None else mine.merge(group)
        return Stats(merged)

    def all_reduce(self, gather: Callable[[Tensor], Tensor]) -> Stats:
        """Merge over ranks: one collective for all moments; for the rows of all intervals one before it, and one after.

        Args:
            gather: all-gathers a (N,) float64 tensor to (world * N,) or (world, N), e.g. ``accelerator.gather``.

        Raises:
            RuntimeError: on all ranks: they measured different groups. It is seen if a group has intervals.
        """
        if not self.groups:
            return self
        groups = dict(sorted(self.groups.items()))  # ranks may have met them in another order
        longest = _agreed_length(groups, gather)
        # One vector per rank: sums and maxima of the first group, then of the second, and so on.
        parts = [part for group in groups.values() for part in (group.moments.sums, group.moments.maxima)]
        ranks = gather(torch.cat(parts)).view(-1, sum(len(part) for part in parts))
        columns = iter(torch.split(ranks, [len(part) for part in parts], dim=1))
        reduced = {}
        for name, group in groups.items():
            sums, maxima = next(columns).sum(0), next(columns).amax(0)
            reduced[name] = group._replace(moments=Moments(group.moments.layout, sums, maxima))
        if longest is not None:
            reduced = _gather_rows(reduced, longest, gather)
        return Stats({name: reduced[name] for name in self.groups})

    def measured(self) -> Stats:
        """The stats without those that were not really measured. One transfer to the host, on which the result is.

        A ratio that no token has is left out: a correlation of 0 over nothing would read as a broken engine. So are
        ``kept/*`` where nothing of the mismatch is known, and the weights where nothing of any ratio is, as in a step
        whose responses are all masked. Rows of older weights have no mismatch if they carry no old log-probs.
        """
        if not self.groups:
            return self
        found = _on_host(self.groups).groups
        ratios = [name for name in ("mismatch", "staleness", "total") if name in found]
        counted = [*ratios, *(("noise_floor",) if "noise_floor" in found else ())]
        empty = [name for name in counted if not found[name].moments["tokens"] + found[name].moments["nonfinite"] > 0]
        unmeasured = {*empty, *(("kept",) if "mismatch" in empty else ())}
        if ratios and set(ratios) <= set(empty):
            unmeasured |= {"kept", "weight", "weight_applied"}
        return Stats({name: group for name, group in found.items() if name.partition("#")[0] not in unmeasured})

    def logged(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """What a window logs: the values over all ranks, without those that were not really measured.

        Args:
            gather: as in :meth:`all_reduce`. All ranks call it.
        """
        return self.all_reduce(gather).measured().compute()

    def compute(self) -> dict[str, float]:
        """All values as floats, with one transfer of the moments to the host, then the intervals as ``<key>_ci95``.

        An interval is the half width of the 95 % confidence interval, clustered by prompt group. It is left out if
        there are fewer than two groups.
        """
        if not self.groups:
            return {}
        named, widths = _on_host(self.groups)._values(), {}
        for name, group in self.groups.items():
            if group.rows is None:
                continue
            totals = group.rows.group_totals()
            for quantity in group.intervals:
                width = half_width_95(group.finalizers[quantity], group.rows.layout, totals)
                if width is not None:
                    widths[f"{PREFIX}{name}/{quantity}_ci95"] = width
        return _floats(named) | _floats(widths)

    def _values(self) -> dict[str, Tensor]:
        """The numbers of all groups, 0-d float64, without those of sparse groups that are empty. Waits for a device."""
        return {
            f"{PREFIX}{name.partition('#')[0]}/{quantity}": finalize(group.moments)
            for name, group in self.groups.items()
            if not group.sparse or group.moments.sums[0] != 0
            for quantity, finalize in group.finalizers.items()
        }


def _floats(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    values: list[float] = torch.stack([*numbers.values()]).tolist() if numbers else []
    return dict(zip(numbers, values, strict=True))


def _on_host(groups: Mapping[str, Group]) -> Stats:
    """The groups with all moments on the CPU, by one transfer.

    A thousand operations on single numbers follow, each of which would be a kernel of its own on an accelerator.
    """
    parts = [part for group in groups.values() for part in (group.moments.sums, group.moments.maxima)]
    pieces = iter(torch.split(torch.cat(parts).cpu(), [len(part) for part in parts]))
    return Stats(
        {
            name: group._replace(moments=Moments(group.moments.layout, next(pieces), next(pieces)))
            for name, group in groups.items()
        }
    )


def _agreed_length(groups: dict[str, Group], gather: Callable[[Tensor], Tensor]) -> int | None:
    """Rows of the longest table of any rank, to which all are padded; None if no group has rows, or on one rank.

    A collective needs the same shape from every rank, so ranks first show that they hold the same groups.
    """
    tables = [group.rows.values for group in groups.values() if group.rows is not None]
    if not tables:
        return None
    held = [
        (name, len(one.moments.sums), len(one.moments.maxima), one.rows is not None) for name, one in groups.items()
    ]
    # 48 bits are exact in float64
    signature = int.from_bytes(hashlib.sha256(repr(held).encode()).digest()[:6], "big")
    mine = torch.tensor([signature, max(map(len, tables))], dtype=torch.float64, device=tables[0].device)
    ranks = gather(mine).view(-1, 2)
    if len(ranks) == 1:
        return None  # nothing to add, and nothing to wait for
    signatures, lengths = ranks.T.tolist()
    if any(other != signature for other in signatures):
        raise RuntimeError(
            "All ranks must measure the same groups, but they differ: one has a mask of tool tokens, token ids or lags "
            f"where another has none. This rank has {', '.join(dict.fromkeys(n.partition('#')[0] for n in groups))}."
        )
    return int(max(lengths))


def _gather_rows(groups: dict[str, Group], longest: int, gather: Callable[[Tensor], Tensor]) -> dict[str, Group]:
    """The rows of all ranks, which may hold different numbers of them. A padding row has no tokens and is ignored."""
    tables = {name: group.rows for name, group in groups.items() if group.rows is not None}
    flat = torch.cat([_padded(rows, longest).flatten() for rows in tables.values()])
    ranks = gather(flat).view(-1, len(flat))
    pieces = torch.split(ranks, [longest * (rows.values.shape[1] + 1) for rows in tables.values()], dim=1)
    gathered = dict(groups)
    for (name, rows), piece in zip(tables.items(), pieces, strict=True):
        table = piece.reshape(-1, rows.values.shape[1] + 1)
        ids = None if rows.ids is None else table[:, 0].long()
        gathered[name] = groups[name]._replace(rows=ClusterRows(rows.layout, table[:, 1:], ids))
    return gathered


def _padded(rows: ClusterRows, length: int) -> Tensor:
    """(length, 1 + S) float64: group id (exact up to 2^53) and moments of each row, then rows of zeros."""
    ids = torch.zeros_like(rows.values[:, 0]) if rows.ids is None else rows.ids.to(rows.values.dtype)
    table = torch.cat([ids.unsqueeze(1), rows.values], dim=1)
    return torch.nn.functional.pad(table, (0, 0, 0, length - len(table)))
