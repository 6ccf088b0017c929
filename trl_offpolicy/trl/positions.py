"""Positions of padded prompts, for models whose positions are absolute.

TRL pads prompts on the left and passes no position ids. Rotary models do not mind, because they see distances only. A
model that adds a vector for each position to its input, learned (GPT-2, OpenAI-GPT) or not (XGLM, CTRL), does: TRL's
own log-probs of a padded row are those of a text further on (more than a nat off on GPT-2), while every engine counts
from the first token. This trainer does, too.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trl_offpolicy.functional.collective import broadcast_object
from trl_offpolicy.rollouts.model_parts import decoder_layers, innermost
from trl_offpolicy.rollouts.shared_prefix import is_sharded

logger = logging.getLogger(__name__)

Positions = Literal["fine", "wanted", "wrong"]
"""What padding on the left does to a model that gets no position ids. ``fine``: nothing. ``wanted``: it moves the text,
and position ids put it back. ``wrong``: it moves the text, and they do not, or the model takes none."""

GIVEN = (
    "Positions of padded prompts are counted from their first token, as engines count them: this model's are absolute"
)
NOT_GIVEN = (
    "Log-probs of padded prompts are those of a text further on: this model's positions are absolute, and position_ids "
    "do not put them right. Use prompts of one length"
)
MOVES_TEXT = "this model's positions are absolute and count padding, so that another width would give other log-probs"
"""Why padding stays where positions are "wrong": old and current policy must be scored in one width."""
THEIRS = (
    "TRL's own log-probs of padded prompts are those of a text further on, and what is measured holds that: this "
    "model's positions are absolute, and TRL passes no position_ids"
)

_TEXT, _PADDING = 6, 5  # tokens
_POSITIONS = re.compile(r"wpe|pos(ition)?s?_?emb|embed_pos|pos_encoding")


def positions_under_padding(model: nn.Module) -> Positions:
    """Look at what enters the first decoder layer for a text, padded and alone. All ranks call it, before wrapping.

    Only the embedding is computed. Rank 0 answers for all, as the others may not have the weights yet. If it has not
    either (ZeRO-3), or no layer is found, the names of the model's parts decide.

    Args:
        model: the policy as it was loaded, with or without an adapter.
    """
    found = _observed(model)
    if found is None and has_position_vectors(model):
        found = "wanted" if _takes_positions(model) else "wrong"
    answer: Positions = broadcast_object(found or "fine")
    return answer


def told_positions(model: nn.Module, *, say: bool) -> Positions:
    """What padding does to the model; with "wanted" the trainer has to pass position ids. All ranks call it.

    Args:
        model: as in :func:`positions_under_padding`.
        say: whether to say in one line what is done, or that nothing helps.
    """
    found = positions_under_padding(model)
    if say and found != "fine":
        logger.warning("%s.", GIVEN if found == "wanted" else NOT_GIVEN)
    return found


def has_position_vectors(model: nn.Module) -> bool:
    """True if, by its name, a part or a tensor of the decoder is a table of positions or computes vectors for them.

    Example:
        >>> has_position_vectors(nn.ModuleDict({"wte": nn.Embedding(9, 2), "wpe": nn.Embedding(4, 2)}))
        True
        >>> has_position_vectors(nn.ModuleDict({"embed_tokens": nn.Embedding(9, 2)}))
        False
    """
    inner: Any = model
    decoder: nn.Module = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    names: list[str] = []
    for name, part in decoder.named_modules():
        if "Rotary" in type(part).__name__:
            continue
        own = {**part._parameters, **part._buffers, **vars(part)}  # CTRL has a tensor, not a part
        names += [name.rpartition(".")[2], *(key for key, value in own.items() if isinstance(value, Tensor))]
    return any(map(_POSITIONS.search, names))


def _observed(model: nn.Module) -> Positions | None:
    """What padding does to the input of the first layer; None = it cannot be seen."""
    if is_sharded(model) or any(weight.is_meta for weight in model.parameters()):
        return None
    device = next(model.parameters()).device
    text = torch.arange(1, 1 + _TEXT, device=device)[None]
    padded = torch.nn.functional.pad(text, (_PADDING, 0))
    mask = (torch.arange(_PADDING + _TEXT, device=device) >= _PADDING).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    training = model.training
    model.eval()
    try:
        alone = _first_input(model, text, torch.ones_like(text))
        moved = _first_input(model, padded, mask)
        if alone is None or moved is None:
            return None
        if _same(alone, moved):
            return "fine"
        put_back = _first_input(model, padded, mask, position_ids=positions) if _takes_positions(model) else None
        return "wanted" if put_back is not None and _same(alone, put_back) else "wrong"
    except Exception as error:  # a model of any code may come here, and a run must not end for this question
        logger.debug("The positions of %s were not observed: %r", type(model).__name__, error)
        return None
    finally:
        model.train(training)


class _Reached(Exception):
    """Ends a forward at the first layer."""


@torch.no_grad()
def _first_input(model: nn.Module, ids: Tensor, mask: Tensor, **positions: Tensor) -> Tensor | None:
    """(1, text, H) what enters the first decoder layer at the tokens of the text; None = no layer was entered."""
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part))
    layer = next(iter(decoder_layers(model)), None) or next((part[0] for part in lists), None)
    entered: list[Tensor] = []

    def reached(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    if layer is None:
        return None
    handle = layer.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        model(input_ids=ids, attention_mask=mask, **positions)
    except _Reached:
        pass
    finally:
        handle.remove()
    return entered[0].reshape(1, ids.shape[1], -1)[:, -_TEXT:].float() if entered else None


def _same(first: Tensor, second: Tensor) -> bool:
    """True if they differ by rounding alone, in bfloat16 too; a vector that is added changes far more."""
    return bool((first - second).abs().max() <= 0.01 * first.abs().max())


def _takes_positions(model: nn.Module) -> bool:
    """True if the model inside an adapter has an argument ``position_ids``."""
    inner: Any = innermost(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return "position_ids" in inspect.signature(inner.forward).parameters


@contextmanager
def counted_positions(model: Any, *, wanted: bool) -> Iterator[None]:
    """A context in which a forward with an attention mask counts positions from each row's first token.

    Args:
        model: the model that is called, wrapped or not.
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    handle = innermost(model).register_forward_pre_hook(_with_positions, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _with_positions(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    mask = kwargs.get("attention_mask")
    if mask is None or kwargs.get("position_ids") is not None:
        return args, kwargs
    return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
