"""Names of functions in configurations: ``package.module:function``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def imported(path: str) -> Any:
    """What ``package.module:name`` names.

    Raises:
        ValueError: not such a path, or nothing there.

    Example:
        >>> imported("math:sqrt")(9)
        3.0
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"an import path must be 'package.module:name', but got {path!r}.")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"an import path must name something that exists, but {path!r} gives: {error}") from error


def import_path(function: Callable[..., Any]) -> str | None:
    """The path from which :func:`imported` gives ``function`` back, or None (a lambda, a local function).

    Example:
        >>> from math import sqrt
        >>> import_path(sqrt)
        'math:sqrt'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<" in name or "." in name:
        return None
    return f"{module}:{name}"
