"""Parts of a method that a configuration names, ``{type: truncate, max_weight: 2.0}``: their base and their parser.

Weights, keep terms, policy losses, advantage estimators, KL terms with their coefficients, and centres of the trust
region are parts. Each kind has a base class, a direct subclass of :class:`Part`, that holds the whole contract with its
defaults. A class of this package is known by its ``type_name``. Any other class is named by its import path:
``{type: "my_package.weights:MyWeight", ...}``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from trl_offpolicy.checks import near

if TYPE_CHECKING:
    overridable = property  # what a type checker shall take it for
else:

    class overridable:
        """The default of a value that a subclass may compute (a property) or leave to its user (a dataclass field).

        A plain property cannot be replaced by a field: it has no setter, so ``__init__`` could not set the field. This
        descriptor has no ``__set__`` at all, so the field's value lies in the instance and is found first.
        """

        def __init__(self, default: Callable[[Any], Any]) -> None:
            self.default, self.__doc__ = default, default.__doc__

        def __get__(self, part: Any, cls: type[Any] | None = None) -> Any:
            return self if part is None else self.default(part)


class Part(ABC):  # noqa: B024 - each kind says which methods must be written
    """Base of all kinds of parts. A part is a frozen, keyword-only dataclass; its fields are its options."""

    type_name: ClassVar[str] = ""
    """Its name in YAML. A class outside this package may leave it empty: its import path is its name."""

    example: ClassVar[Mapping[str, Any]] = {}
    """Values for the fields without a default, from which the docs and the property tests make an example."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A field without a default must be given, even if the base has a value of that name (``level: Level``).
        # Without this line ``dataclass`` would take the base's value as the field's default.
        for name in inspect.get_annotations(cls):
            if name not in cls.__dict__ and isinstance(getattr(cls, name, None), overridable):
                setattr(cls, name, dataclasses.field())


def types_of(kind: type[Any]) -> dict[str, type[Any]]:
    """{name in YAML: class} of the parts of this package of one kind, in the order in which they are defined.

    Args:
        kind: a base class, e.g. ``trl_offpolicy.Weight``.
    """
    return {cls.type_name: cls for cls in kind.__subclasses__() if cls.type_name and _is_ours(cls)}


def type_of(part: Part) -> str:
    """Its ``type`` in YAML: its name, else its import path; empty for a kind that is a part itself."""
    cls = type(part)
    if Part in cls.__bases__:
        return ""
    return cls.type_name if _is_ours(cls) and cls.type_name else f"{cls.__module__}:{cls.__qualname__}"


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.split(".")[0] == "trl_offpolicy"


def parse_tagged(spec: object, kind: type[Any] | Mapping[str, type[Any]], *, where: str) -> Any:
    """A part from ``{type: name, **fields}`` or its name alone; an object that is a part already is taken as it is.

    Args:
        spec: what the user wrote.
        kind: the base class of its kind, or {name: class} if nothing else may be named. If ``type`` is left out, a base
            class that is not abstract is built itself.
        where: the field's path in error messages, e.g. ``offpolicy.correction.weight``.

    Raises:
        ValueError: neither, an unknown type or option, a missing field, a wrong value; the message names ``where``.
        TypeError: a value of the wrong type, or a class of another kind.
    """
    base = kind if isinstance(kind, type) else None
    if base is not None and isinstance(spec, base):
        return spec
    types = kind if isinstance(kind, Mapping) else types_of(kind)
    if types and not isinstance(spec, str | Mapping):
        raise ValueError(f"{where} must be one of {list(types)} or a mapping with the key type, but got {spec!r}.")
    values = {"type": spec} if types and isinstance(spec, str) else dict(as_mapping(spec, where))
    if base is not None and "type" not in values and not getattr(base, "__abstractmethods__", ()):
        return build(base, values, where=where)
    name = values.pop("type", None)
    if base is not None and isinstance(name, str) and ":" in name:
        return build(imported_part(name, base, where=f"{where}.type"), values, where=where)
    if not isinstance(name, str) or name not in types:
        outside = "" if base is None else " or the path of a class of your own, 'package.module:Class'"
        got = "it is missing." if name is None else f"got {name!r}.{near(str(name), types)}"
        raise ValueError(f"{where}.type must be one of {list(types)}{outside}, but {got}")
    return build(types[name], values, where=where)


_MEANT = {
    name: ("max_weight", "high")
    for name in ("cap", "clip", "clip_max", "max", "maximum", "threshold", "truncate", "upper", "upper_bound")
} | {name: ("low",) for name in ("clip_min", "floor", "lower", "lower_bound", "min", "minimum")}
"""What papers and other frameworks call the bounds, and their names here."""


def _meant(name: str, known: Collection[str]) -> str:
    """The text " Did you mean ...?" for a name that other kits give to a bound, or for one that is near."""
    other = next((one for one in _MEANT.get(name.lower(), ()) if one in known), "")
    return f" Did you mean {other!r}?" if other else near(name, known)


def build(cls: Any, values: Mapping[str, Any], *, where: str, base: Any = None) -> Any:
    """A dataclass from a mapping of its fields; fields that are left out come from ``base``, if there is one.

    Raises:
        ValueError: an unknown or a missing field, or a wrong value, named with its path.
        TypeError: a value of the wrong type.
    """
    known = {item.name: item for item in dataclasses.fields(cls) if item.init}
    for key in values:
        if key not in known:
            hint = _meant(str(key), known)
            has = "" if hint else f", which has {list(known)}"
            raise ValueError(f"{where}.{key} is not an option of {cls.__name__}{has}.{hint}")
    no_default = dataclasses.MISSING
    required = [n for n, item in known.items() if item.default is no_default and item.default_factory is no_default]
    if base is None and (missing := [name for name in required if name not in values]):
        raise ValueError(
            f"{where}.{missing[0]} must be given for {cls.__name__} (null = open side), but it is missing."
        )
    try:
        return cls(**values) if base is None else dataclasses.replace(base, **values)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}") from error


