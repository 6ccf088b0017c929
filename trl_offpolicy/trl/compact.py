"""Micro-batches without padding, and prompts computed once, in the TRL trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from trl_offpolicy.objective.splitting import split_dependence
from trl_offpolicy.presets.frameworks.trl import GLOBAL_TOKEN_LOSSES
from trl_offpolicy.rollouts.micro_batches import (
    Splitting,
    TrimPadding,
    has_images,
    in_first_order,
    lengths_of,
    scoring_chunks,
    split_rows,
    used_columns,
)
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix, SharePrefix
from trl_offpolicy.trl.exact import wants_exact
from trl_offpolicy.trl.rebinding import innermost

logger = logging.getLogger(__name__)

Columns = tuple[Tensor, Tensor | None, Tensor | None]
"""What TRL's scoring returns: (B, T) log-probs, (B, T) entropies, 0-d load-balancing loss."""


class CompactRows:
    """Splits a trainer's generation batches and scores its rows, without padding where that changes nothing.

    Args:
        trainer: the built trainer.

    Raises:
        ValueError: ``share_prefix`` is true, but refused.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self._trainer = trainer
        self._trim: TrimPadding = args.trim_padding
        self._shared = SharedPrefix(cast("SharePrefix", args.share_prefix), counted=False)
        exact = "engine.exact compares log-probs bit by bit, which no other order of sums keeps"
        self._shared.prepare(trainer.model, refused=exact if wants_exact(args.engine) else self._why_whole())
        if self._trim is True and (reason := self._why_whole()) is not None:
            logger.warning("trim_padding cuts micro-batches, but does not sort rows by length: %s.", reason)

    def _why_whole(self) -> str | None:
        """Why rows must stay in the micro-batch that they are drawn into."""
        trainer = self._trainer
        return split_dependence(
            trainer.objective,
            by_token=trainer.loss_type in GLOBAL_TOKEN_LOSSES,
            has_entropy_bonus=trainer._entropy_bonus_enabled or trainer.use_adaptive_entropy,
            top_entropy=trainer.top_entropy_quantile < 1.0,
            aux_loss=trainer.aux_loss_enabled,
        )

    def split(self, rows: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        """TRL's ``split_tensor_dict`` for a shuffled generation batch.

        An optimizer step may begin within a generation batch, but only at a multiple of the greatest common divisor.
        """
        args = self._trainer.args
        free = self._why_whole() is None
        groups = self._shared.mode if free and self._shared.possible(self._trainer.model) else False
        how = Splitting(
            window=math.gcd(parts, args.gradient_accumulation_steps),
            trim=self._trim is not False,
            sort=free and (self._trim is True or groups is True),
            whole_groups=groups,
            multiple=args.pad_to_multiple_of,
        )
        return split_rows(rows, parts, how)

    def score(
        self,
        score: Callable[..., Columns],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *,
        compact: bool = True,
        **kwargs: Any,
    ) -> Columns:
        """What ``score`` returns.

        Args:
            score: TRL's scoring ``score(model, ids, mask, T, batch_size, **kwargs)``.
            model: the model to score, wrapped or not.
            input_ids: (B, P + T).
            attention_mask: (B, P + T).
            logits_to_keep: T.
            batch_size: rows per forward; None = all, as the loss step wants, in their own columns.
            compact: False where something reads the forwards row by row, in order and in full width.
            **kwargs: TRL's.
        """
        width = input_ids.shape[1] - logits_to_keep
        if not compact or has_images(kwargs) or width < 1:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        if batch_size is None or self._trim is False or kwargs.get("compute_aux_loss"):
            size = len(input_ids) if batch_size is None else batch_size
            parts = [
                self._forward(score, model, ids, mask, width, **kwargs)
                for ids, mask in zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True)
            ]
            return _joined(parts, lambda columns: torch.cat(columns))
        lengths = lengths_of(
            {"prompt_ids": input_ids[:, :width], "prompt_mask": attention_mask[:, :width],
             "completion_mask": attention_mask[:, width:]}
        )  # fmt: skip
        groups = self._shared.mode if self._shared.possible(model) else False
        chunks, parts = scoring_chunks(lengths, batch_size, whole_groups=groups), []
        for rows in chunks:
            ids, mask = input_ids[rows], attention_mask[rows]
            kept = used_columns(mask, width)
            parts.append(self._forward(score, model, ids[:, kept], mask[:, kept], width - kept.start, **kwargs))
        return _joined(parts, lambda columns: in_first_order(columns, chunks, logits_to_keep))

    def _forward(
        self, score: Callable[..., Columns], model: Any, ids: Tensor, mask: Tensor, width: int, **kwargs: Any
    ) -> Columns:
        """One forward, in which prompts are computed once if that pays."""
        length = ids.shape[1] - width
        prompts = self._shared.prompts(model, ids[:, :width], mask[:, :width], length)
        if prompts is None:
            return score(model, ids, mask, length, None, **kwargs)

        def plain_score(ids: Tensor, mask: Tensor, context: AbstractContextManager[None] | None) -> Tensor:
            with context or nullcontext():
                return score(innermost(model), ids, mask, length, None)[0]

        if not self._shared.proved(model, prompts, ids, mask, plain_score):
            return score(model, ids, mask, length, None, **kwargs)
        with self._shared.context(model, prompts):
            return score(model, ids[:, width - 1 :], mask[:, width - 1 :], length, None, **kwargs)


def _joined(parts: list[Columns], join: Callable[[list[Tensor]], Tensor]) -> Columns:
    logps = join([part[0] for part in parts])
    entropies = None if parts[0][1] is None else join([cast("Tensor", part[1]) for part in parts])
    losses = [part[2] for part in parts if part[2] is not None]
    return logps, entropies, torch.stack(losses).mean() if losses else None
