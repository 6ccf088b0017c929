"""Log-probs of given tokens under the trainer's model: one forward, and a head that never holds the (tokens, V) logits.

The Lightning trainer scores with it, and both trainers use the measurements here. TRL has its own forward and fused
head, which :mod:`trl_offpolicy.trl.scoring` uses. An engine's ``score`` gives the engine's log-probs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from trl_offpolicy.correction.measure import noise_floor
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.images import model_inputs
from trl_offpolicy.engines.truncation import as_vllm_keeps
from trl_offpolicy.functional.truncated_head import TruncatedLogProbs, truncated_log_probs
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation
from trl_offpolicy.objective.measure import support_stats
from trl_offpolicy.rollouts.batches import in_other_batches
from trl_offpolicy.rollouts.compact import CompactScoring
from trl_offpolicy.rollouts.kept import KEY, placed
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import PolicyBatch


class Scores(NamedTuple):
    """(B, T) each: log-probs and entropies in nats, with gradient; sums of squared probabilities; outside the cut.

    ``aux_loss`` is 0-d with gradient: the load-balancing loss of a mixture of experts, if it was asked for.
    """

    logps: Tensor
    entropies: Tensor
    sum_sq_probs: Tensor
    outside: Tensor
    aux_loss: Tensor | None = None


class Scorer:
    """Scores completions as the engine sampled them: at the same temperature, under the same truncation.

    The model's own forward runs, with :func:`~trl_offpolicy.functional.truncated_head.truncated_log_probs` in the place
    of its LM head's projection. Hooks of sharded and adapted models fire as usual.

    Args:
        sampling: sampling options of the engine.
        truncated: False scores the whole distribution (for a reference model).
        by_vllm: True if the engine is vLLM, whose rule for tokens tied with the k-th depends on the machine.
        compact: how padding and copies of prompts are left out; None = every forward is as wide as its rows.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        truncated: bool = True,
        by_vllm: bool = True,
        compact: CompactScoring | None = None,
    ) -> None:
        self.compact = compact
        self.temperature = sampling.temperature
        cut = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        kept = Truncation(**cut) if truncated else Truncation()  # type: ignore[arg-type]
        self.truncation = as_vllm_keeps(kept) if by_vllm else kept

    def __call__(
        self,
        model: nn.Module,
        rows: Mapping[str, Any],
        *,
        batch_size: int | None = None,
        aux_loss: bool = False,
        in_order: bool = False,
    ) -> Scores:
        """Score ``completion_ids``, given ``prompt_ids``.

        Args:
            model: the policy.
            rows: ``prompt_ids``, ``prompt_mask``, ``completion_ids``, ``completion_mask``: prompts padded on the left,
                completions on the right; ``images``, one mapping of model inputs per row, if prompts have images; and
                ``kept_ids`` of each row, if the engine reports which tokens it kept.
            batch_size: rows per forward; None = all.
            aux_loss: whether to return the load-balancing loss of a mixture of experts, the mean over the forwards.
            in_order: something reads the forwards row by row: rows meet as they come, in full width, prompts included.
        """
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        length = rows["completion_ids"].shape[1]
        kept = rows.get(KEY) if self.truncation else None
        if images := rows.get("images"):
            size = batch_size or len(ids)
            return self._with_images(model, ids, mask, length, size, images, aux_loss=aux_loss, kept=kept)
        compact = _AS_THEY_ARE if self.compact is None or in_order else self.compact
        forward = partial(self._forward, aux_loss=aux_loss, kept=kept)
        seen = compact.shared.seen(rows)
        columns = compact(forward, model, ids, mask, length, batch_size, in_order=aux_loss, seen=seen)
        return Scores(*columns)  # type: ignore[arg-type]

    def support_stats(self, scores: Scores, mask: Tensor) -> Stats:
        """``rollout/outside_fraction``: share of the tokens in ``mask`` (B, T) that the trainer would have cut."""
        if not self.truncation:
            return Stats({})
        return support_stats(scores.outside, mask)

    def _with_images(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        length: int,
        size: int,
        images: Sequence[Mapping[str, Tensor]],
        *,
        aux_loss: bool,
        kept: Sequence[KeptIds] | None,
    ) -> Scores:
        """Rows with images are scored as they come, in full width: their image inputs go with them."""
        forward = partial(self._forward, aux_loss=aux_loss, kept=kept)
        parts = [
            forward(model, ids[some], mask[some], length, some, images=[images[row] for row in some.tolist()])
            for some in torch.split(torch.arange(len(ids)), size)
        ]
        losses = [part.aux_loss for part in parts if part.aux_loss is not None]
        logps, entropies, sums, outside = (
            torch.cat(columns) for columns in zip(*(part[:4] for part in parts), strict=True)
        )
        return Scores(logps, entropies, sums, outside, torch.stack(losses).mean() if losses else None)

    def _forward(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        length: int,
        rows: Tensor | None,
        *,
        aux_loss: bool,
        kept: Sequence[KeptIds] | None,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> Scores:
        """One forward of the rows with these numbers; None = some rows, which are cut by the rule."""
        # with images the model makes the positions, which may have several dimensions
        positions = None if images else (mask.cumsum(-1) - 1).clamp(min=0)
        further: dict[str, Any] = {"output_router_logits": True} if aux_loss else {}
        further |= model_inputs(images, width=ids.shape[1] - length, length=length, device=ids.device)
        # The position before a token predicts it: length + 1 of them reach the head, which drops the last one.
        listed = None if kept is None or rows is None else placed([kept[row] for row in rows.tolist()], length)
        with _head_in_place(model, self, ids[:, -length:], listed) as found:
            whole = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=length + 1,
                **further,
            )
        head, output = found[0], whole.logits
        if model not in _CHECKED:
            _check_way_out(model, head, output.detach())
            _CHECKED.add(model)
        logps, entropies, sums, outside = (column.view(len(ids), length) for column in head)
        if output.shape[-1] == 2:  # unchanged on its way out, and known to the hooks of sharded models
            logps, entropies = output.unbind(-1)
        return Scores(logps, entropies, sums, outside, whole.aux_loss if aux_loss else None)


