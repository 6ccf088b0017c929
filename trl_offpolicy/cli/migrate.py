"""The command ``trl-offpolicy migrate``: a configuration of another framework in this kit's YAML."""

from __future__ import annotations

import argparse
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_offpolicy.checks import check_target

if TYPE_CHECKING:
    from trl_offpolicy.migrate import Migration
    from trl_offpolicy.presets import Preset

NO_OPTIONS = "measure"
OPEN = ("loss_mode", "loss_agg_mode", "adv_estimator")
"""Options of verl whose values its users' own code may add to; one that is unknown here is left, not an error."""


def migrate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Print a configuration of verl, SkyRL, slime, AReaL, OpenRLHF, NeMo-RL, prime-rl, ms-swift or TRL in our YAML."""
    from trl_offpolicy.migrate import NAMES

    parser.add_argument("file", metavar="FILE", type=Path, help="YAML, TOML, or the script that starts the training")
    parser.add_argument(
        "overrides",
        metavar="A.B=C",
        nargs="*",
        default=[],
        help="settings in the framework's names, over the file; the last wins",
    )
    parser.add_argument("--framework", choices=NAMES, help="whose configuration FILE is (default: by its settings)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="write the YAML and, as comments, the lists here, and print the lists (default: print both)",
    )

    def run(args: argparse.Namespace) -> int:
        check_target("--output", args.output)
        text, lists = migrated(args.file, args.overrides, name=args.framework)
        whole = "\n".join([text, *(f"# {line}" for line in _wrapped(lists))])
        if args.output is None:
            print(whole)
        else:
            args.output.write_text(f"{whole}\n", encoding="utf-8")
            print(*_wrapped(lists), f"written: {args.output}", sep="\n")
        return 0

    return run


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Lines of at most 116 characters; what follows is indented deeper."""
    found = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        further = " " * (indent + 4)
        found += textwrap.wrap(
            line, 116, subsequent_indent=further, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
    return found


def migrated(path: Path, overrides: Sequence[str] = (), *, name: str | None = None) -> tuple[str, list[str]]:
    """(our YAML, the lines of the lists) of a configuration of another framework.

    Raises:
        ValueError: the file, its framework, an override or a value is wrong.
    """
    from trl_offpolicy.migrate import migrate as read
    from trl_offpolicy.migrate import page
    from trl_offpolicy.presets.parsing import plain_method

    migration = read(path, overrides, name=name)
    preset, refused, notes = _method(migration)
    migration = _with_refused(migration, refused)
    method = plain_method(preset)
    fields = page.training_fields(migration.found)
    own = {part: value for part, value in method.items() if part != "preset" and value not in ({}, None)}
    options_to = _places(migration, refused, preset)
    offpolicy = _with_steps(own, page.method_fields(migration.found))
    formula = _formula(offpolicy)
    fields = {**fields, "offpolicy": offpolicy or NO_OPTIONS}
    missing = page.still_to_set(migration.framework, fields, migration.found)
    command = f"trl-offpolicy migrate {' '.join([str(path), *overrides])}"
    head = f"# From {migration.framework}: {command}\n"
    meant = {name: f"to set, {said}" for name, said in missing.items()}
    text = head + page.yaml_text({**fields, **dict.fromkeys(missing, page.TO_SET)}, {"offpolicy": formula, **meant})
    lines = page.lists(migration, options_to, notes, missing.values())
    return text, lines


def _method(migration: Migration) -> tuple[Preset, Mapping[str, str], list[str]]:
    """(the correction and the loss, options that have no counterpart here with the reason, what else was said)."""
    from trl_offpolicy.presets import FRAMEWORKS, UnknownOptionError

    options = dict(migration.options)
    refused: dict[str, str] = {}
    while True:
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                preset = FRAMEWORKS[migration.framework](**options)
            return preset, refused, [str(one.message) for one in said]
        except UnknownOptionError:
            raise
        except (NotImplementedError, ValueError) as error:
            name = _to_leave(error, options)
            if name is None:
                raise ValueError(_named(str(error), migration)) from None
            refused[name] = str(error)
            del options[name]


def _to_leave(error: Exception, options: Mapping[str, Any]) -> str | None:
    """The option that has no counterpart here and is left; None if the error is the file's own."""
    message = str(error)
    if isinstance(error, NotImplementedError):
        given = next((name for name in options if message.startswith(name)), None)
    else:
        given = next((name for name in OPEN if name in options and message.startswith(f"{name} ")), None)
    if given is None and "use_kl_loss" in options and message.startswith("loss_agg_mode "):
        return "use_kl_loss"  # the default of loss_agg_mode does not go with a KL term in this loss
    return given


def _named(message: str, migration: Migration) -> str:
    """The message with the setting's path in place of the option's name."""
    for option, key in migration.option_keys.items():
        if message.startswith(f"{option} "):
            return migration.settings.shown(key) + message.removeprefix(option)
    return message


def _with_refused(migration: Migration, refused: Mapping[str, str]) -> Migration:
    from trl_offpolicy.migrate import Left
    from trl_offpolicy.migrate.shared import ADVANTAGES_TO_SET, LOSS_TO_SET

    instead = {"loss_mode": LOSS_TO_SET, "policy_loss_type": LOSS_TO_SET, "adv_estimator": ADVANTAGES_TO_SET}
    left = tuple(
        Left((migration.option_keys[name],), why.removesuffix("."), to_set=instead.get(name, {}))
        for name, why in refused.items()
    )
    return replace(migration, found=(*migration.found, *left))


def _with_steps(own: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """The method with what the table's steps add to it; lists (of keep terms) are joined."""
    result = dict(own)
    for name, value in steps.items():
        before = result.get(name)
        if isinstance(value, dict) and isinstance(before, dict) and "type" not in value:
            result[name] = _with_steps(before, value)
        else:
            result[name] = [*before, *value] if isinstance(value, list) and isinstance(before, list) else value
    return result


def _formula(offpolicy: Mapping[str, Any]) -> str:
    """The correction in one line; this also reads what is printed, as a configuration would."""
    from trl_offpolicy.objective.objective import Objective
    from trl_offpolicy.presets.parsing import parse_advantages, parse_correction, parse_objective
    from trl_offpolicy.presets.text import formula_of

    where = "offpolicy.correction"
    objective = parse_objective(offpolicy.get("objective", {}), where="offpolicy.objective", base=Objective())
    objective = replace(objective, correction=parse_correction(offpolicy.get("correction", {}), where=where))
    parse_advantages(offpolicy.get("advantages"), where="offpolicy.advantages")
    return formula_of(objective)


def _places(migration: Migration, refused: Mapping[str, str], preset: Preset) -> dict[str, str]:
    """Where each option of the correction went, by its setting: the parts that change if it is left out.

    A framework's own default changes nothing if it is left out. Where the YAML holds it all the same, its place is
    found by another value.
    """
    options = {name: value for name, value in migration.options.items() if name not in refused}
    whole = _flat_method(migration.framework, options) or {}
    places: dict[str, dict[str, None]] = {}
    for name in options:
        without = {other: value for other, value in options.items() if other != name}
        found = places.setdefault(migration.option_keys[name], {})
        changed = _changed(whole, _flat_method(migration.framework, without))
        if changed is None:  # the others need it
            found["offpolicy"] = None
        elif changed:
            found.update(dict.fromkeys(map(_part_of, changed)))
        elif held := _held(migration.framework, options, name, whole):
            found[f"written as {held}"] = None
    nothing = "nothing to write: the default, or without effect"
    return {key: ", ".join(found) or nothing for key, found in places.items()}


def _flat_method(name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The method of a framework's options as ``{"offpolicy.correction.weight.type": ...}``; None if they are wrong."""
    from trl_offpolicy.migrate.nested import flatten
    from trl_offpolicy.presets import FRAMEWORKS
    from trl_offpolicy.presets.parsing import plain_method

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return flatten({"offpolicy": plain_method(FRAMEWORKS[name](**options))})
    except (ValueError, TypeError, NotImplementedError):
        return None


def _changed(whole: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[str] | None:
    """The paths below a part of the method that differ; None if there is no other method."""
    if other is None:
        return None
    return [path for path in {**whole, **other} if path.count(".") > 1 and whole.get(path) != other.get(path)]


def _part_of(path: str) -> str:
    return ".".join(path.split(".")[:3])


def _held(framework: str, options: Mapping[str, Any], name: str, whole: Mapping[str, Any]) -> str:
    """The place, with its value, of an option's default that the YAML holds; empty if it holds none."""
    for value in _other_values(framework, options, name):
        changed = _changed(whole, _flat_method(framework, {**options, name: value})) or []
        held = [path for path in changed if path in whole]
        if len(held) == 1 and not isinstance(whole[held[0]], list):
            return f"{held[0]}: {whole[held[0]]}"
        if held:
            return ", ".join(dict.fromkeys(map(_part_of, held)))
    return ""


def _other_values(framework: str, options: Mapping[str, Any], name: str) -> list[Any]:
    """Values that an option could have in place of its own; for a name, those that the framework's error lists."""
    from trl_offpolicy.presets import FRAMEWORKS

    value = options[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value / 2, value + 1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FRAMEWORKS[framework](**{**options, name: "no such name"})
    except (ValueError, TypeError, NotImplementedError) as error:
        listed = re.search(r"one of [\[({](.*?)[\])}]", str(error))
        return [] if listed is None else [one for one in re.findall(r"'([^']*)'", listed[1]) if one != value]
    return []
