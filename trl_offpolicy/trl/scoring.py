"""Scores with TRL's forward and, in the place of its fused LM head, this kit's.

TRL's head gives log-probs of the whole distribution. Under top-p, top-k or min-p the engine's log-probs are of the kept
tokens alone, so old/sampling would be off by the kept mass. Here the trainer truncates its distribution by the engine's
rules. Without a truncation this kit's head gives TRL's numbers with less memory, and projects no prompt
(``tiled_head``). Everything around the projection remains TRL's: the wrapped model's forward, gathering of a sharded
head, autocast. The same head scores the probe of a sync at temperature 1. Both heads also give the sum of squared
probabilities if it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head, maybe_gather_lm_head_ctx

from trl_offpolicy.engines.truncation import as_vllm_keeps, truncation_of
from trl_offpolicy.functional.truncated_head import TruncatedLogProbs, truncated_log_probs
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation
from trl_offpolicy.objective.measure import support_stats
from trl_offpolicy.rollouts.kept import placed
from trl_offpolicy.rollouts.model_parts import innermost
from trl_offpolicy.stats import Stats
from trl_offpolicy.trl.exact import wants_exact
from trl_offpolicy.trl.rebinding import rebound


class FilteredScoring:
    """Wraps TRL's ``_get_per_token_logps_and_entropies``.

    The current and the old policy are scored on the truncated distribution. The reference model stays whole: with ref
    over all tokens and pi over the kept ones S, E[log pi - log ref] is KL(pi || ref_S) - log ref(S), whose gradient is
    that of KL(pi || ref_S) (ref_S: ref renormalised on S); k3 gives ref(S) times the gradient of KL(ref_S || pi). A
    reference cut by its own filter would have another support: there the KL is infinite and its estimators biased.

    Args:
        truncation: the engine's truncation.
        tiled: whether this kit's head also scores what is not truncated; "auto": where TRL has no Triton kernels.
    """

    def __init__(self, truncation: Truncation, *, tiled: bool | Literal["auto"] = False) -> None:
        self.truncation = truncation
        self._tiled = tiled
        self._outside: Tensor | None = None
        self._whole = False

    def __call__(
        self,
        score: Callable[..., Any],
        reference: Any,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *,
        kept_ids: Sequence[KeptIds] | None = None,
        **kwargs: Any,
    ) -> Any:
        """What ``score`` returns: (log-probs (B, T), entropies, auxiliary loss).

        Args:
            score: TRL's bound method.
            reference: TRL's ``ref_model``, which is scored without truncation.
            model: the model to score, wrapped or not.
            input_ids: (B, L) prompt and completion.
            attention_mask: (B, L).
            logits_to_keep: T.
            batch_size: rows per forward; None = all.
            kept_ids: what the engine kept at each token of each row; where it is known it replaces the filter.
            **kwargs: TRL's keyword arguments.

        Raises:
            NotImplementedError: a prompt-learning adapter.
            RuntimeError: TRL's forward did not use the head.
        """
        arguments = (model, input_ids, attention_mask, logits_to_keep, batch_size)
        truncation = self.truncation
        if self._whole or scores_reference(model, reference):
            truncation, kept_ids = Truncation(), None
        cuts = bool(truncation) or kept_ids is not None
        if cuts and _learns_prompts(model):
            raise NotImplementedError("top_p, top_k and min_p must be neutral with a prompt-learning adapter.")
        if not cuts and (not self._takes(input_ids.device) or _learns_prompts(model)):
            return score(*arguments, **kwargs)
        valid = _scored_positions(attention_mask, logits_to_keep)
        size = batch_size or len(input_ids)
        kept = None if kept_ids is None else _kept_in_parts(kept_ids, valid[:, -logits_to_keep:], size)
        head = _Head(truncation, valid, kept, size)
        with _head_of_trl(head):
            result = score(*arguments, **kwargs)
        if cuts:
            self._outside = head.outside()[:, -logits_to_keep:]
        return result

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which every model is scored without truncation, as the reference is."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def _takes(self, device: torch.device) -> bool:
        """True if this kit's head scores a distribution that is not truncated."""
        return self._tiled if isinstance(self._tiled, bool) else not utils._use_triton(device)

    def stats(self, mask: Tensor) -> Stats:
        """``rollout/outside_fraction``: share of the sampled tokens that the trainer, scoring last, would have cut.

        Args:
            mask: (B, T) bool: trainable tokens.
        """
        if self._outside is None:
            return Stats({})
        return support_stats(self._outside, mask)


