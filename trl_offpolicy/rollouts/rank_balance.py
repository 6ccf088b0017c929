"""Deals the rows of all ranks anew, so that ranks which learn side by side compute about as many tokens.

At every optimizer step the ranks wait for the one with the longest responses; where the model is sharded, at every
micro-batch. Rows of one optimizer step may change places between ranks without changing what is learned. verl calls
this ``balance_batch``, CompassMax length-aware scheduling (arXiv:2512.07710).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_offpolicy.engines.routing.storage import UNKNOWN
from trl_offpolicy.functional.collective import exchange_objects, gather_objects, is_distributed
from trl_offpolicy.rollouts.micro_batches import (
    Lengths,
    Splitting,
    columns_of,
    has_image_inputs,
    has_unknown_columns,
    lengths_of,
    ordered,
    padded_tokens,
    taken,
    trimmed,
)

Place = tuple[int, int]
"""(rank, row): where a row was before."""


def balanced(rows: Mapping[str, Any], parts: int, how: Splitting) -> tuple[Mapping[str, Any], Splitting]:
    """This rank's rows after the ranks have exchanged theirs, sorted, and how to split them.

    Both are as given where ``how`` does not ask for it, where the rank that computes the most would not compute less,
    and where rows of some rank cannot be moved: with images, or with fields of which it is not known what belongs to
    a row. All ranks call it.

    Args:
        rows: a generation batch: tensors, or lists, with one entry for each row; None and 0-d tensors stay.
        parts: micro-batches into which it will be split.
        how: how it will be split.
    """
    if not (how.balance and how.sort and is_distributed()):
        return rows, how
    size = len(rows["completion_ids"]) // parts
    told = gather_objects(_told(rows, parts, how))
    if told[0].fields is None or any(one.fields != told[0].fields for one in told):
        return rows, how
    lengths = [Lengths(*map(torch.tensor, one.lengths)) for one in told]
    plans = [dealt(lengths, by, size=size, window=how.window) for by in ("total", "completion", "prompt")]
    tokens = [_most([_tokens(_dealt_lengths(lengths, own), size, how) for own in plan]) for plan in plans]
    if min(tokens) >= _most([one.tokens for one in told]):
        return rows, how
    plan = plans[tokens.index(min(tokens))]
    return {**rows, **_exchanged(rows, plan, how.multiple)}, replace(how, sort=False, whole_groups=False)


# ----------------------------------------------------------------------------------------------------------- the plan


def dealt(
    lengths: Sequence[Lengths], by: Literal["total", "completion", "prompt"], *, size: int, window: int
) -> list[list[Place]]:
    """For each rank, the rows that it computes, in order.

    Within a window rows are sorted, the longest first, and dealt micro-batch by micro-batch, so that those which are
    computed at the same time hold rows of like length. Each row goes to the rank that has the least tokens so far,
    among those with room in the micro-batch.

    Args:
        lengths: of the rows of each rank; as many on all ranks.
        by: by which length they are sorted.
        size: rows of a micro-batch.
        window: micro-batches of a rank whose rows may change places.
    """
    count, ranks, plan = len(lengths[0].prompt), range(len(lengths)), [list[Place]() for _ in lengths]
    total = [(own.prompt + own.completion).tolist() for own in lengths]
    keys = total if by == "total" else [getattr(own, by).tolist() for own in lengths]
    for start in range(0, count, size * window):
        rows = range(start, min(start + size * window, count))
        places = sorted(((rank, row) for row in rows for rank in ranks), key=lambda at: -keys[at[0]][at[1]])
        tokens = [0] * len(lengths)
        for number, (owner, row) in enumerate(places):
            full = start + size * (number // (size * len(lengths)) + 1)  # a rank's rows when this micro-batch is full
            rank = min((one for one in ranks if len(plan[one]) < full), key=tokens.__getitem__)
            plan[rank].append((owner, row))
            tokens[rank] += total[owner][row]
    return plan


class _Told(NamedTuple):
    """What a rank says of its rows.

    Args:
        lengths: prompt tokens and completion tokens of each row, and its number.
        tokens: what the rank would compute in each window with its own rows.
        fields: what must be the same on all ranks: the number of rows, and of each field that goes along its name,
            dtype, dimensions and what its columns are. None = the rows cannot move.
    """

    lengths: tuple[list[int], list[int], list[int]]
    tokens: list[int]
    fields: tuple[Any, ...] | None


def _told(rows: Mapping[str, Any], parts: int, how: Splitting) -> _Told:
    lengths, count = lengths_of(rows), len(rows["completion_ids"])
    size = count // parts
    own = lengths.rows(ordered(lengths, size, how)) if count == size * parts else lengths
    are_rows = all(value is None or isinstance(value, Tensor | list) for value in rows.values())
    moves = count == size * parts and are_rows and not has_image_inputs(rows) and not has_unknown_columns(rows)
    fields = sorted(_field(name, rows[name], columns) for name, columns in _columns(rows).items()) if moves else []
    return _Told(
        lengths=(lengths.prompt.tolist(), lengths.completion.tolist(), list(range(count))),
        tokens=_tokens(own, size, how, once=bool(how.whole_groups)),
        fields=(count, *fields) if moves else None,
    )


def _tokens(lengths: Lengths, size: int, how: Splitting, *, once: bool = False) -> list[int]:
    """Tokens that a rank computes in each window, with its rows in this order."""
    windows = zip(*(torch.split(column, size * how.window) for column in lengths), strict=True)
    return [padded_tokens(Lengths(*window), size, once=once) for window in windows]


def _most(tokens: Sequence[Sequence[int]]) -> int:
    """Tokens of the rank that all wait for, over all windows."""
    return sum(map(max, zip(*tokens, strict=True)))


def _dealt_lengths(lengths: Sequence[Lengths], places: Sequence[Place]) -> Lengths:
    prompt, completion = (torch.stack([one[column] for one in lengths]) for column in range(2))
    ranks, rows = torch.tensor(places).T
    groups = torch.arange(len(places))  # no prompt counts as shared
    return Lengths(prompt[ranks, rows], completion[ranks, rows], groups)


# ------------------------------------------------------------------------------------------------------- the exchange


def _columns(rows: Mapping[str, Any]) -> dict[str, str]:
    """The fields with an entry for each row, and what their columns are; "" = a value for each row, also as (B, 1)."""
    prompt, completion = rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]
    widths = {"prompt": prompt, "completion": completion, "whole": prompt + completion}

    def of(name: str, value: Any) -> str:
        kind = columns_of(name)
        wide = kind is not None and isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == widths[kind]
        return str(kind) if wide else ""

    by_row = {name: value for name, value in rows.items() if isinstance(value, list) or _has_rows(value)}
    return {name: of(name, value) for name, value in by_row.items()}


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _field(name: str, value: Any, columns: str) -> tuple[Any, ...]:
    if isinstance(value, list):
        return name, "list"
    return name, str(value.dtype), tuple(value.shape[2 if columns else 1 :]), columns


def _exchanged(rows: Mapping[str, Any], plan: Sequence[Sequence[Place]], multiple: int | None) -> dict[str, Any]:
    """This rank's rows by ``plan``, on the device that its own have; widths are multiples of ``multiple``."""
    here, columns = torch.distributed.get_rank(), _columns(rows)
    mine = {name: rows[name] for name in columns}
    sent = [_sent(mine, [row for rank, row in places if rank == here], multiple) for places in plan]
    arrived = exchange_objects(sent)  # of each rank, those that this one takes
    filled = [part for part in arrived if len(part["completion_ids"])]
    widest = (
        max(part["prompt_ids"].shape[1] for part in filled),
        max(part["completion_ids"].shape[1] for part in filled),
    )
    # they lie rank by rank, each in this rank's order: where is the next one of each rank?
    starts = [sum(len(part["completion_ids"]) for part in arrived[:rank]) for rank in range(len(arrived))]
    order = []
    for rank, _ in plan[here]:
        order.append(starts[rank])
        starts[rank] += 1

    def joined(name: str, own: Any) -> Any:
        if isinstance(own, list):
            everything = [one for part in arrived for one in part[name]]
            return [everything[at] for at in order]
        parts = [_widened(part, name, columns[name], widest) for part in filled]
        return torch.cat(parts)[order].to(own.device)

    return {name: joined(name, own) for name, own in mine.items()}


def _sent(rows: Mapping[str, Any], index: list[int], multiple: int | None) -> dict[str, Any]:
    """Some rows on the host, without columns that all of them leave empty."""
    part = taken(rows, torch.tensor(index, dtype=torch.long))
    part = trimmed(part, multiple=multiple) if index else part
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in part.items()}


def _widened(part: Mapping[str, Any], name: str, columns: str, widest: tuple[int, int]) -> Tensor:
    """A field with as many columns as the widest part has; the new ones are padding."""
    value: Tensor = part[name]
    left, right = widest[0] - part["prompt_ids"].shape[1], widest[1] - part["completion_ids"].shape[1]
    if not columns:
        return value
    if name == "policy_versions":  # padding repeats a row's last version
        return torch.cat([value, value[:, -1:].expand(-1, right)], 1)
    sides = {"prompt": (left, 0), "completion": (0, right), "whole": (left, right)}[columns]
    return pad(value, (*(0, 0) * (value.dim() - 2), *sides), value=UNKNOWN if columns == "whole" else 0)
