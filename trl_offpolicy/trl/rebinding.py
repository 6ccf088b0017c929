"""Another library's module with other names in it, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def rebound(module: ModuleType, **values: Any) -> Iterator[None]:
    """While open, globals of ``module`` have other values. For TRL's classes that look such names up late.

    Raises:
        AttributeError: the module has no such name.
    """
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