def filtered_scoring(args: Any, *, sampled_elsewhere: bool = False) -> FilteredScoring:
    """The scoring that fits the sampling options of a ``GRPOConfig``.

    Args:
        args: the configuration.
        sampled_elsewhere: True with a ``rollout_func`` and no vLLM: how it samples is not known, and nothing is cut.

    Raises:
        ValueError: an option is out of range, or the engine reports raw log-probs.
    """
    options = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "generation_kwargs")}
    truncation = truncation_of(options)
    if args.use_vllm:
        truncation = as_vllm_keeps(truncation)
    engine = args.engine if isinstance(args.engine, Mapping) else {}
    mode = engine.get("logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        raise ValueError(
            f"engine.logprobs_mode must be 'processed_logprobs' (of the distribution sampled from), but got {mode!r}."
        )
    tiled = args.tiled_head
    if tiled == "auto" and wants_exact(args.engine):
        tiled = False  # log-probs are compared with the engine's bit by bit
    known = not sampled_elsewhere or args.use_vllm
    return FilteredScoring(truncation if known else Truncation(), tiled=tiled)


def scores_reference(model: Any, reference: Any) -> bool:
    """True if ``model`` is now the reference: TRL's ``ref_model``, or a PEFT model without its adapter.

    TRL switches the adapter off, or to a frozen copy named "ref", while it scores the reference.
    """
    if reference is not None and model is reference:
        return True
    inner = innermost(model)
    return bool(getattr(inner, "_adapters_disabled", False)) or getattr(inner, "active_adapter", None) == "ref"


def _learns_prompts(model: Any) -> bool:
    """True if virtual tokens are put before the prompt, so that the positions of the head are not those of the mask.

    Images leave them alone: their tokens are part of the prompt's ids before the forward.
    """
    config = getattr(innermost(model), "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def _scored_positions(attention_mask: Tensor, logits_to_keep: int) -> Tensor:
    """(B, L - 1) bool: where TRL's head has a label."""
    valid = attention_mask[:, 1:].bool()
    scored = torch.arange(valid.shape[1], device=valid.device) >= valid.shape[1] - logits_to_keep
    return valid & scored


def _kept_in_parts(rows: Sequence[KeptIds], valid: Tensor, size: int) -> list[KeptIds]:
    """The kept ids at the scored positions, (B, T) bool, of each forward of ``size`` rows."""
    return [
        placed(rows[start : start + size], valid.shape[1]).at(part.flatten())
        for start, part in zip(range(0, len(rows), size), torch.split(valid.cpu(), size), strict=True)
    ]


class _Head:
    """Replaces TRL's ``_ChunkedLogProbFunction`` during one scoring; called once per forward, in row order."""

    def __init__(
        self,
        truncation: Truncation,
        valid: Tensor,
        kept_ids: Sequence[KeptIds] | None,
        batch_size: int,
        temperature: float | None = None,
    ) -> None:
        self.truncation = truncation
        self.temperature = temperature  # None = the one that TRL passes
        self._valid = torch.split(valid, batch_size)
        self._kept = [None] * len(self._valid) if kept_ids is None else kept_ids
        self._outside: list[Tensor] = []

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """TRL's outputs (log_probs, entropy, log_sum_sq_probs, None, None) of all positions that TRL passes."""
        call = len(self._outside)
        if call == len(self._valid):
            raise RuntimeError(
                f"TRL's head was called more than {call} times in one scoring; its version does not fit."
            )
        valid, kept = self._valid[call], self._kept[call]
        # Without Triton TRL passes all positions, with it only those with a label.
        rows = valid.flatten().nonzero().squeeze(1) if len(targets) == valid.numel() else None
        count = len(targets)
        if rows is not None:
            hidden, targets = hidden[rows], targets[rows]
        out = truncated_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature if self.temperature is None else self.temperature,
            truncation=self.truncation,
            kept_ids=kept,
            logit_scale=logit_scale,
            softcap=softcap,
            gather=maybe_gather_lm_head_ctx,
        )
        # one flag for each scored position, back to its place in (b, L - 1)
        self._outside.append(torch.zeros_like(valid).masked_scatter(valid, out.outside))
        return _as_trl(out, outputs, count, rows)

    def outside(self) -> Tensor:
        """(B, L - 1) bool: sampled tokens that the trainer alone would have cut."""
        if len(self._outside) != len(self._valid):
            raise RuntimeError(
                f"TRL's fused head must be called {len(self._valid)} times in this scoring, but was called "
                f"{len(self._outside)} times: the model's forward is not the one TRL patched."
            )
        return torch.cat(self._outside)


