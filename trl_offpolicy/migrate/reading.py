"""A configuration file of any framework as flat settings: YAML, TOML or a launch script, then the user's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_offpolicy.migrate.nested import (
    Flat,
    Unresolved,
    apply_overrides,
    flatten,
    read_file,
    read_value,
    read_yaml,
    resolve,
)
from trl_offpolicy.migrate.shell import MACHINE, read_script

_CONFIG_FLAGS = ("config", "config_path", "config_file", "custom_config_path")
"""Flags of launch scripts that name a file with further settings."""
_NUMBER = re.compile(r"-(\d|\.\d)")


@dataclass(frozen=True)
class Settings:
    """What a file says, with its interpolations and shell variables filled in.

    Args:
        values: settings by their path.
        unknown: settings whose value cannot be known here, with the reason.
        spelled: how the file spells a setting, where this is not its path (``--tis-clip``).
        entry: the program that a launch script starts.
        notes: what else to know about the file.
        toml: True for a TOML file.
        machine: settings whose value holds variables of this machine's environment, with their names (``$HOME``).
    """

    values: Mapping[str, Any]
    unknown: Mapping[str, str] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    entry: str = ""
    notes: tuple[str, ...] = ()
    toml: bool = False
    machine: Mapping[str, str] = field(default_factory=dict)

    def shown(self, key: str) -> str:
        """The setting as the file spells it."""
        return self.spelled.get(key, key)

    def sections(self) -> set[str]:
        """The first parts of all paths."""
        return {key.partition(".")[0] for key in self.values}


@dataclass(frozen=True)
class _Raw:
    """A file before interpolations are filled in."""

    flat: Flat
    spelled: Mapping[str, str] = field(default_factory=dict)
    entry: str = ""
    notes: tuple[str, ...] = ()


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a file with ``overrides`` applied in their order; the last one wins.

    Raises:
        ValueError: there is no such file, it cannot be read, or an override is none.
    """
    raw = _read(path)
    if len(set(raw.spelled.values())) and all("-" not in name[2:] for name in raw.spelled.values()):
        flags = False
    else:
        flags = bool(raw.spelled)
    overrides = [_underscored(text) if flags else text for text in overrides]
    flat = resolve(apply_overrides(raw.flat, overrides))
    known = {key: value for key, value in flat.items() if not _is_unresolved(value)}
    unknown = {key: _why_unknown(value) for key, value in flat.items() if _is_unresolved(value)}
    bare = resolve(apply_overrides(_read(path, {}).flat, overrides))  # as it is read on a machine without variables
    filled = {key: names for key in known if (names := _variables(bare.get(key)))}
    return Settings(known, unknown, raw.spelled, raw.entry, raw.notes, path.suffix == ".toml", filled)


def _variables(value: Any) -> str:
    """The variables of the machine that a value without them names, as ``$HOME and $PWD``."""
    text = _unresolved_text(value) if _is_unresolved(value) else ""
    return " and ".join(f"${name}" for name in MACHINE if f"${{{name}}}" in text)


def _read(path: Path, environment: Mapping[str, str] | None = None) -> _Raw:
    text = read_file(path)
    if path.suffix == ".toml":
        return _Raw(_read_toml(text, path))
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return _read_launcher(text, path, environment)
    nested = read_yaml(text, str(path))
    if nested is None:
        raise ValueError(f"file must hold a mapping of options, but {str(path)!r} is empty.")
    if not isinstance(nested, Mapping):
        raise ValueError(f"file must hold a mapping of options, but got {str(path)!r} with a {type(nested).__name__}.")
    return _with_parents(flatten(nested), path, seen=(path,))


def _read_toml(text: str, path: Path) -> Flat:
    import tomllib

    try:
        return flatten(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"file must be TOML, but got {str(path)!r} that cannot be read: {error}.") from None


def _with_parents(flat: Flat, path: Path, seen: tuple[Path, ...]) -> _Raw:
    """The settings over those of the file that ``defaults`` names (NeMo-RL: one path; hydra: a list of names)."""
    named = flat.pop("defaults", None)
    base: Flat = {}
    notes: list[str] = []
    for one in named if isinstance(named, list) else [named]:
        if not isinstance(one, str) or one == "_self_":
            continue
        parent = path.parent / (one if one.endswith((".yaml", ".yml")) else f"{one}.yaml")
        if not parent.is_file() or parent in seen:
            notes.append(f"defaults names {one!r}, which is not beside this file: what it sets is missing here")
            continue
        nested = read_yaml(read_file(parent), str(parent))
        read = _with_parents(flatten(nested if isinstance(nested, Mapping) else {}), parent, (*seen, parent))
        base, notes = _merged(base, read.flat), [*notes, *read.notes]
    return _Raw(_merged(base, flat), notes=tuple(notes))


