"""Reading another framework's options: unknown names are errors, and what has no effect there is said aloud."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from trl_offpolicy.presets.parsing import near

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
        if known[name].type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, but got {value!r}.")
    return cls(**given)


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, but got {value!r}.{near(str(value), allowed)}")


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