def _as_trl(
    out: TruncatedLogProbs, outputs: tuple[str, ...], count: int, rows: Tensor | None
) -> tuple[Tensor | None, ...]:
    if unknown := {"mean_logits", "is_top1"} & set(outputs):
        raise NotImplementedError(f"outputs must not hold {sorted(unknown)} with this kit's head.")

    def placed(column: Tensor) -> Tensor:
        """On all positions that TRL passed, 0 where there is no label."""
        return column if rows is None else column.new_zeros(count).index_copy(0, rows, column)

    entropy = placed(out.entropies) if "entropy" in outputs else None
    log_sum_sq = placed(out.sum_sq_probs.log()) if "log_sum_sq_probs" in outputs else None
    return placed(out.log_probs), entropy, log_sum_sq, None, None


def _head_of_trl(head: _Head) -> AbstractContextManager[None]:
    """Replace the projection in TRL's module, where its forward looks it up at every call. Wrappers are untouched."""
    return rebound(utils, _ChunkedLogProbFunction=head)


@torch.no_grad()
def sequence_logps(trainer: GRPOTrainer, ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs (nats, temperature 1, nothing cut) of tokens 1, 2, ... of each sequence. All ranks call it.

    TRL's whole forward, one row at a time, so that nothing is padded.
    """
    scores, checkpointing = [], trainer.args.gradient_checkpointing_kwargs
    for row in ids:
        tokens = torch.tensor([row], device=trainer.accelerator.device)
        mask, length = torch.ones_like(tokens), len(row) - 1
        head = _Head(Truncation(), _scored_positions(mask, length), None, 1, temperature=1.0)
        with disable_gradient_checkpointing(trainer.model, checkpointing), _head_of_trl(head):
            # TRL's own method: a subclass's would cut the distribution
            logps = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, tokens, mask, length)[0]
        scores.append(logps[0].tolist())
    return scores


class SumSqProbs:
    """Collects sum_v pi_v^2 of the forwards inside :func:`sum_sq_probs`."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, log_values: Tensor) -> None:
        """One forward's (b, L - 1) logs."""
        self._parts.append(log_values)

    def completions(self, length: int) -> Tensor | None:
        """(B, length) float32 of the last positions, rows in the order of the forwards; None if none was asked for."""
        return torch.cat([part[:, -length:] for part in self._parts]).float().exp() if self._parts else None


@contextmanager
def sum_sq_probs(model: Any, *, wanted: bool, temperature: float, cast_lm_head_to_fp32: bool) -> Iterator[SumSqProbs]:
    """A context in which the fused head of ``model`` also computes the sum over the vocabulary of p^2.

    TRL's scoring drops everything but log-probs and entropies, so the output is read from the model's ``forward`` (a
    module hook would not fire under PEFT, which calls ``forward`` itself). Outside the context nothing costs more.

    Args:
        model: the unwrapped model; TRL has patched its ``forward``, or that of the base model under PEFT.
        wanted: False changes nothing.
        temperature: temperature of TRL's head.
        cast_lm_head_to_fp32: as in TRL's configuration.
    """
    collected = SumSqProbs()
    if not wanted:
        yield collected
        return
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    patched = model.forward
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, ("log_probs", "entropy", "log_sum_sq_probs"))
    with_sums = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = with_sums(*args, **kwargs)
        if kwargs.get("fused_lm_head"):
            collected.add(output.log_sum_sq_probs.detach())
        return output

    model.forward = forward
    try:
        yield collected
    finally:
        model.forward = patched
