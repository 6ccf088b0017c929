"""Further processors of logits in ``generate`` of a model of transformers, at both ends of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]
"""Takes the ids (B, L) so far and the scores (B, V) of the next token; returns the scores to go on with."""


@contextmanager
def further_processors(model: Any, *, first: Processor | None = None, last: Processor | None = None) -> Iterator[None]:
    """While open, ``generate`` has these processors beside its own.

    Args:
        model: the model, plain or with an adapter of PEFT, which calls the base model's ``generate``.
        first: sees the model's logits as they are.
        last: sees what is sampled from, after the temperature and whatever cuts the distribution.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    outer = vars(base).get("_get_logits_processor")  # that of a context around this one
    made = base._get_logits_processor

    def with_further(*args: Any, **kwargs: Any) -> Any:
        processors = made(*args, **kwargs)
        if first is not None:
            processors.insert(0, first)
        if last is not None:
            processors.append(last)
        return processors

    base._get_logits_processor = with_further
    try:
        yield
    finally:
        if outer is None:
            del base._get_logits_processor
        else:
            base._get_logits_processor = outer
