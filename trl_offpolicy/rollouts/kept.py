"""Replay of the sampling mask: the trainer renormalises over exactly the tokens that the engine kept.

The kept ids travel with the rows of a batch as ``kept_ids``, a list with one
:class:`~trl_offpolicy.functional.truncated_sampling.KeptIds` for each row, on the host. A position that lists none is
cut by the trainer's own rule.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation
from trl_offpolicy.objective.measure import kept_ids_stats
from trl_offpolicy.stats import Stats

logger = logging.getLogger(__name__)

KEY = "kept_ids"


def announce(truncation: Truncation, *, reason: str | None) -> None:
    """Say once how the trainer's distribution is cut.

    Args:
        truncation: how the engine cuts its own.
        reason: why the engine's kept ids are not replayed; None = they are.
    """
    how = (
        "the engine reports which tokens it kept, and the trainer renormalises over exactly these (replay of the "
        "sampling mask)"
        if reason is None
        else f"the trainer cuts its own by the same rules, because the engine's kept tokens are not known ({reason})"
    )
    logger.warning(
        "The sampler truncates its distribution (%s): %s. Log-probs, ratios and entropies are of the kept tokens; the "
        "reference model stays whole.",
        truncation,
        how,
    )


def checked(kept: KeptIds | None, ids: Sequence[int], row: int) -> KeptIds:
    """The kept ids of a row, as many positions as tokens; none listed where the engine did not report.

    Args:
        kept: what the engine reported; None = nothing.
        ids: tokens of the completion.
        row: its number, for the message.

    Raises:
        ValueError: they are those of another completion: another number of positions, or a sampled token is not among
            its own kept ids.
    """
    if kept is None:
        return KeptIds.unreported(len(ids))
    if len(kept) != len(ids):
        raise ValueError(f"sampling_mask must have {len(ids)} positions for completion {row}, but got {len(kept)}.")
    place = torch.repeat_interleave(torch.arange(len(ids)), kept.counts)
    own = torch.tensor(list(ids), dtype=torch.int32)[place] == kept.ids
    found = torch.zeros(len(ids), dtype=torch.int32).index_add_(0, place, own.int())
    lost = ((found == 0) & (kept.counts > 0)).nonzero()
    if len(lost):
        at = int(lost[0])
        raise ValueError(
            f"sampling_mask must hold the token that was sampled, but token {at} of completion {row} is {ids[at]}, and "
            f"the engine kept {int(kept.counts[at])} others there: the masks are those of other tokens."
        )
    return kept


def collated(masks: Sequence[KeptIds | None] | None, completion_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The field of a generation batch with the kept ids of its rows; empty if the engine does not report any.

    Args:
        masks: ``Rollouts.sampling_mask``.
        completion_ids: tokens of each completion, those of tools among them.

    Raises:
        ValueError: as :func:`checked`.
    """
    if masks is None:
        return {}
    pairs = zip(masks, completion_ids, strict=True)
    return {KEY: [checked(kept, ids, row) for row, (kept, ids) in enumerate(pairs)]}


def placed(rows: Sequence[KeptIds], length: int) -> KeptIds:
    """The kept ids at (B, T) positions, row after row. Padding, whose log-prob nobody reads, keeps one token.

    Args:
        rows: of each row.
        length: T; what a row has beyond it is dropped.
    """
    filler = KeptIds.alone([0] * length)
    return KeptIds.joined([part for row in rows for part in (row[:length], filler[: max(length - len(row), 0)])])


def kept_stats(rows: Mapping[str, Any], mask: Tensor) -> Stats:
    """``rollout/kept_ids_mean`` and ``rollout/recomputed_cut_fraction``; empty if the rows have no kept ids.

    Args:
        rows: a batch.
        mask: (B, T) bool: trainable tokens.
    """
    kept = rows.get(KEY)
    if kept is None:
        return Stats({})
    counts = torch.zeros(mask.shape, dtype=torch.int32)
    for row, of_row in zip(counts, kept, strict=True):
        length = min(len(of_row), len(row))
        row[:length] = of_row.counts[:length]
    return kept_ids_stats(counts.to(mask.device), mask)
