"""Reading another framework's options: unknown names are errors, and what has no effect there is said aloud."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from trl_offpolicy.checks import check_bool, check_choice, near

__all__ = ["UnknownOptionError", "check_choice", "read_options", "tell", "warn_no_effect"]

Options = TypeVar("Options")
_PACKAGE = __name__.partition(".")[0]


class UnknownOptionError(TypeError, ValueError):
    """An option that the framework does not have.

    A TypeError like any unknown keyword, and a ValueError like the unknown names of
    :func:`trl_offpolicy.presets.get` and YAML.
    """


def read_options(
    cls: type[Options], given: Mapping[str, object], *, framework: str, numbers_as_text: bool = False
) -> Options:
    """Build the dataclass ``cls`` from ``given``; what is left out has the framework's default.

    Args:
        cls: the framework's options.
        given: by name.
        framework: for the messages.
        numbers_as_text: ``"1e-3"`` is a number: the framework's own reader of YAML says so, PyYAML does not.

    Raises:
        UnknownOptionError: a name that ``cls`` does not have; the message holds near matches.
        ValueError: a switch that is not True or False.
    """
    values = dict(given)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise UnknownOptionError(
                f"{name} is not an option of {framework}, which has {list(known)}.{near(name, known)}"
            )
        if known[name].type == "bool":
            check_bool(**{name: value})
        if numbers_as_text and isinstance(value, str) and known[name].type in ("float", "float | None"):
            values[name] = _number(name, value)
    return cls(**values)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, but got {text!r}.") from None


def warn_no_effect(options: Any, names: Iterable[str], why: str, *, framework: str) -> None:
    """Warn about each of ``names`` that has a value other than its default: the framework does not read it.

    Args:
        options: the dataclass that :func:`read_options` built.
        names: its fields.
        why: e.g. ``"without rollout_rs"``.
        framework: its name.
    """
    defaults = {item.name: item.default for item in fields(options)}
    for name in names:
        value = getattr(options, name)
        if value is not None and value != defaults[name]:
            tell(f"{name}={value!r} has no effect {why}, in {framework} as here.")


def tell(message: str) -> None:
    """A UserWarning; its place is the first caller outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
