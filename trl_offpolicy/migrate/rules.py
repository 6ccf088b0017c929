"""What becomes of a setting: rows of a framework's table, and what a table makes of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from trl_offpolicy.checks import check_choice
from trl_offpolicy.migrate.reading import Settings

Convert = Callable[[str, Any], Any]
"""(the setting's name, its value) -> our value. Raises ValueError: the name, what was expected, what was given."""
UNKNOWN = "unknown to this kit"


@dataclass(frozen=True)
class Carried:
    """Settings that became fields here.

    Args:
        keys: the settings that were read; empty where the framework's own default is written out.
        fields: our fields with their values. ``offpolicy.objective.kl`` is a path into ``offpolicy``. ``option.name``
            is an option of ``presets.from_<framework>``.
        why: how the meaning was kept, in words; empty if only the name changes.
        older: the settings have another name in newer versions of the framework.
    """

    keys: tuple[str, ...]
    fields: Mapping[str, Any]
    why: str = ""
    older: bool = False


@dataclass(frozen=True)
class Left:
    """Settings that were not carried, with the reason.

    Args:
        keys: the settings.
        why: the reason.
        pattern: what they have in common, e.g. ``critic.*``; empty if nothing.
        to_set: our fields that the user must write instead, unless something else of the file gives them, each with
            what to write.
        default: without keys, ``pattern`` is a setting whose default is meant; False: another part of the file, such
            as the program that it starts.
    """

    keys: tuple[str, ...]
    why: str
    pattern: str = ""
    to_set: Mapping[str, str] = field(default_factory=dict)
    default: bool = True


Found = Carried | Left


@dataclass(frozen=True)
class Row:
    """One setting that becomes one field.

    Args:
        to: our field.
        convert: its value here; raises ValueError for a wrong one.
        default: the framework's default, which is written out if the file has other settings of that section; None =
            ours is the same, or it has none.
        why: how the meaning was kept, if not only the name changes.
        null: why a null is not carried.
    """

    to: str
    convert: Convert
    default: Any = None
    why: str = ""
    null: str = "null: not set"


@dataclass(frozen=True)
class Source:
    """The settings of a file together with the defaults of the framework, as the functions of a table read them."""

    settings: Settings
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The file's value; else the framework's default if the file has other settings of its section."""
        if key in self.settings.values:
            return self.settings.values[key]
        if key in self.settings.unknown:
            return None
        if "." in key and key.partition(".")[0] not in self.settings.sections():
            return otherwise
        return self.defaults.get(key, otherwise)

    def given(self, *keys: str) -> tuple[str, ...]:
        """Those of the settings that the file has."""
        return tuple(key for key in keys if key in self.settings.values)

    def unknown(self, *keys: str) -> tuple[str, ...]:
        """Those of the settings that the file has with a value that cannot be known here."""
        return tuple(key for key in keys if key in self.settings.unknown)

    def has(self, *keys: str) -> bool:
        """True if the file has one of the settings."""
        return bool(self.given(*keys))


@dataclass(frozen=True)
class Framework:
    """How one framework's configuration is read.

    Args:
        name: as in ``offpolicy: {framework: name}``.
        marks: patterns of settings by which a file is recognised.
        entries: parts of the program's name by which a launch script is recognised.
        options: settings that ``presets.from_<name>`` reads, with the option's name there.
        rows: settings that become one field each.
        steps: functions that read several settings together.
        left: patterns of settings that are not carried, with the reason.
        defaults: the framework's defaults that the functions read.
        renamed: older names of settings, which are read as the newer ones.
        prefixes: sections that users give alone, with their place in the whole configuration.
        beside: settings under such a short name that are another section's in a file that has the whole place as well.
        empty: sections that act even if they are empty.
    """

    name: str
    marks: tuple[str, ...]
    options: Mapping[str, str]
    rows: Mapping[str, Row]
    steps: tuple[Callable[[Source], Iterable[Found]], ...]
    left: Mapping[str, str]
    entries: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    def is_started_by(self, settings: Settings) -> bool:
        """True if the script starts a program of this framework."""
        return any(part in settings.entry for part in self.entries)

    def has_marks(self, settings: Settings) -> bool:
        """True if the file has settings that only this framework has."""
        keys = [*settings.values, *settings.unknown]
        return any(fnmatchcase(key, mark) for key in keys for mark in self.marks)


@dataclass(frozen=True)
class Migration:
    """What a file becomes here.

    Args:
        framework: its name.
        options: options of ``presets.from_<framework>``.
        option_keys: the setting that gave each option.
        found: settings that were carried or left, in the order of the table, then of the file.
        notes: what else to know about the file.
        settings: the file.
    """

    framework: str
    options: Mapping[str, Any]
    option_keys: Mapping[str, str]
    found: tuple[Found, ...]
    notes: tuple[str, ...]
    settings: Settings


def translate(framework: Framework, settings: Settings) -> Migration:
    """Every setting of a file as carried or left; none is dropped silently.

    Raises:
        ValueError: a setting has a value that the framework does not take.
    """
    settings = _newer_names(framework, settings)
    found: list[Found] = []
    source = Source(settings, framework.defaults)
    for step in framework.steps:
        found += step(source)
    taken = {key for one in found for key in one.keys}
    found += _rows(framework, source, taken)
    options, keys = _options(framework, settings, found)
    taken |= {key for one in found for key in one.keys} | set(keys.values())
    rest = [key for key in settings.values if key not in taken]
    found += [Left((key,), _why_unknown(framework, key, why)) for key, why in settings.unknown.items()]
    found += _left(framework, rest)
    return Migration(framework.name, options, keys, tuple(found), settings.notes, settings)


def _options(framework: Framework, settings: Settings, found: Iterable[Found]) -> tuple[dict[str, Any], dict[str, str]]:
    """(options of the correction, the setting that gave each).

    Raises:
        ValueError: two settings give one option different values.
    """
    stepped = [one for one in found if isinstance(one, Carried)]
    taken = {key for one in found for key in one.keys}
    options: dict[str, Any] = {}
    keys: dict[str, str] = {}
    direct = [(key, option) for key, option in framework.options.items() if key in settings.values and key not in taken]
    given = [(key, option, settings.values[key]) for key, option in direct]
    for one in stepped:
        for path, value in one.fields.items():
            if path.startswith("option."):
                option = path.removeprefix("option.")
                given.append((one.keys[0] if one.keys else f"{option} (the framework's default)", option, value))
    for key, option, value in given:
        if option in options and options[option] != value:
            both = f"{settings.shown(keys[option])} and {settings.shown(key)}"
            raise ValueError(f"{both} must be the same, but got {options[option]!r} and {value!r}.")
        options[option] = value
        keys.setdefault(option, key)
    return options, keys


def _left(framework: Framework, keys: Iterable[str]) -> list[Found]:
    """Settings that are not carried, those of one pattern together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        pattern, why = reason(framework, key)
        grouped.setdefault((pattern, why), []).append(key)
    return [Left(tuple(found), why, pattern) for (pattern, why), found in grouped.items()]


def _newer_names(framework: Framework, settings: Settings) -> Settings:
    """The settings under their newer names and in their sections; empty sections that mean nothing are left out.

    Raises:
        ValueError: an older and the newer name of a setting have different values.
    """
    spelled = dict(settings.spelled)
    keys = (*settings.values, *settings.unknown)
    newer_of = {key: _newer(framework, key, keys) for key in (*keys, *settings.machine)}

    def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in given.items():
            newer = newer_of[key]
            if newer != key and value is None and newer in given:
                continue  # an older name that is not set
            if values.get(newer) is not None and values[newer] != value:
                both = f"{spelled.get(newer, newer)} and {settings.shown(key)}"
                raise ValueError(f"{both} must be the same, but got {values[newer]!r} and {value!r}.")
            if newer != key:
                older = f" (now {newer})" if key in framework.renamed else ""
                spelled[newer] = f"{settings.shown(key)}{older}"
            if value != {} or newer in framework.empty:
                values[newer] = value
        return values

    known, unknown = renamed(settings.values), renamed(settings.unknown)
    machine = {newer_of[key]: names for key, names in settings.machine.items()}
    return Settings(known, unknown, spelled, settings.entry, settings.notes, settings.toml, machine)


def _newer(framework: Framework, key: str, keys: Iterable[str]) -> str:
    if key in framework.renamed:
        return framework.renamed[key]
    for short, section in framework.prefixes.items():
        if key.startswith(f"{short}."):
            if key in framework.beside and any(other.startswith(f"{section}.") for other in keys):
                return key
            return f"{section}{key[len(short) :]}"
    return key


def _why_unknown(framework: Framework, key: str, why: str) -> str:
    """Why a setting without a known value is not carried: the table's reason if no value would be."""
    reads = key in framework.rows or key in framework.options or key in framework.defaults
    tables = reason(framework, key)[1]
    return why if reads or tables.startswith(UNKNOWN) else tables


def _rows(framework: Framework, source: Source, taken: set[str]) -> list[Found]:
    found: list[Found] = []
    for key, row in framework.rows.items():
        if key in taken:
            continue
        if source.has(key):
            value = _converted(row, source.settings.shown(key), source.settings.values[key])
            if value is not None:
                found.append(Carried((key,), {row.to: value}, row.why))
            else:
                found.append(Left((key,), row.null))
        elif row.default is not None and key not in source.settings.unknown and _near(key, source):
            found.append(Carried((), {row.to: row.default}, f"the default of {key}"))
    return found


def _converted(row: Row, name: str, value: Any) -> Any:
    """The value here; None for a null, unless the row has a meaning for it."""
    try:
        return row.convert(name, value)
    except ValueError:
        if value is None:
            return None
        raise


def _near(key: str, source: Source) -> bool:
    """True if the file has other settings of the section, so that the default of this one was meant."""
    return "." not in key or key.partition(".")[0] in source.settings.sections()


def reason(framework: Framework, key: str) -> tuple[str, str]:
    """(the pattern of the table, why a setting is not carried)."""
    for pattern, why in framework.left.items():
        if fnmatchcase(key, pattern):
            return pattern, why
        if fnmatchcase(key, f"{pattern}.*"):
            return f"{pattern}.*", why
    if key in framework.defaults:  # a step reads it, but found too little to use it
        return "", "it acts only together with settings that are not given here"
    meant = _meant(key, {*framework.rows, *framework.options, *framework.defaults} - {key})
    return "", f"{UNKNOWN}{f' (did you mean {meant}?)' if meant else ''}"


def _meant(key: str, known: Iterable[str]) -> str:
    """The setting whose last part is near; first of the same section. A long section in common is not enough."""
    section, _, name = key.rpartition(".")
    near = {one: one.rpartition(".") for one in sorted(known) if get_close_matches(one.rpartition(".")[2], [name])}
    beside = {last: one for one, (before, _, last) in near.items() if before == section}
    if found := get_close_matches(name, beside, n=1):
        return beside[found[0]]
    return next(iter(get_close_matches(key, near, n=1, cutoff=0.85)), "")


# --------------------------------------------------------------------------------------------------------- conversions


def number(key: str, value: Any) -> float | int:
    """A number.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, but got {value!r}.")
    return value


def drawn(key: str, value: Any) -> float | int:
    """A temperature of training, at which tokens are drawn.

    Raises:
        ValueError: it is no number above 0.
    """
    temperature = number(key, value)
    if temperature <= 0:
        raise ValueError(f"{key} must be above 0, since the loss divides by it, but got {value!r}.")
    return temperature


def whole(key: str, value: Any) -> int:
    """A whole number; 512.0 counts as one.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{key} must be a whole number, but got {value!r}.")
    return int(value)


def count(key: str, value: Any) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: it is none.
    """
    if whole(key, value) < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, but got {value!r}.")
    return int(value)


def switch(key: str, value: Any) -> bool:
    """True or False.

    Raises:
        ValueError: it is neither.
    """
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, but got {value!r}.")
    return value


def text(key: str, value: Any) -> str:
    """A text; a number counts as one.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{key} must be a text, but got {value!r}.")
    return str(value)


def plain(key: str, value: Any) -> Any:
    """Any value, as it is."""
    return value


def optional(convert: Convert) -> Convert:
    """``convert`` for what is not null; null is not carried."""
    return lambda key, value: None if value is None else convert(key, value)


def one_of(*allowed: str) -> Convert:
    """A choice, as it is.

    Raises:
        ValueError: another value.
    """

    def read(key: str, value: Any) -> str:
        check_choice(key, value, allowed)
        return str(value)

    return read


def strategy(key: str, value: Any) -> str:
    """``save_strategy`` and its like; YAML reads a bare ``no`` as false, and null is "no" as well."""
    return "no" if value is False or value is None else text(key, value)


def top_k(key: str, value: Any) -> int:
    """TRL's 0 for the -1 (or null) by which others mean "no top-k"."""
    return max(whole(key, value), 0) if value is not None else 0
