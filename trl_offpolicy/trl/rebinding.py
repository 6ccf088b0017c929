"""Contexts that change names in TRL's modules, or the options that decide about its pass for old log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def rebound(module: ModuleType, **values: Any) -> Iterator[None]:
    """A context in which globals of ``module`` have other values, for classes of TRL that look such names up late.

    Raises:
        AttributeError: the module has no such name.
    """
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def is_aligned(args: Any) -> bool:
    """True if each optimizer step uses whole generation batches, so that old is the current policy, detached."""
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0)


@contextmanager
def as_if_aligned(args: Any) -> Iterator[None]:
    """A context in which TRL's generation leaves out its pass for the old log-probs.

    It makes that pass unless :func:`is_aligned`, and reads ``gradient_accumulation_steps`` for nothing else there.
    """
    accumulation = args.gradient_accumulation_steps
    args.gradient_accumulation_steps = args.steps_per_generation * args.num_iterations
    try:
        yield
    finally:
        args.gradient_accumulation_steps = accumulation
