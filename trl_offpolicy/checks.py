"""Checks of settings: every message names the field, the expected and the actual value.

The checks called ``..._or_none`` are for settings that may be left open. For all others None is an error like any other
wrong value. Numbers are int or float, never bool or text.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

_LARGEST = sys.float_info.max


def check_number(field: str, value: object) -> None:
    """Raise unless ``value`` is a finite int or float.

    Raises:
        ValueError: None, a string, a bool, NaN, infinity or anything else; the message names ``field``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{field} must be a finite number, but got {value!r}.")


def check_positive(**values: float) -> None:
    """Raise unless every value is a positive finite number.

    Raises:
        ValueError: the message names the field.
    """
    for field, value in values.items():
        check_number(field, value)
        if value <= 0:
            raise ValueError(f"{field} must be positive and finite, but got {value}.")


def check_positive_or_none(**values: float | None) -> None:
    """:func:`check_positive` for the values that are not None."""
    check_positive(**{field: value for field, value in values.items() if value is not None})


def check_not_negative(**values: float) -> None:
    """Raise unless every value is a finite number of at least 0.

    Raises:
        ValueError: the message names the field.
    """
    for field, value in values.items():
        check_number(field, value)
        if value < 0:
            raise ValueError(f"{field} must be at least 0, but got {value}.")


def check_fraction(**values: float) -> None:
    """Raise unless every value is in (0, 1].

    Raises:
        ValueError: the message names the field.
    """
    check_positive(**values)
    for field, value in values.items():
        if value > 1:
            raise ValueError(f"{field} must be at most 1, but got {value}.")


def check_proper_fraction(**values: float) -> None:
    """Raise unless every value is in (0, 1), with both ends excluded.

    Raises:
        ValueError: the message names the field.
    """
    for field, value in values.items():
        check_number(field, value)
        if not 0 < value < 1:
            raise ValueError(f"{field} must be a fraction in (0, 1), but got {value}.")


def check_within(field: str, value: float, least: float, most: float) -> None:
    """Raise unless ``value`` is in [least, most], with both ends included.

    Raises:
        ValueError: the message names the field.
    """
    check_number(field, value)
    if not least <= value <= most:
        raise ValueError(f"{field} must be in [{least:g}, {most:g}], but got {value}.")


def check_whole(field: str, value: object, *, least: int) -> None:
    """Raise unless ``value`` is an int of at least ``least``.

    Raises:
        ValueError: it is not; 2.0 and True do not count as ints.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field} must be a whole number of at least {least}, but got {value!r}.")


def check_bool(**values: object) -> None:
    """Raise unless every value is True or False.

    Raises:
        ValueError: the message names the field.
    """
    for field, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{field} must be True or False, but got {value!r}.")


def check_choice(field: str, value: object, allowed: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``allowed``.

    Raises:
        ValueError: the message lists the allowed values and the closest names.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{field} must be one of {list(allowed)}, but got {value!r}.{near(str(value), allowed)}")


def check_target(field: str, path: str | Path | None) -> None:
    """Raise unless a file can be written there; None passes.

    Raises:
        ValueError: the path is a folder, or its folder does not exist.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise ValueError(f"{field} must be a file, but got the folder {str(path)!r}.")
    if not Path(path).parent.is_dir():
        raise ValueError(f"{field} must be a file in an existing folder, but got {str(path)!r}.")


def read_switch(field: str, value: object, others: Collection[str]) -> bool | str:
    """A switch that also takes names: true and false, as bool or as text of a command line, or one of ``others``.

    Raises:
        ValueError: the message lists the allowed values.

    Example:
        >>> read_switch("share_prefix", "true", ["auto"]), read_switch("share_prefix", "auto", ["auto"])
        (True, 'auto')
    """
    known = {"true": True, "false": False}
    read = known.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(read, bool) or (isinstance(read, str) and read in others):
        return read
    raise ValueError(f"{field} must be true, false or one of {list(others)}, but got {value!r}.")


def schedule_steps(field: str, steps: int | None, run_steps: int) -> int:
    """Optimizer steps of a schedule: ``steps``, or without it those of the run.

    Args:
        field: the option that holds ``steps``, for the message.
        steps: what the user set; None = those of the run.
        run_steps: optimizer steps of the run; below 1 = it has no number of steps.

    Raises:
        ValueError: neither is known.
    """
    found = steps or run_steps
    if found < 1:
        raise ValueError(f"{field} must be given, because the run has no number of steps, but got None.")
    return found


def near(name: str, known: Iterable[str]) -> str:
    """The text " Did you mean ...?" with the closest names, whatever their case; empty text if none is close."""
    by_lower = {one.lower(): one for one in known}
    matches = [by_lower[one] for one in difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.4)]
    return f" Did you mean {', '.join(repr(match) for match in matches)}?" if matches else ""
