"""Nested mappings as flat ones (``{"a.b": 1}``): YAML with OmegaConf's numbers, interpolations, hydra's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Flat = dict[str, Any]

_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w@/.-]+)(=(?P<value>.*))?", re.DOTALL)
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_FLOAT = r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
_TEXT = "'\""
MISSING_VALUE = "???"
"""OmegaConf's mark of a value that the user must set."""


class Unresolved(str):
    """The text of a value that cannot be known here, e.g. a shell variable that the script does not set."""


def read_yaml(text: str, where: str) -> Any:
    """What a YAML text says, with 1e-6 as a number, as OmegaConf reads it (PyYAML alone reads a text).

    Raises:
        ValueError: it is no YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    resolvers = {
        first: [(tag, regexp) for tag, regexp in found if tag != "tag:yaml.org,2002:float"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.yaml_implicit_resolvers = resolvers
    number = re.compile(rf"^(?:{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be YAML, but got a text that cannot be read: {error}.") from None


def read_value(text: str) -> Any:
    """The value of ``key=text`` or ``--flag text``: a number, true, null, a list; anything else is the text itself."""
    stripped = text.strip()
    if isinstance(text, Unresolved):
        return text
    if len(stripped) > 1 and stripped[0] in _TEXT and stripped[-1] == stripped[0]:
        return stripped[1:-1]
    try:
        found = read_yaml(stripped, "value")
    except ValueError:
        return stripped
    plain = bool | int | float | None
    if isinstance(found, plain) or (isinstance(found, list) and stripped.startswith("[")):
        return found
    return stripped


def flatten(nested: Mapping[Any, Any], prefix: str = "") -> Flat:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``. Lists are values, an empty mapping is one too."""
    flat: Flat = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def apply_overrides(flat: Mapping[str, Any], overrides: Sequence[str]) -> Flat:
    """``flat`` with hydra's overrides in their order: ``a.b=c``, ``+a.b=c``, ``++a.b=c``, ``~a.b``; the last one wins.

    Raises:
        ValueError: a text that is no override.
    """
    found = dict(flat)
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        if match is None or (match["value"] is None) != (match["sign"] == "~" and "=" not in text):
            raise ValueError(f"override must be a.b=c, +a.b=c or ~a.b, but got {text!r}.")
        key = match["key"]
        inside = [name for name in found if name == key or name.startswith(f"{key}.")]
        if match["sign"] == "~" or match["value"] is not None:
            for name in inside:  # a section is replaced as a whole
                del found[name]
        if match["sign"] != "~":
            value = match["value"]
            found[key] = read_value(Unresolved(value) if isinstance(text, Unresolved) else value)
    return found


def resolve(flat: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Flat:
    """``flat`` with its interpolations filled in: ``${a.b}``, ``${.a}``, ``${oc.select:a,0}``, ``${oc.env:A,0}``.

    What cannot be filled in becomes an :class:`Unresolved` text.

    Args:
        flat: settings by their path.
        environment: the variables that ``oc.env`` knows; None = none.
    """
    return {key: _filled(value, key, flat, environment or {}, depth=0) for key, value in flat.items()}


def _filled(value: Any, key: str, flat: Mapping[str, Any], environment: Mapping[str, str], depth: int) -> Any:
    if isinstance(value, list):
        return [_filled(item, key, flat, environment, depth) for item in value]
    if not isinstance(value, str) or isinstance(value, Unresolved):
        return value
    if value == MISSING_VALUE or depth > 20:  # a circle
        return Unresolved(value)
    while (match := _INNERMOST.search(value)) is not None:
        known, inner = _looked_up(match[1].strip(), key, flat, environment, depth)
        if not known:
            return Unresolved(value)
        if match[0] == value:
            return inner
        value = value[: match.start()] + str(inner) + value[match.end() :]
    return value


def _looked_up(
    expression: str, key: str, flat: Mapping[str, Any], environment: Mapping[str, str], depth: int
) -> tuple[bool, Any]:
    """(whether it is known, the value) of what stands in ``${...}``."""
    name, colon, rest = expression.partition(":")
    arguments = [part.strip() for part in rest.split(",")] if colon else []
    if not colon or name == "oc.select":
        path = _absolute(expression if not colon else arguments[0], key)
        if path in flat:
            found = _filled(flat[path], path, flat, environment, depth + 1)
            return not isinstance(found, Unresolved), found
        inside = {name[len(path) + 1 :]: value for name, value in flat.items() if name.startswith(f"{path}.")}
        if inside:
            return True, inside
        return (True, read_value(arguments[1])) if len(arguments) > 1 else (False, None)
    if name == "oc.env":
        if arguments[0] in environment:
            return True, read_value(environment[arguments[0]])
        return (True, read_value(arguments[1])) if len(arguments) > 1 else (False, None)
    numbers = [read_value(part) for part in arguments]
    if name in ("mul", "div", "add", "sub", "max", "min") and all(isinstance(one, int | float) for one in numbers):
        return True, _computed(name, numbers)
    return False, None


def _computed(name: str, numbers: Sequence[float]) -> float:
    """NeMo-RL's resolvers."""
    first, second = numbers[0], numbers[-1]
    results = {
        "mul": first * second,
        "div": first // second if second and first % second == 0 else first / second if second else 0,
        "add": sum(numbers),
        "sub": first - second,
        "max": max(numbers),
        "min": min(numbers),
    }
    return results[name]


def _absolute(path: str, key: str) -> str:
    """``.a`` is beside ``key``, ``..a`` one section above."""
    dots = len(path) - len(path.lstrip("."))
    if dots == 0:
        return path
    sections = key.split(".")[:-dots]
    return ".".join([*sections, path[dots:]])


def read_file(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: there is no such file, or it is no text.
    """
    if path.is_dir():
        raise ValueError(f"file must be a file, but {str(path)!r} is a folder: name the configuration in it.")
    if not path.is_file():
        raise ValueError(f"file must be an existing file, but got {str(path)!r}.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"file must be a text file, but got {str(path)!r}.") from None
