"""Computes a prompt once for all of its completions in a micro-batch: prefix sharing for training.

A group of G rows has one prompt, which a plain forward computes G times. Here the backbone computes it once, in one
sequence with the completions behind it (:mod:`trl_offpolicy.rollouts.one_sequence`). Loss and gradient are those of the
plain path up to rounding. Both trainers use it through the backbone's ``forward``, inside the model's own, so that
adapters, DDP and the LM head notice nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trl_offpolicy.rollouts import one_sequence
from trl_offpolicy.rollouts.micro_batches import saving_pays
from trl_offpolicy.rollouts.model_parts import innermost, is_flattened
from trl_offpolicy.rollouts.prompts import Prompts, SeenRows, prompts_of_rows

logger = logging.getLogger(__name__)

SharePrefix = Literal["auto", True, False]
"""True: wherever rows share a prompt, an error where it is refused; "auto": where it pays; False: never."""

PROVED = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the models whose loss and gradient are tested equal."""
_FIXED_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long the input is."""
_LEAST, _OF_NOISE = 1e-3, 4.0
"""Largest differences that the first batch may show: absolute and relative, or a multiple of the plain path's own."""


def backbone_of(model: Any) -> Any:
    """The decoder inside a causal LM of transformers, without its LM head; wrappers and adapters are looked through."""
    model = innermost(model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(model, "base_model", model)


def refusal(model: Any) -> str | None:
    """Why prompts of this model cannot be computed once; None if they can, as far as its configuration tells."""
    if hasattr(model, "_orig_mod"):
        return COMPILED
    config = getattr(backbone_of(model), "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in PROVED:
        return f"models of type {kind!r} are not proved equal; those of type {', '.join(PROVED)} are"
    types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) is not None or types - {"full_attention"}:
        return "the model has sliding windows, which count a prompt's tokens from each completion"
    attention = str(getattr(config, "_attn_implementation", None))
    if attention not in ("sdpa", "eager") and "flash" not in attention:
        return f"attn_implementation {attention!r} does not take rows apart; sdpa, eager and flash attention do"
    if "flash" in attention and is_sharded(model):
        return "flash attention is compared on the first batch, but weights are sharded (FSDP, ZeRO-3), where none is"
    return varying_rope(model) or _refused_state(model, config)


def varying_rope(model: Any) -> str | None:
    """What makes log-probs depend on padding: rotary embeddings with other angles in a wider input; None = nothing."""
    config = getattr(backbone_of(model), "config", None)
    config = getattr(config, "text_config", config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [one for one in rope.values() if isinstance(one, Mapping)]  # one for each type of layer
    for one in by_layer or [rope]:
        if (kind := one.get("rope_type", one.get("type", "default"))) not in _FIXED_ROPE:
            return f"rotary embeddings of type {kind!r} depend on the length of the input"
    return None


def _refused_state(model: nn.Module, config: Any) -> str | None:
    """Reasons that lie in dropout or an adapter."""
    active = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    if active or getattr(config, "attention_dropout", 0.0) > 0:
        return "dropout is above 0, and each copy of a prompt would have noise of its own"
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return "a prompt-learning adapter adds tokens to every row"
    return None


def is_sharded(model: nn.Module) -> bool:
    """True if no rank has the whole weights (FSDP, ZeRO-3)."""
    sharded = any(hasattr(weight, "ds_id") or type(weight).__name__ == "DTensor" for weight in model.parameters())
    return sharded or is_flattened(model)


COMPILED = "the model is compiled (torch.compile), and the shared forward would not be"


@contextmanager
def prompts_once(model: Any, prompts: Prompts, *, counted: bool) -> Iterator[None]:
    """A context in which the model takes the last token of each prompt with its completion, and knows the prompts.

    The backbone then returns (B, 1 + T) hidden states: that of the prompt's last token, and those of the completion.

    Args:
        model: the model that is called; input (B, 1 + T), its first column the prompt's last token.
        prompts: the prompts of the rows that it is called with.
        counted: positions count from each row's first token (the Lightning trainer); else from the first column (TRL).
    """
    backbone = backbone_of(model)
    original, own = backbone.forward, backbone.__dict__.get("forward")

    def forward(input_ids: Tensor, attention_mask: Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        passed = {name: value for name, value in kwargs.items() if name not in ("use_cache", "past_key_values")}
        hidden = one_sequence.forward(
            original, backbone.config, prompts, input_ids[:, 1:], attention_mask[:, 1:], counted=counted, **passed
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    backbone.forward = forward
    try:
        yield
    finally:
        if own is None:
            del backbone.forward
        else:
            backbone.forward = own


Score = Callable[[Tensor, Tensor, AbstractContextManager[None] | None], Tensor]
"""``score(ids, mask, context)``: (B, T) log-probs with gradient, under the context if there is one."""


class SharedPrefix:
    """Decides for each forward whether its rows pass as one sequence, and checks the first one against the plain path.

    Args:
        mode: the option ``share_prefix``.
        counted: as in :func:`prompts_once`.
        drop_padding: rows that share no prompt pass as one sequence too, where that leaves out enough padding.
    """

    def __init__(self, mode: SharePrefix, *, counted: bool, drop_padding: bool = False) -> None:
        self.mode = mode
        self.drop_padding = drop_padding
        self._counted = counted
        self._refused: str | None = None
        self._reasons: dict[int, str | None] = {}
        self._checked: set[tuple[int, bool, bool]] = set()
        self._said: set[str] = set()
        self._rows = SeenRows()

    def prepare(self, *models: Any, refused: str | None = None) -> None:
        """Look at the models once, before training.

        Args:
            models: the policy, and others that are known by now; one that is met later is looked at then.
            refused: the trainer's own reason, against every model.

        Raises:
            ValueError: the option is true, but it is refused.
        """
        self._refused = refused
        if refused is not None:
            self._refuse(refused)
            return
        for model in models:
            self._look_at(model)

    def possible(self, model: Any) -> bool:
        """True if rows of this model can pass as one sequence, and the options want it.

        Raises:
            ValueError: the option is true, but a model that :meth:`prepare` did not see is refused.
        """
        if self._refused is not None or (self.mode is False and not self.drop_padding):
            return False
        key = id(backbone_of(model))
        if key not in self._reasons:
            self._look_at(model)
        return self._reasons[key] is None

    def _look_at(self, model: Any) -> None:
        reason = self._reasons[id(backbone_of(model))] = refusal(model)
        if reason is not None:
            self._refuse(reason)

    def look_at(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Copy the rows of a new generation's micro-batches to the host, where the device is waited for anyway.

        The forwards of their losses then need not wait (:meth:`seen`).
        """
        if self._refused is None and (self.mode is not False or self.drop_padding):
            for rows in micro_batches:
                self._rows.look_at(rows)

    def seen(self, rows: Mapping[str, Any]) -> Any:
        """What :meth:`prompts` takes by this name, for a micro-batch; None if it was not looked at."""
        return self._rows.of(rows)

    def prompts(self, model: Any, ids: Tensor, mask: Tensor, width: int, seen: Any = None) -> Prompts | None:
        """The prompts of (B, P + T) rows if these are to pass as one sequence, else None.

        Where the model allows it at all, the rows are read on the host. That waits for the device if nobody has.

        Args:
            model: the model.
            ids: (B, P + T).
            mask: (B, P + T).
            width: P.
            seen: these rows as :meth:`seen` has them; None = they are copied.
        """
        if len(ids) < 2 or not self.possible(model):
            return None
        found, present = prompts_of_rows(ids, mask, width, shared=self.mode is not False, seen=seen)
        if self.mode is True and found.are_shared:
            return found
        tokens = ids.numel() if not self.drop_padding else present
        copies = found.mask.shape[1] * (len(ids) - len(found.ids))
        return found if saving_pays(ids.numel() - tokens + copies, ids.numel()) else None

    def context(self, model: Any, prompts: Prompts) -> AbstractContextManager[None]:
        """The context of :func:`prompts_once`."""
        return prompts_once(model, prompts, counted=self._counted)

    def proved(self, model: Any, prompts: Prompts, ids: Tensor, mask: Tensor, score: Score) -> bool:
        """Compare log-probs and gradient of two rows of one prompt with the plain path, once for each whole model.

        A model of which nothing is trainable now (a policy with its adapter switched off is its own reference) is
        checked without gradient, and again when it is. A comparison that fails with an error counts as a difference.

        Args:
            model: the model, without the wrapper of a strategy.
            prompts: those of the rows.
            ids: (B, P + T) prompts and completions.
            mask: (B, P + T).
            score: scores such rows; called with the shared path's narrow ones as well.

        Returns:
            False if they differ and the option is "auto"; the model is then never shared.

        Raises:
            RuntimeError: they differ, or cannot be compared, and the option is true.
        """
        if is_sharded(model):  # its forwards are collective, and other ranks may have no rows to compare
            return True
        width = prompts.ids.shape[1]
        key = (id(backbone_of(model)), bool(_trained(model)), prompts.are_shared)
        rows = [] if key in self._checked else _two_rows(prompts, mask[:, width:].sum(-1).tolist())
        if not rows:
            return True
        self._checked.add(key)
        ids, mask = ids[rows], mask[rows]
        pair, _ = prompts_of_rows(ids, mask, width, shared=prompts.are_shared)

        def shared() -> Tensor:
            return score(ids[:, width - 1 :], mask[:, width - 1 :], self.context(model, pair))

        def alone() -> Tensor:
            return torch.cat([score(ids[[i]], mask[[i]], None) for i in range(len(rows))])

        try:
            found = _differences(model, mask[:, width:].bool(), lambda: score(ids, mask, None), shared, alone)
            reason = _too_far(found)
        except Exception as error:  # of a model's code or a kernel's; the plain path may well work
            text = f"{type(error).__name__}: {error}".rstrip(".")
            reason = f"the first batch could not be compared with the plain path ({text})"
            if self.mode is True:
                raise RuntimeError(self._message(reason)) from error
        if reason is None:
            return True
        self._reasons[key[0]] = reason
        self._refuse(reason, error=RuntimeError)
        return False

    def _message(self, reason: str) -> str:
        return f"share_prefix must be auto or false here, but got true: {reason}."

    def _refuse(self, reason: str, error: type[Exception] = ValueError) -> None:
        if self.mode is True:
            raise error(self._message(reason))
        self._say(reason)

    def _say(self, reason: str) -> None:
        if self.mode is not False and reason not in self._said:
            self._said.add(reason)
            logger.warning("share_prefix: auto computes every prompt for each of its rows, and padding: %s.", reason)


def _too_far(found: Sequence[tuple[float, float]]) -> str | None:
    """What is wrong with these differences of log-probs and gradient; None if they are small."""
    if all(difference <= max(_LEAST, _OF_NOISE * noise) for difference, noise in found):
        return None
    (logps, logp_noise), (gradient, gradient_noise) = found
    return (
        f"on the first batch log-probs differ from the plain path by {logps:.2g} nats (which differs from itself "
        f"by {logp_noise:.2g}), the gradient by {gradient:.2g} of its norm ({gradient_noise:.2g})"
    )


@contextmanager
def _other_checkpointing(model: nn.Module) -> Iterator[None]:
    """A context in which gradient checkpointing is that without reentrance.

    The other kind hides the weights of its layers from ``torch.autograd.grad``, which then finds nothing to compare, or
    refuses it. ``backward`` would find them, but its hooks (DDP) would take the check for the step.
    """
    parts: list[Any] = [part for part in model.modules() if _checkpoints(part)]
    kept = [(part, part._gradient_checkpointing_func) for part in parts]
    for part in parts:
        part._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for part, function in kept:
            part._gradient_checkpointing_func = function


def _checkpoints(part: nn.Module) -> bool:
    return bool(getattr(part, "gradient_checkpointing", False)) and hasattr(part, "_gradient_checkpointing_func")


def _two_rows(prompts: Prompts, tokens: Sequence[int]) -> list[int]:
    """The two rows with the longest completions, of one prompt if one is shared; none if nothing is learned there."""
    by_prompt: dict[int, list[int]] = {}
    for row in sorted(range(len(tokens)), key=lambda row: -tokens[row]):
        by_prompt.setdefault(prompts.of_row[row] if prompts.are_shared else 0, []).append(row)
    pairs = [rows[:2] for rows in by_prompt.values() if len(rows) > 1]
    best = max(pairs, key=lambda pair: tokens[pair[1]], default=[])
    return best if best and tokens[best[1]] > 0 else []


def _trained(model: Any) -> list[nn.Parameter]:
    """The trainable weights of the first and last layer; if they have none, of all layers."""
    layers = backbone_of(model).layers
    for some in ([layers[0], layers[-1]], layers):
        found = {id(p): p for layer in some for p in layer.parameters() if p.requires_grad}
        if found:
            return list(found.values())
    return []


def _differences(
    model: Any, mask: Tensor, plain: Callable[[], Tensor], shared: Callable[[], Tensor], alone: Callable[[], Tensor]
) -> list[tuple[float, float]]:
    """(difference, plain path's own) of the log-probs, nats, and of the gradient, relative to its norm."""
    weights = _trained(model)
    signs = torch.arange(mask.numel(), device=mask.device).view(mask.shape).float().cos()

    def both(score: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), _other_checkpointing(model):
            logps = torch.where(mask, score(), 0.0)
            if not weights or not logps.requires_grad:
                return logps.detach().float(), logps.new_zeros(1)
            found = torch.autograd.grad((logps * signs).sum(), weights, allow_unused=True)
        parts = [gradient.flatten().float() for gradient in found if gradient is not None]
        return logps.detach().float(), torch.cat(parts) if parts else logps.new_zeros(1)

    reference, other, third = both(plain), both(shared), both(alone)
    norm = float(reference[1].norm()) or 1.0

    def distances(result: Sequence[Tensor]) -> tuple[float, float]:
        logps, gradient = (one - two for one, two in zip(result, reference, strict=True))
        return float(logps.abs().max()), float(gradient.norm()) / norm

    return list(zip(distances(other), distances(third), strict=True))