def sequence_logps(model: nn.Module, ids: Sequence[Sequence[int]], *, pad: int) -> list[list[float]]:
    """Log-probs (nats, temperature 1, nothing cut) of tokens 1, 2, ... of each sequence; no gradient.

    The counterpart of an engine's ``score``, for the proof of a sync.

    Args:
        model: the policy; a sharded one is called by all ranks.
        ids: sequences of at least two tokens.
        pad: fills the shorter ones.
    """
    width, device = max(map(len, ids)), next(model.parameters()).device
    tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in ids], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=device)
    # the first token is the prompt, because no position before it could give it a log-prob
    prompts = {"prompt_ids": tokens[:, :1], "prompt_mask": mask[:, :1]}
    rows = {**prompts, "completion_ids": tokens[:, 1:], "completion_mask": mask[:, 1:]}
    with torch.no_grad():
        logps = Scorer(Sampling(max_tokens=width))(model, rows).logps
    return [found[: len(row) - 1].tolist() for found, row in zip(logps, ids, strict=True)]


def noise_floor_due(step: int, every: int, place: int, *, size: int) -> bool:
    """True if this micro-batch is to be scored again: one in ``every`` optimizer steps.

    Which one of a step rotates. Sorted micro-batches differ in length, and the first always has the longest rows.

    Args:
        step: optimizer steps so far.
        every: optimizer steps from one measurement to the next; 0 = never.
        place: number of the micro-batch in its optimizer step.
        size: micro-batches of this optimizer step.

    Example:
        >>> [(step, place) for step in range(8) for place in range(3) if noise_floor_due(step, 2, place, size=3)]
        [(0, 0), (2, 1), (4, 2), (6, 0)]
    """
    return every > 0 and step % every == 0 and place == step // every % size


def measured_noise_floor(
    score: Callable[[dict[str, Any], int], Tensor], inputs: dict[str, Any], batch: PolicyBatch
) -> Stats:
    """How far the trainer differs from itself: a micro-batch is scored again in halves (a single row is doubled).

    Args:
        score: returns (B, T) log-probs of the completions of such a dict, in batches of so many rows, in their order.
        inputs: the micro-batch, with TRL's keys.
        batch: the same micro-batch, with the log-probs of the loss.

    Returns:
        The ``noise_floor`` stats.
    """
    with torch.no_grad():
        logps = score(*in_other_batches(inputs))[: len(batch.mask)]
    return noise_floor(batch.per_token_logps.detach(), logps, batch.mask)