def parse_settings(spec: object, cls: type[Any], *, where: str, short: str, choices: Collection[str]) -> Any:
    """A dataclass from a mapping of its fields, or from the value of one of them alone.

    Args:
        spec: what the user wrote.
        cls: the dataclass; an instance of it is taken as it is.
        where: the option's path in error messages.
        short: the field whose value may be given alone.
        choices: the values of that field.

    Raises:
        ValueError: another kind of value, an unknown field or a wrong value; the message names ``where``.
    """
    if isinstance(spec, cls):
        return spec
    known = {item.name: item for item in dataclasses.fields(cls)}
    needed = known[short].default is dataclasses.MISSING
    options = {short: spec} if isinstance(spec, str) else read_numbers(spec)
    if not isinstance(options, Mapping) or (needed and short not in options):
        mapping = f"a mapping with the key {short}" if needed else "a mapping"
        raise ValueError(f"{where} must be one of {list(choices)} or {mapping}, but got {spec!r}.")
    for key in options:
        if key not in known:
            raise ValueError(f"{where}.{key} must be one of {list(known)}.{near(str(key), known)}")
    try:
        return cls(**options)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def read_numbers(value: Any) -> Any:
    """The value with ``"1e-4"`` as a number, also in mappings and lists: YAML 1.1 takes it for a text.

    Example:
        >>> read_numbers({"low": "1e-4", "high": 2.0, "horizon": "1e4", "name": "2"})
        {'low': 0.0001, 'high': 2.0, 'horizon': 10000, 'name': '2'}
    """
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        number = float(value)
        whole = number.is_integer() and "." not in value
        return int(number) if whole else number
    if isinstance(value, Mapping):
        return {key: read_numbers(item) for key, item in value.items()}
    return [read_numbers(item) for item in value] if isinstance(value, list) else value


def as_mapping(spec: object, where: str) -> Mapping[str, Any]:
    """``spec`` with its numbers read (:func:`read_numbers`); it must be a mapping.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"{where} must be a mapping of options, but got {spec!r}.")
    numbers: Mapping[str, Any] = read_numbers(spec)
    return numbers


# ------------------------------------------------------------------------------------------------- paths of objects


def imported_part(path: str, kind: type[Any], *, where: str) -> type[Any]:
    """The class that ``package.module:Class`` names; it must be a part of this kind.

    Raises:
        ValueError: there is no such module or class.
        TypeError: it is no class, no subclass of ``kind`` or no dataclass, or it lacks a method.
    """
    cls = imported(path, where=where)
    contract = f"{kind.__module__}.{kind.__name__}"
    if not isinstance(cls, type):
        raise TypeError(f"{where} must name a subclass of {contract}, but got {path!r}, which is no class.")
    if missing := missing_methods(cls, getattr(kind, "__abstractmethods__", ())):
        lacks = f", which lacks the method{'s' * (len(missing) > 1)} {', '.join(missing)}"
    else:
        lacks = ", which does not derive from it"
    if missing or not issubclass(cls, kind):
        raise TypeError(f"{where} must name a subclass of {contract}, but got {path!r}{lacks}.")
    if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{where} must name a class with @dataclass(frozen=True, kw_only=True), but got {path!r}.")
    return cls


def missing_methods(cls: type[Any], names: Iterable[str]) -> list[str]:
    """Those of the methods ``names`` that a class neither defines nor inherits, sorted."""
    defined = {
        name
        for one in cls.__mro__
        for name, value in vars(one).items()
        if not getattr(value, "__isabstractmethod__", False)
    }
    return sorted(set(names) - defined)


def imported(path: str, *, where: str = "an import path") -> Any:
    """The object that ``package.module:name`` names.

    Args:
        path: import path of a class or function.
        where: the field that holds the path, for the message.

    Raises:
        ValueError: it is not such a path, or there is nothing at it.

    Example:
        >>> imported("math:sqrt")(9)
        3.0
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{where} must be 'package.module:name', but got {path!r}.")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{where} must name a module that can be imported, but got {path!r} ({type(error).__name__}: {error})."
        ) from error
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            hint = near(attribute, [one for one in vars(found) if not one.startswith("_")])
            raise ValueError(f"{where} must name something that exists in {module}, but got {path!r}.{hint}")
        found = getattr(found, attribute)
    return found


def import_path(function: Callable[..., Any]) -> str | None:
    """The path under which :func:`imported` finds a function or class; None for a lambda or a local function.

    Example:
        >>> from math import sqrt
        >>> import_path(sqrt)
        'math:sqrt'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<" in name or "." in name:
        return None
    return f"{module}:{name}"


# ---------------------------------------------------------------------------------------------- back to plain values


def plain(value: Any) -> Any:
    """Plain values (numbers, texts, lists, mappings) from which the parsers make the same object again.

    Only fields that differ from their default are written. A part also gets its ``type``.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type_of(value) if isinstance(value, Part) else ""
        written = {
            item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value) if _set(value, item)
        }
        return {"type": name, **written} if name else written
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _set(value: Any, item: dataclasses.Field[Any]) -> bool:
    """True if ``__init__`` sets the field and its value differs from the default."""
    default: Any = item.default
    if item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    return item.init and bool(getattr(value, item.name) != default)
