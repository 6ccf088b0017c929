"""Positions of padded prompts, for models whose positions are learned.

TRL pads prompts on the left and passes no position ids. Rotary models do not mind, because they see distances only. A
model with a table of positions (GPT-2, OPT) does: TRL's own log-probs of a padded row are those of a text further on
(more than a nat off on GPT-2), while every engine counts from the first token. This trainer does, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from trl_offpolicy.rollouts.model_parts import innermost

_POSITION_TABLE = re.compile(r"wpe|pos(ition)?_?emb|embed_pos|position_embeddings")


def learns_positions(model: nn.Module) -> bool:
    """True if the model looks up positions in a table.

    Example:
        >>> learns_positions(nn.ModuleDict({"wte": nn.Embedding(9, 2), "wpe": nn.Embedding(4, 2)}))
        True
        >>> learns_positions(nn.ModuleDict({"embed_tokens": nn.Embedding(9, 2)}))
        False
    """
    return any(
        isinstance(module, nn.Embedding) and _POSITION_TABLE.search(name.rpartition(".")[2])
        for name, module in model.named_modules()
    )


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
