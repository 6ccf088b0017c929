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
from trl_offpolicy.migrate.shell import MACHINE, Script, machine, read_script

_CONFIG_FLAGS = ("config", "config_path", "config_file", "custom_config_path")
"""Flags of launch scripts that name a file with further settings."""
_NUMBER = re.compile(r"-(\d|\.\d)")
_OVERRIDE = re.compile(r"(\+\+|\+|~)?[\w/]+(@[\w.]+)?(\.[\w/]+)+=|~.*\.|(\+\+|\+|~)?[\w/]+@[\w.]+=")
_NAMED = re.compile(r"(\+\+|\+|~)?[A-Za-z_]\w*=")


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
    chosen = _chosen(overrides)
    raw = _read(path, chosen=chosen)
    if len(set(raw.spelled.values())) and all("-" not in name[2:] for name in raw.spelled.values()):
        flags = False
    else:
        flags = bool(raw.spelled)
    overrides = [_underscored(text) if flags else text for text in overrides]
    flat = resolve(apply_overrides(raw.flat, overrides), machine())
    known = {key: value for key, value in flat.items() if not _is_unresolved(value)}
    unknown = {key: _why_unknown(value) for key, value in flat.items() if _is_unresolved(value)}
    # as it is read on a machine without variables
    bare = resolve(apply_overrides(_read(path, {}, chosen).flat, overrides))
    filled = {key: names for key in known if (names := _variables(bare.get(key)))}
    return Settings(known, unknown, raw.spelled, raw.entry, raw.notes, path.suffix == ".toml", filled)


def _variables(value: Any) -> str:
    """The variables of the machine that a value without them names, as ``$HOME and $PWD``."""
    text = _unresolved_text(value) if _is_unresolved(value) else ""
    return " and ".join(f"${name}" for name in MACHINE if f"${{{name}}}" in text or f"${{oc.env:{name}}}" in text)