def _merged(base: Flat, over: Flat) -> Flat:
    """``over`` on top of ``base``; a value in place of a section (or the reverse) replaces it."""
    covered = {name for name in base for key in over if name.startswith(f"{key}.") or key.startswith(f"{name}.")}
    return {name: value for name, value in base.items() if name not in covered} | over


def _read_launcher(text: str, path: Path, environment: Mapping[str, str] | None) -> _Raw:
    """The flags and overrides of a launch script, over the file that it names with --config."""
    script = read_script(text, environment)
    flat, spelled, overrides, rest = _arguments(script.words)
    notes = [f"{word} is not set in the script: what it holds is missing here" for word in rest]
    if script.branches:
        names = ", ".join(script.branches)
        notes.append(f"if, case, && or || may set these otherwise: {names}; the value outside of them is taken")
    base: Flat = {}
    if isinstance(flat.get("config_name"), str):  # hydra's --config-path FOLDER --config-name NAME
        named = flat.pop("config_name").removesuffix(".yaml")
        flat["config_path"] = f"{flat.get('config_path', '.')}/{named}.yaml"
        spelled.setdefault("config_path", "--config-name")
    for name in _CONFIG_FLAGS:
        if not isinstance(flat.get(name), str) or isinstance(flat[name], Unresolved):
            continue
        found = _found(flat[name], path)
        if found is None:
            notes.append(f"{spelled[name]} names {flat[name]!r}, which was not found: what it sets is missing here")
            continue
        del flat[name]
        read = _read(found, environment)
        base, notes = _merged(base, read.flat), [*notes, *read.notes]
        spelled = {key: name for key, name in spelled.items() if key in flat}
    merged = apply_overrides(_merged(base, flat), overrides)
    return _Raw(merged, spelled, script.entry, tuple(notes))


def _found(name: str, script: Path) -> Path | None:
    """The file ``name`` from the working directory, the script's folder or a folder above it."""
    places = [Path(), script.parent, *script.resolve().parents]
    return next((place / name for place in places if (place / name).is_file()), None)


def _arguments(words: Sequence[str]) -> tuple[Flat, dict[str, str], list[str], list[str]]:
    """(flags, how they are spelled, overrides a.b=c, words that are neither)."""
    flags: dict[str, list[str]] = {}
    spelled: dict[str, str] = {}
    overrides: list[str] = []
    rest: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            spelled[name] = f"--{flag}"
            flags[name] = [Unresolved(value) if isinstance(word, Unresolved) else value] if equals else []
            name = "" if equals else name
        elif re.fullmatch(r"\$\{\w+\[[@*]\]\}", word):  # an array: flags, not the value of one
            rest.append(word)
        elif re.match(r"(\+\+|\+|~)?[\w/]+(\.[\w/]+)+=", word) or (word.startswith("~") and "." in word):
            overrides.append(word)
            name = ""
        elif name and (not word.startswith("-") or _NUMBER.match(word)):
            flags[name] = [*flags[name], word]
    return {key: _flag_value(value) for key, value in flags.items()}, spelled, overrides, rest


def _flag_value(words: list[str]) -> Any:
    """True for a flag without a value, a list for several values."""
    if not words:
        return True
    if any(isinstance(word, Unresolved) for word in words):
        return Unresolved(" ".join(words))
    values = [read_value(word) for word in words]
    return values[0] if len(values) == 1 else values


def _underscored(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key.replace('-', '_')}{equals}{value}"


def _is_unresolved(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, Unresolved) for item in items)


def _unresolved_text(value: Any) -> str:
    items = value if isinstance(value, list) else [value]
    return next(str(item) for item in items if isinstance(item, Unresolved))


def _why_unknown(value: Any) -> str:
    text = _unresolved_text(value)
    if text == "???":
        return "the file leaves it to be set (???)"
    return f"its value, {text}, cannot be known here; give it as an override"
