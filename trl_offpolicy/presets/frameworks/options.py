"""Reading another framework's options: an unknown name is an error, and an option without effect gives a warning."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from trl_offpolicy.checks import check_choice, near

__all__ = ["UnknownOptionError", "check_choice", "is_number", "read_options", "tell", "warn_no_effect"]

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
    """Build the dataclass ``cls`` from ``given``; an option that is left out has the framework's default.

    Args:
        cls: the framework's options.
        given: the user's options by name.
        framework: its name, for the messages.
        numbers_as_text: read ``"1e-3"`` as a number, as the framework's own YAML reader does and PyYAML does not.

    Raises:
        UnknownOptionError: a name that ``cls`` does not have; the message lists near matches.
        ValueError: a value of another kind than the option's (None, NaN, text for a number, ...).
    """
    values = dict(given)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise UnknownOptionError(
                f"{name} is not an option of {framework}, which has {list(known)}.{near(name, known)}"
            )
        if numbers_as_text and isinstance(value, str) and known[name].type in ("float", "float | None"):
            values[name] = _number(name, value)
        _check_kind(name, values[name], str(known[name].type).split(" | "))
    return cls(**values)


def is_number(value: object) -> bool:
    """True for int and float, also for infinity, which means "no bound" (bounds.py); False for bool and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", is_number),
    "str": ("text", lambda value: isinstance(value, str)),
    "None": ("None", lambda value: value is None),
}


def _check_kind(name: str, value: object, kinds: list[str]) -> None:
    """Raise unless ``value`` is of one of the ``kinds`` of an annotation, also if the framework would not read it.

    Other kinds than those of ``_KINDS`` (sequences) are checked where they are read.
    """
    if any(kind not in _KINDS or _KINDS[kind][1](value) for kind in kinds):
        return
    expected = " or ".join(_KINDS[kind][0] for kind in kinds)
    raise ValueError(f"{name} must be {expected}, but got {value!r}.")


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
        why: the reason, e.g. ``"without rollout_rs"``.
        framework: its name.
    """
    defaults = {item.name: item.default for item in fields(options)}
    for name in names:
        value = getattr(options, name)
        if value is not None and value != defaults[name]:
            tell(f"{name}={value!r} has no effect {why}, in {framework} as here.")


def tell(message: str) -> None:
    """Give a UserWarning that points at the first caller outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
