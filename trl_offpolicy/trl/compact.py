"""Micro-batches without padding, and prompts computed once, in the TRL trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from trl_offpolicy.functional.truncated_sampling import KeptIds
from trl_offpolicy.objective.splitting import split_dependence
from trl_offpolicy.presets.frameworks.trl import GLOBAL_TOKEN_LOSSES
from trl_offpolicy.rollouts import compressed_forward
from trl_offpolicy.rollouts.compact import BIT_BY_BIT, NOT_SORTED, NOT_TRIMMED, Columns, CompactScoring, splitting_of
from trl_offpolicy.rollouts.micro_batches import TrimPadding, has_image_inputs, sorts, split_rows
from trl_offpolicy.rollouts.perturbed_forward import NOT_SHARED
from trl_offpolicy.rollouts.rank_balance import balanced
from trl_offpolicy.rollouts.shared_prefix import COMPILED, SharedPrefix, SharePrefix, varying_rope
from trl_offpolicy.trl.exact import wants_exact
from trl_offpolicy.trl.positions import MOVES_TEXT

logger = logging.getLogger(__name__)


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
        moves = MOVES_TEXT if trainer._positions == "wrong" else varying_rope(trainer.model)
        if self._trim is not False and moves is not None:
            logger.warning(NOT_TRIMMED, moves)
            self._trim = False
        share = cast("SharePrefix", args.share_prefix)
        self._shared = SharedPrefix(share, counted=False, drop_padding=sorts(self._trim))
        refused = BIT_BY_BIT if wants_exact(args.engine) else self._why_whole()
        if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version < 2:
            refused = "it is not proved equal under FSDP1 (FSDP2 is)"
        if args.torch_compile:
            refused = COMPILED
        if args.perturbation is not None:
            refused = NOT_SHARED
        if args.learner_kv_cache is not None:
            refused = compressed_forward.NOT_SHARED
        if args.pad_to_multiple_of:
            refused = "pad_to_multiple_of wants widths that a forward of the completions alone does not have"
        models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
        self._shared.prepare(*models, refused=refused)
        if sorts(self._trim) and (reason := self._why_whole()) is not None:
            logger.warning(NOT_SORTED, reason)

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
        how = splitting_of(
            self._shared,
            self._trainer.model,
            trim=self._trim,
            free=self._why_whole() is None,
            window=math.gcd(parts, args.gradient_accumulation_steps),
            multiple=args.pad_to_multiple_of,
        )
        rows, how = balanced(rows, parts, how)
        micro_batches = split_rows(rows, parts, how)
        self._shared.look_at(micro_batches)
        return micro_batches

    def seen(self, rows: Mapping[str, Any]) -> Any:
        """A micro-batch on the host, as :meth:`score` takes it; None if it is not one of the present generation."""
        return self._shared.seen(rows)

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
        kept_ids: Sequence[KeptIds] | None = None,
        seen: Any = None,
        **kwargs: Any,
    ) -> Columns:
        """What ``score`` returns: (B, T) log-probs, (B, T) entropies or None, a 0-d load-balancing loss or None.

        Args:
            score: TRL's scoring ``score(model, ids, mask, T, batch_size, kept_ids=..., **kwargs)``.
            model: the model to score, wrapped or not.
            input_ids: (B, P + T).
            attention_mask: (B, P + T).
            logits_to_keep: T.
            batch_size: rows per forward; None = all, as the loss step wants, in their own columns.
            compact: False where something reads the forwards row by row, in order and in full width.
            kept_ids: what the engine kept at each token of each row; None = not known.
            seen: what :meth:`seen` has of the rows.
            **kwargs: TRL's.
        """
        multiple = self._trainer.args.pad_to_multiple_of
        scoring = CompactScoring(trim=self._trim is not False, shared=self._shared, multiple=multiple)
        in_order = batch_size is None or not scoring.trim or bool(kwargs.get("compute_aux_loss"))
        whole = not compact or has_image_inputs(kwargs)
        if whole or (in_order and not self._shared.possible(model)):
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, kept_ids=kept_ids, **kwargs)

        def forward(model: Any, ids: Tensor, mask: Tensor, length: int, rows: Tensor | None) -> Columns:
            theirs = None if rows is None or kept_ids is None else [kept_ids[i] for i in rows.tolist()]
            return score(model, ids, mask, length, None, kept_ids=theirs, **kwargs)

        rows = model, input_ids, attention_mask, logits_to_keep, batch_size
        return scoring(forward, *rows, in_order=in_order, seen=seen)
