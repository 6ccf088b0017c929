"""Reading another framework's options: unknown names are errors, and what has no effect there is said aloud."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from trl_offpolicy.checks import check_bool, check_choice, near

__all__ = ["UnknownOptionError", "check_choice", "read_options", "tell", "warn_no_effect"]

Options = TypeVar("Options")


class UnknownOptionError(TypeError, ValueError):
    """An option that the framework does not have.

    A TypeError like any unknown keyword, and a ValueError like the unknown names of
    :func:`trl_offpolicy.presets.get` and YAML.
    """


def read_options(cls: type[Options], given: Mapping[str, object], *, framework: str) -> Options:
    """Build the dataclass ``cls`` from ``given``; what is left out has the framework's default.

    Raises:
        UnknownOptionError: a name that ``cls`` does not have; the message holds near matches.
        ValueError: a switch that is not True or False.
    """
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise UnknownOptionError(
                f"{name} is not an option of {framework}, which has {list(known)}.{near(name, known)}"
            )
        if known[name].type == "bool":
            check_bool(**{name: value})
    return cls(**given)


def warn_no_effect(options: Any, names: Iterable[str], why: str, *, framework: str) -> None:
    """Warn about each of ``names`` whose value is not its default: the framework does not read it, and says nothing.

    Args:
        options: the dataclass that :func:`read_options` built.
        names: its fields.
        why: e.g. ``"without rollout_rs"``.
        framework: its name.
    """
    defaults = {item.name: item.default for item in fields(options)}
    for name in names:
        value = getattr(options, name)
        if value != defaults[name]:
            tell(f"{name}={value!r} has no effect {why}, in {framework} as here.", stacklevel=5)


def tell(message: str, *, stacklevel: int = 4) -> None:
    """A UserWarning; its place is the caller of ``from_<framework>`` if that calls a function that calls this."""
    warnings.warn(message, UserWarning, stacklevel=stacklevel)
