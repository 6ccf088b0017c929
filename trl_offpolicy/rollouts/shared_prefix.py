"""Computes a prompt once for all of its completions in a micro-batch: prefix sharing for training.

A group of G rows has one prompt, which a plain forward computes G times. Here the backbone computes it once and keeps
its keys and values with their gradient; these are expanded over the group, and the completions are computed behind
them. Loss and gradient are those of the plain path up to rounding: the gradient that reaches the one prompt is the sum
of those that would have reached its copies. Both trainers use it through the backbone's ``forward``, inside the model's
own, so that adapters, DDP and the LM head notice nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trl_offpolicy.rollouts.micro_batches import same_rows, sharing_pays
from trl_offpolicy.rollouts.model_parts import innermost

logger = logging.getLogger(__name__)

SharePrefix = Literal["auto", True, False]
"""True: wherever rows share a prompt, an error where it is refused; "auto": where it pays; False: never."""

PROVED = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the models whose loss and gradient are tested equal."""
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long the input is."""
_LEAST, _OF_NOISE = 1e-3, 4.0
"""Largest differences that the first batch may show: absolute and relative, or a multiple of the plain path's own."""


class Prompts(NamedTuple):
    """The different prompts of some rows: (U, P) ids and mask, and for each row the number of its prompt."""

    ids: Tensor
    mask: Tensor
    of_row: tuple[int, ...]

    @property
    def repeats(self) -> int | None:
        """G if the rows are G copies of the first prompt, then G of the second, ...; else None."""
        copies, rest = divmod(len(self.of_row), len(self.ids))
        regular = not rest and all(number == row // copies for row, number in enumerate(self.of_row))
        return copies if regular else None

    def expand(self, values: Tensor) -> Tensor:
        """(U, ...) to one entry for each row, with gradient."""
        if (copies := self.repeats) is not None:  # its backward is a sum, that of an index an atomic add
            return values.unsqueeze(1).expand(-1, copies, *values.shape[1:]).flatten(0, 1)
        return values.index_select(0, torch.tensor(self.of_row, device=values.device))


def different_prompts(ids: Tensor, mask: Tensor) -> Prompts:
    """The different prompts among (B, P) left-padded ones."""
    of_row = same_rows(torch.where(mask.bool(), ids, -1))
    first = [of_row.index(number) for number in range(max(of_row) + 1)]
    return Prompts(ids[first], mask[first], tuple(of_row))


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
        return "the model has sliding windows, whose cache drops part of the prompt"
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
    """Reasons that lie in dropout, an adapter or sharded weights."""
    active = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    if active or getattr(config, "attention_dropout", 0.0) > 0:
        return "dropout is above 0, and each copy of a prompt would have noise of its own"
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return "a prompt-learning adapter adds tokens to every row"
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id") or type(parameter).__name__ == "DTensor":
            return "weights are sharded (FSDP, ZeRO-3), where a second forward in one step is not proved equal"
    if any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules()):
        return "weights are sharded (FSDP), where a second forward in one step is not proved equal"
    return None


def recomputes(model: Any) -> bool:
    """True if gradient checkpointing is on now: it forbids the cache that a prompt's keys and values are kept in."""
    return any(getattr(module, "gradient_checkpointing", False) for module in backbone_of(model).modules())


COMPILED = "the model is compiled (torch.compile), and the shared forward would not be"
CHECKPOINTING = "gradient_checkpointing recomputes each layer without the cache in which a prompt's keys are kept"


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
        passed = {name: value for name, value in kwargs.items() if name not in ("use_cache", "past_key_values")}
        return _forward(original, backbone.config, prompts, input_ids, attention_mask, counted=counted, **passed)

    backbone.forward = forward
    try:
        yield
    finally:
        if own is None:
            del backbone.forward
        else:
            backbone.forward = own


def _forward(
    original: Callable[..., Any],
    config: Any,
    prompts: Prompts,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    counted: bool,
    **kwargs: Any,
) -> Any:
    from transformers import DynamicCache
    from transformers.modeling_outputs import BaseModelOutputWithPast

    width, cache = prompts.ids.shape[1], DynamicCache(config=config)
    whole = torch.cat([prompts.expand(prompts.mask), attention_mask[:, 1:]], dim=1)
    at_prompt, at_completion = _positions(prompts.mask, counted), _positions(whole, counted)[:, width:]
    common = {**kwargs, "use_cache": True, "past_key_values": cache}
    first = original(input_ids=prompts.ids, attention_mask=prompts.mask, position_ids=at_prompt, **common)
    for layer in cache.layers:
        layer.keys, layer.values = prompts.expand(layer.keys), prompts.expand(layer.values)
    rest = original(input_ids=input_ids[:, 1:], attention_mask=whole, position_ids=at_completion, **common)
    last = prompts.expand(first.last_hidden_state[:, -1:])  # prompts are padded on the left
    return BaseModelOutputWithPast(last_hidden_state=torch.cat([last, rest.last_hidden_state], dim=1))


def _positions(mask: Tensor, counted: bool) -> Tensor:
    if counted:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.arange(mask.shape[1], device=mask.device).expand(len(mask), -1)


