"""Packages that only some features need: how to install them, and the error if one is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRAS = {
    "vllm": "vllm",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "jsonargparse": "lightning",
    "reasoning_gym": "quickstart",
    "gguf": "quickstart",
    "rl_doctor": "doctors",
    "rlprobe": "doctors",
}
"""{module: the extra of this package that installs it}."""


def how_to_install(module: str) -> str:
    """The command that installs a module, with a space before it; empty text for one that no extra holds.

    Example:
        >>> how_to_install("lightning")
        ' Install it in a checkout of trl-offpolicy: pip install -e ".[lightning]".'
    """
    extra = EXTRAS.get(module)
    if extra is None:
        return ""
    without_gpu = " On a machine without a GPU: make install." if extra == "vllm" else ""
    return f' Install it in a checkout of trl-offpolicy: pip install -e ".[{extra}]".{without_gpu}'


def require(module: str, *, by: str) -> None:
    """Raise unless a module is installed; nothing is imported.

    Args:
        module: its name.
        by: what needs it, for the message, e.g. ``use_vllm: true``.

    Raises:
        ModuleNotFoundError: it is not installed; the message has the command that installs it.
    """
    installed = sys.modules[module] is not None if module in sys.modules else find_spec(module) is not None
    if not installed:
        message = f"{by} must have the package {module}, but it is not installed.{how_to_install(module)}"
        raise ModuleNotFoundError(message, name=module)
