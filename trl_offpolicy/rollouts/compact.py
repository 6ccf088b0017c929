"""Scores rows without computing what is not read: padding, and prompts more than once. Both trainers use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.rollouts.micro_batches import (
    Splitting,
    TrimPadding,
    in_first_order,
    lengths_of,
    scoring_chunks,
    sorts,
    used_columns,
)
from trl_offpolicy.rollouts.model_parts import innermost
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix

Columns = tuple[Tensor | None, ...]
"""Scores of rows: (B, T) each, the log-probs first; 0-d for a number of the whole forward."""
Forward = Callable[[Any, Tensor, Tensor, int, Tensor | None], Columns]
"""``forward(model, ids, mask, T, rows)``: scores of the last T tokens of (B, L) ids. ``rows`` (B,), on the host, are
their numbers among all rows, for what belongs to them besides; None = some rows, for a comparison."""

NOT_TRIMMED = "trim_padding keeps every column: %s."
"""The warning where a cut would change log-probs; its argument is the reason."""
NOT_SORTED = "trim_padding cuts micro-batches, but does not sort rows by length: %s."
"""The warning where rows must stay in their micro-batch; its argument is the reason."""
BIT_BY_BIT = "engine.exact compares log-probs bit by bit, which no other order of sums keeps"
"""Why prompts are not computed once for an exact engine."""


def splitting_of(
    shared: SharedPrefix, model: Any, *, trim: TrimPadding, free: bool, window: int, multiple: int | None = None
) -> Splitting:
    """How a generation batch becomes micro-batches.

    Args:
        shared: decides where prompts are computed once; their rows then meet.
        model: the policy.
        trim: the option of this name.
        free: whether rows may leave the micro-batch that they are drawn into.
        window: see :class:`~trl_offpolicy.rollouts.micro_batches.Splitting`, as ``multiple``.
        multiple: widths are multiples of it; None = any.
    """
    groups = shared.mode if free and shared.possible(model) else False
    return Splitting(
        window=window,
        trim=trim is not False,
        sort=free and (sorts(trim) or groups is True),  # "auto" moves no rows that trim_padding leaves in their order
        whole_groups=groups,
        multiple=multiple,
        balance=free and trim == "ranks",
    )


class CompactScoring:
    """Decides for the rows of one scoring which of them share a forward, and how each forward is computed.

    Args:
        trim: whether rows that are scored in several forwards are sorted by length, each forward in its own width.
        shared: decides where prompts are computed once.
        multiple: widths are multiples of it (``pad_to_multiple_of``), as far as the rows are wide enough; None = any.
    """

    def __init__(self, *, trim: bool, shared: SharedPrefix, multiple: int | None = None) -> None:
        self.trim = trim
        self.shared = shared
        self.multiple = multiple

    def __call__(
        self,
        forward: Forward,
        model: Any,
        ids: Tensor,
        mask: Tensor,
        length: int,
        size: int | None = None,
        *,
        in_order: bool = False,
        seen: Any = None,
    ) -> Columns:
        """The columns of ``forward`` for all rows, in their order. Right of a forward's own width they hold 0.

        Args:
            forward: scores the rows of one forward.
            model: the model, wrapped or not.
            ids: (B, P + T) prompts, padded on the left, and completions, padded on the right.
            mask: (B, P + T).
            length: T.
            size: rows per forward; None = all, in the columns that they have (the loss step).
            in_order: rows meet in a forward as they come, in their full width.
            seen: all rows on the host, for a single forward of them
                (:meth:`~trl_offpolicy.rollouts.shared_prefix.SharedPrefix.seen`); None = unknown.
        """
        width, size = ids.shape[1] - length, size or len(ids)
        if in_order or not self.trim or size >= len(ids):
            chunks, cut = list(torch.split(torch.arange(len(ids)), size)), False
        else:
            rows = {"prompt_ids": ids[:, :width], "prompt_mask": mask[:, :width], "completion_mask": mask[:, width:]}
            groups = self.shared.mode if self.shared.possible(model) else False
            chunks, cut = scoring_chunks(lengths_of(rows), size, whole_groups=groups), True
        parts = []
        for rows_here in chunks:
            own_ids, own_mask = (ids, mask) if len(chunks) == 1 else (ids[rows_here], mask[rows_here])
            kept = used_columns(own_mask, width, multiple=self.multiple) if cut else slice(0, ids.shape[1])
            own = own_ids[:, kept], own_mask[:, kept]
            known = seen if len(chunks) == 1 and not cut else None
            parts.append(self._forward(forward, model, *own, width - kept.start, rows_here, known))
        return parts[0] if len(parts) == 1 and not cut else _joined(parts, chunks, length)

    def _forward(
        self, forward: Forward, model: Any, ids: Tensor, mask: Tensor, width: int, rows: Tensor, seen: Any
    ) -> Columns:
        """One forward, in which prompts are computed once if that pays."""
        length = ids.shape[1] - width
        prompts = self.shared.prompts(model, ids, mask, width, seen) if width else None
        if prompts is None:
            return forward(model, ids, mask, length, rows)

        def logps(ids: Tensor, mask: Tensor, context: AbstractContextManager[None] | None) -> Tensor:
            with context or nullcontext():
                found = forward(innermost(model), ids, mask, length, None)[0]
            assert found is not None
            return found

        if not self.shared.proved(model, prompts, ids, mask, logps):
            return forward(model, ids, mask, length, rows)
        with self.shared.context(model, prompts):
            return forward(model, ids[:, width - 1 :], mask[:, width - 1 :], length, rows)


def _joined(parts: Sequence[Columns], chunks: Sequence[Tensor], length: int) -> Columns:
    def join(column: tuple[Tensor | None, ...]) -> Tensor | None:
        found = [value for value in column if value is not None]
        if not found:
            return None
        return torch.stack(found).mean() if found[0].dim() == 0 else in_first_order(found, chunks, length)

    return tuple(join(column) for column in zip(*parts, strict=True))