Score = Callable[[Tensor, Tensor, AbstractContextManager[None] | None], Tensor]
"""``score(ids, mask, context)``: (B, T) log-probs with gradient, under the context if there is one."""


class SharedPrefix:
    """Decides for each forward whether its prompts are computed once, and checks the first one against the plain path.

    Args:
        mode: the option ``share_prefix``.
        counted: as in :func:`prompts_once`.
    """

    def __init__(self, mode: SharePrefix, *, counted: bool) -> None:
        self.mode = mode
        self._counted = counted
        self._reasons: dict[int, str | None] = {}
        self._checked: set[tuple[int, bool]] = set()
        self._said: set[str] = set()

    def prepare(self, model: Any, *, refused: str | None = None, checkpointing: bool = False) -> None:
        """Look at the model once, before training.

        Args:
            model: the policy.
            refused: the trainer's own reason against it.
            checkpointing: whether the trainer will switch gradient checkpointing on. Passes without gradient, in which
                it is off, may then still share.

        Raises:
            ValueError: the option is true, but it is refused.
        """
        if self.mode is False:
            return
        lasting = refused or refusal(model)
        self._reasons[id(backbone_of(model))] = lasting
        reason = lasting or (CHECKPOINTING if checkpointing or recomputes(model) else None)
        if reason is not None:
            self._refuse(reason)

    def possible(self, model: Any) -> bool:
        """True if the prompts of this model can be computed once, now."""
        if self.mode is False:
            return False
        key = id(backbone_of(model))
        if key not in self._reasons:
            self._reasons[key] = refusal(model)
            if (reason := self._reasons[key]) is not None:
                self._say(reason)
        return self._reasons[key] is None and not recomputes(model)

    def prompts(self, model: Any, ids: Tensor, mask: Tensor, completion_width: int) -> Prompts | None:
        """The different prompts of (B, P) ones if they are to be computed once, else None."""
        if len(ids) < 2 or not self.possible(model):
            return None
        found = different_prompts(ids, mask)
        different = len(found.ids)
        pays = self.mode is True or sharing_pays(len(ids), different, ids.shape[1], completion_width)
        wanted = pays and different < len(ids)
        return found if wanted else None

    def context(self, model: Any, prompts: Prompts) -> AbstractContextManager[None]:
        """The context of :func:`prompts_once`."""
        return prompts_once(model, prompts, counted=self._counted)

    def proved(self, model: Any, prompts: Prompts, ids: Tensor, mask: Tensor, score: Score) -> bool:
        """Compare log-probs and gradient of two rows of one prompt with the plain path, once for each model.

        A model of which nothing is trainable now (a policy with its adapter switched off is its own reference) is
        checked without gradient, and again when it is.

        Args:
            model: the model, without the wrapper of a strategy.
            prompts: those of the rows.
            ids: (B, P + T) prompts and completions.
            mask: (B, P + T).
            score: scores such rows; called with the shared path's narrow ones as well.

        Returns:
            False if they differ and the option is "auto"; the model is then never shared.

        Raises:
            RuntimeError: they differ, and the option is true.
        """
        key, width = (id(backbone_of(model)), bool(_trained(model))), prompts.ids.shape[1]
        rows = [] if key in self._checked else _two_rows(prompts, mask[:, width:].sum(-1).tolist())
        if not rows:
            return True
        self._checked.add(key)
        pair = Prompts(ids[rows[:1], :width], mask[rows[:1], :width], of_row=(0,) * len(rows))
        ids, mask = ids[rows], mask[rows]

        def shared() -> Tensor:
            return score(ids[:, width - 1 :], mask[:, width - 1 :], self.context(model, pair))

        def alone() -> Tensor:
            return torch.cat([score(ids[[i]], mask[[i]], None) for i in range(len(rows))])

        found = _differences(model, mask[:, width:].bool(), lambda: score(ids, mask, None), shared, alone)
        if all(difference <= max(_LEAST, _OF_NOISE * noise) for difference, noise in found):
            return True
        (logps, logp_noise), (gradient, gradient_noise) = found
        reason = (
            f"on the first batch log-probs differ from the plain path by {logps:.2g} nats (which differs from itself "
            f"by {logp_noise:.2g}), the gradient by {gradient:.2g} of its norm ({gradient_noise:.2g})"
        )
        self._reasons[key[0]] = reason
        self._refuse(reason, error=RuntimeError)
        return False

    def _refuse(self, reason: str, error: type[Exception] = ValueError) -> None:
        if self.mode is True:
            raise error(f"share_prefix must be auto or false here, but got true: {reason}.")
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("share_prefix: auto computes every prompt for each of its rows: %s.", reason)


def _two_rows(prompts: Prompts, tokens: Sequence[int]) -> list[int]:
    """The two rows of one prompt with the longest completions; none if nothing is learned from them."""
    by_prompt: dict[int, list[int]] = {}
    for row in sorted(range(len(tokens)), key=lambda row: -tokens[row]):
        by_prompt.setdefault(prompts.of_row[row], []).append(row)
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
        with torch.enable_grad():
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