def _chosen(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides that may choose a group of ``defaults``: ``model_engine=megatron``, ``actor@place=name``."""
    pairs = [text.lstrip("+").partition("=") for text in overrides if not isinstance(text, Unresolved)]
    return {key: value for key, equals, value in pairs if equals and ("." not in key or "@" in key)}


def _read(path: Path, environment: Mapping[str, str] | None = None, chosen: Mapping[str, str] | None = None) -> _Raw:
    if path.suffix == ".py":
        raise ValueError(f"file must be YAML, TOML or a launch script, but got {str(path)!r}: Python is not read.")
    text = read_file(path)
    if path.suffix == ".toml":
        if not text.strip():
            raise ValueError(f"file must hold a mapping of options, but {str(path)!r} is empty.")
        return _Raw(_read_toml(text, path))
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return _read_launcher(text, path, environment, chosen or {})
    nested = read_yaml(text, str(path))
    if nested is None:
        raise ValueError(f"file must hold a mapping of options, but {str(path)!r} is empty.")
    if not isinstance(nested, Mapping):
        raise ValueError(f"file must hold a mapping of options, but got {str(path)!r} with a {type(nested).__name__}.")
    return _with_parents(flatten(nested), path, (path,), chosen or {})


def _read_toml(text: str, path: Path) -> Flat:
    import tomllib

    try:
        return flatten(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"file must be TOML, but got {str(path)!r} that cannot be read: {error}.") from None


def _with_parents(flat: Flat, path: Path, seen: tuple[Path, ...], chosen: Mapping[str, str]) -> _Raw:
    """The settings over those that ``defaults`` names (NeMo-RL: one path; hydra: names, ``group@place: name``).

    Args:
        flat: the file's own settings.
        path: of the file.
        seen: files that are being read; the first one's folder is where an absolute ``/group`` is looked for.
        chosen: groups that were chosen by an override (``model_engine=megatron``).
    """
    named = flat.pop("defaults", None)
    own = {group: name for one in named or [] if isinstance(one, Mapping) for group, name in one.items()}
    choices = {**own, **chosen}
    base: Flat = {}
    notes: list[str] = []
    entries = named if isinstance(named, list) else [named]
    for one in [*entries, *([] if "_self_" in entries else ["_self_"])]:
        if one == "_self_":
            base = _merged(base, flat)
            continue
        for group, name in _entries(one, choices):
            read = _default_of(group, name, path, seen, choices)
            base, notes = _merged(base, read.flat), [*notes, *read.notes]
    return _Raw(base, notes=tuple(notes))


def _entries(entry: Any, choices: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(the group with its place, the name of a file) of an entry of ``defaults``; null names none."""
    found: list[tuple[str, str]] = []
    for group, given in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
        names = choices.get(group, given)
        for name in names if isinstance(names, list) else [names]:
            if name is not None:
                filled = re.sub(r"\$\{([\w@/.]+)\}", lambda match: str(choices.get(match[1], match[0])), str(name))
                found.append((str(group), filled))
    return found


def _default_of(group: str, name: str, path: Path, seen: tuple[Path, ...], choices: Mapping[str, Any]) -> _Raw:
    """The settings of one entry, at their place (``actor@model.actor``), or a note that they are missing."""
    *words, group = group.split(" ")  # optional actor@place
    folder, at, place = group.partition("@")
    start = seen[0].parent if folder.startswith("/") else path.parent
    parent = start / folder.lstrip("/") / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not parent.is_file() or parent.resolve() in {one.resolve() for one in seen}:
        said = f"{group}: {name}" if group else name
        note = f"defaults names {said!r}, which is not beside this file: what it sets is missing here"
        return _Raw({}, notes=() if "optional" in words else (note,))
    text = read_file(parent)
    nested = read_yaml(text, str(parent))
    flat = flatten(nested if isinstance(nested, Mapping) else {})
    read = _with_parents(flat, parent, (*seen, parent), choices)
    if not at:  # the group's own path, unless the file says where it belongs
        place = ".".join(part for part in folder.split("/") if part not in ("", ".."))
        header = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
        place = header[1] if header else place
    prefix = "" if place in ("", "_global_") else f"{place}."
    return _Raw({f"{prefix}{key}": value for key, value in read.flat.items()}, notes=read.notes)


def _merged(base: Flat, over: Flat) -> Flat:
    """``over`` on top of ``base``; a value in place of a section (or the reverse) replaces it."""
    covered = {name for name in base for key in over if name.startswith(f"{key}.") or key.startswith(f"{name}.")}
    return {name: value for name, value in base.items() if name not in covered} | over


def _read_launcher(
    text: str,
    path: Path,
    environment: Mapping[str, str] | None,
    chosen: Mapping[str, str],
    seen: tuple[Path, ...] = (),
) -> _Raw:
    """The flags and overrides of a launch script, over the file that it names with --config."""
    script = read_script(text, environment)
    flat, spelled, overrides, rest = _arguments(script.words, program=bool(script.entry or script.script))
    notes = [
        f"{word} is not set in the script: what it holds is missing here"
        if isinstance(word, Unresolved)
        else f"{word} is neither --name value nor name=value: it is not read"
        for word in rest
    ]
    if script.branches:
        names = ", ".join(script.branches)
        notes.append(f"if, case, && or || may set these otherwise: {names}; the value outside of them is taken")
    if script.guessed:
        names = ", ".join(script.guessed)
        notes.append(f"if, case, && or || alone set these, and their value is taken as if they ran: {names}")
    if script.others:
        notes.append(f"the script holds {script.others + 1} trainings: the one with the most options is read")
    if script.processes is not None and script.entry.startswith(("swift", "megatron")):
        flat.setdefault("nproc_per_node", script.processes)
        spelled.setdefault("nproc_per_node", "NPROC_PER_NODE x NNODES")
    inner = _started(script, (*seen, path), environment, chosen)
    base, entry, notes = inner.flat, inner.entry or script.entry, [*inner.notes, *notes]
    spelled = {**inner.spelled, **spelled}
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
        read = _read(found, environment, {**_chosen(overrides), **chosen})
        base, notes = _merged(base, read.flat), [*notes, *read.notes]
        spelled = {key: name for key, name in spelled.items() if key in flat}
    merged = apply_overrides(_merged(base, flat), overrides)
    return _Raw(merged, spelled, entry, tuple(notes))


def _started(
    script: Script, seen: tuple[Path, ...], environment: Mapping[str, str] | None, chosen: Mapping[str, str]
) -> _Raw:
    """The settings of another script that a launch script starts with further ones; none if it starts no script.

    Args:
        script: the one that starts it.
        seen: files that are being read, the starting one last.
        environment: variables that are set before the first one begins; None = those of :func:`machine`.
        chosen: groups that were chosen by an override.
    """
    name = script.script
    if not name:
        return _Raw({})
    found = None if isinstance(name, Unresolved) else _found(name, seen[-1])
    if found is None:
        return _Raw({}, notes=(f"it starts {name}, which was not found: what that sets is missing here",))
    if found.resolve() in {one.resolve() for one in seen}:
        return _Raw({}, notes=(f"it starts {name}, which is being read already",))
    known = {**(machine() if environment is None else environment), **script.exported}
    return _read_launcher(read_file(found), found, known, chosen, seen)


def _found(name: str, script: Path) -> Path | None:
    """The file ``name`` from the working directory, the script's folder or a folder above it."""
    places = [Path(), script.parent, *script.resolve().parents]
    return next((place / name for place in places if (place / name).is_file()), None)


def _arguments(words: Sequence[str], *, program: bool) -> tuple[Flat, dict[str, str], list[str], list[str]]:
    """(flags, how they are spelled, overrides a.b=c or name=c, words that are neither).

    A word without a dot directly after a flag is the flag's value, even if it holds an equals sign.

    Args:
        words: of the command.
        program: True if they begin after the program; else the words before the first option are its name.
    """
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
        elif _OVERRIDE.match(word) or (_NAMED.match(word) and (not name or flags[name])):
            overrides.append(word)
            name = ""
        elif name and (not word.startswith("-") or _NUMBER.match(word)):
            flags[name] = [*flags[name], word]
            name = "" if name in (*_CONFIG_FLAGS, "config_name") else name  # one file
        elif program or flags or overrides:
            rest.append(word)
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