@contextmanager
def _head_in_place(
    model: Any, scorer: Scorer, targets: Tensor, kept: KeptIds | None
) -> Iterator[list[TruncatedLogProbs]]:
    """While open, the output embedding of ``model`` scores ``targets`` and keeps the result in the list it yields."""
    base = _base_of(model)
    head = base.get_output_embeddings()
    if not isinstance(head, nn.Linear) or hasattr(head, "base_layer"):
        raise NotImplementedError(
            f"the LM head must be a plain linear layer, but got {type(head).__name__}. Leave lm_head out of the "
            "adapter's target_modules and modules_to_save."
        )
    found: list[TruncatedLogProbs] = []
    options = _head_options(base.config)

    def score(hidden: Tensor) -> Tensor:
        states = hidden[:, -targets.shape[1] - 1 : -1]
        result = truncated_log_probs(
            states.reshape(-1, states.shape[-1]),
            head.weight,
            targets.reshape(-1),
            bias=head.bias,
            temperature=scorer.temperature,
            truncation=scorer.truncation,
            kept_ids=kept,
            gather=_gathered,
            **options,
        )
        found.append(result)
        if options != _NO_CHANGE:  # the model will bend what it takes for logits
            return result.log_probs.view(*targets.shape, 1)
        return torch.stack([result.log_probs.view(targets.shape), result.entropies.view(targets.shape)], dim=-1)

    head.forward = score  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        del head.forward


_AS_THEY_ARE = CompactScoring(trim=False, shared=SharedPrefix(False, counted=True))

_NO_CHANGE = {"softcap": None, "logit_scale": 1.0}


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_options(config: Any) -> dict[str, Any]:
    """How the model changes its logits after the projection, as options of the head."""
    text = config.get_text_config()
    scale: float | None = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse; Falcon-H1
        scale = getattr(text, name, None) if scale is None else scale
    divisor = getattr(text, "logits_scaling", None)  # Granite, MiniCPM3; HyperCLOVA X multiplies by it
    if scale is None and divisor is not None:
        scale = divisor if text.model_type == "hyperclovax" else 1 / divisor
    return {
        "softcap": getattr(text, "final_logit_softcapping", None),
        "logit_scale": 1.0 if scale is None else float(scale),
    }


_CHECKED: WeakSet[nn.Module] = WeakSet()
"""The models that :func:`_check_way_out` has passed."""


def _check_way_out(model: Any, found: TruncatedLogProbs, output: Tensor) -> None:
    """Raise if the model does something else to its logits than its configuration says.

    What took the place of the logits must have left the model as :func:`_head_options` predicts. Read once per model,
    because it waits for the device.
    """
    options = _head_options(_base_of(model).config)
    sent = found.log_probs.detach()
    if options != _NO_CHANGE:
        sent = sent * options["logit_scale"]
        sent = sent if options["softcap"] is None else options["softcap"] * torch.tanh(sent / options["softcap"])
    came = output[..., 0].flatten()
    if not torch.allclose(came.float(), sent.to(came.dtype).float(), rtol=1e-2, atol=1e-6, equal_nan=True):
        raise NotImplementedError(
            f"{type(_base_of(model)).__name__} must change its logits by nothing but "
            f"{' and '.join(options)} of its configuration, but got another change: its log-probs would be wrong."
        )


def _gathered(weight: Tensor, bias: Tensor | None) -> AbstractContextManager[Any]:
    """A context that gathers the head under ZeRO-3, also for the backward; does nothing otherwise.

    The hooks of the head's own module have gathered it as a rule; then the context must not give it back.
    """
    shared: list[Any] = [value for value in (weight, bias) if value is not None and hasattr(value, "ds_id")]
    if not shared:
        return nullcontext()
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if all(value.ds_status == ZeroParamStatus.AVAILABLE for value in shared):
        return nullcontext()

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(shared)
    return context
