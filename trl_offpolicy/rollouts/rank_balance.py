"""Deals the rows of all ranks anew, so that ranks which learn side by side compute about as many tokens.

At every optimizer step the ranks wait for the one with the longest responses; where the model is sharded, at every
micro-batch. Rows of one optimizer step may change places between ranks without changing what is learned. verl calls
this ``balance_batch``, CompassMax length-aware scheduling (arXiv:2512.07710).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_offpolicy.engines.routing.storage import UNKNOWN
from trl_offpolicy.functional.collective import gather_objects, is_distributed
from trl_offpolicy.rollouts.micro_batches import (
    Splitting,
    columns_of,
    has_image_inputs,
    has_unknown_columns,
    lengths_of,
    taken,
)

Place = tuple[int, int]
"""(rank, row): where a row was before."""


def dealt(costs: Sequence[Sequence[int]], *, size: int, window: int) -> list[list[Place]]:
    """For each rank, the rows that it computes, in order.

    Within a window rows are sorted, the most expensive first, and dealt micro-batch by micro-batch, so that those which
    are computed at the same time hold rows of like cost. Each row goes to the rank that has the least to compute so
    far, among those with room in the micro-batch.

    Args:
        costs: of the rows of each rank; as many on all ranks.
        size: rows of a micro-batch.
        window: micro-batches of a rank whose rows may change places.

    Example:
        >>> dealt([[9, 8], [1, 2]], size=2, window=1)
        [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    """
    count, ranks, plan = len(costs[0]), range(len(costs)), [list[Place]() for _ in costs]
    for start in range(0, count, size * window):
        rows = range(start, min(start + size * window, count))
        places = sorted(((rank, row) for row in rows for rank in ranks), key=lambda at: -costs[at[0]][at[1]])
        totals = [0] * len(costs)
        for number, (owner, row) in enumerate(places):
            full = start + size * (
                number // (size * len(costs)) + 1
            )  # rows of a rank up to the end of this micro-batch
            rank = min((one for one in ranks if len(plan[one]) < full), key=totals.__getitem__)
            plan[rank].append((owner, row))
            totals[rank] += costs[owner][row]
    return plan


def balanced(rows: Mapping[str, Any], parts: int, how: Splitting) -> tuple[Mapping[str, Any], Splitting]:
    """This rank's rows after the ranks have exchanged theirs, sorted, and how to split them.

    Both are as given where ``how`` does not ask for it, and where rows of some rank cannot be moved: with images, or
    with fields of which it is not known what their columns are. All ranks call it.

    Args:
        rows: a generation batch: tensors, or lists, with one entry for each row; None and 0-d tensors stay.
        parts: micro-batches into which it will be split.
        how: how it will be split.
    """
    if not (how.balance and how.sort and is_distributed()):
        return rows, how
    lengths, names = lengths_of(rows), sorted(name for name, value in rows.items() if _is_by_row(value))
    widths = rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]
    movable = len(lengths.prompt) % parts == 0 and not has_image_inputs(rows) and not has_unknown_columns(rows)
    costs = (lengths.prompt + lengths.completion).tolist()
    all_costs, all_widths, all_names, all_movable = zip(*gather_objects((costs, widths, names, movable)), strict=True)
    alike = all(theirs == names for theirs in all_names) and {len(theirs) for theirs in all_costs} == {len(costs)}
    if not (alike and all(all_movable)):
        return rows, how
    plan = dealt(all_costs, size=len(costs) // parts, window=how.window)
    widest = max(prompt for prompt, _ in all_widths), max(completion for _, completion in all_widths)
    mine = {name: _widened(name, rows[name], widths, widest) for name in names}
    return {**rows, **_exchanged(mine, plan)}, replace(how, sort=False, whole_groups=False)


def _is_by_row(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def _widened(name: str, value: Any, old: tuple[int, int], new: tuple[int, int]) -> Any:
    """A field with as many columns as on the rank where they are the widest; the new ones are padding."""
    left, right = new[0] - old[0], new[1] - old[1]
    width, sides = {
        "prompt": (old[0], (left, 0)),
        "completion": (old[1], (0, right)),
        "whole": (sum(old), (left, right)),
    }.get(columns_of(name) or "", (None, (0, 0)))
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != width:
        return value  # one value for each row, also as (B, 1)
    inner = (0, 0) * (value.dim() - 2)
    return pad(value, (*inner, *sides), value=UNKNOWN if columns_of(name) == "whole" else 0)


def _exchanged(mine: Mapping[str, Any], plan: Sequence[Sequence[Place]]) -> dict[str, Any]:
    """This rank's rows by ``plan``, on the device that its own have."""
    here = torch.distributed.get_rank()
    sent = [_on_host(taken(mine, _from(here, places))) for places in plan]  # for each rank, those that it takes
    arrived = [parts[here] for parts in gather_objects(sent)]  # of each rank
    # they lie rank by rank, in this rank's order: where is the next one of each rank?
    starts = [sum(len(part["completion_ids"]) for part in arrived[:rank]) for rank in range(len(arrived))]
    order = []
    for rank, _ in plan[here]:
        order.append(starts[rank])
        starts[rank] += 1

    def joined(name: str, own: Any) -> Any:
        if isinstance(own, list):
            everything = [one for part in arrived for one in part[name]]
            return [everything[at] for at in order]
        return torch.cat([part[name] for part in arrived])[order].to(own.device)

    return {name: joined(name, own) for name, own in mine.items()}


def _from(owner: int, places: Sequence[Place]) -> Tensor:
    return torch.tensor([row for rank, row in places if rank == owner], dtype=torch.long)


def _on_host(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in rows.items()}
