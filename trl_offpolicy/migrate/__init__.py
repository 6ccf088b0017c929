"""Configuration files of other frameworks: which of their settings become which fields here, and which do not.

This package reads files and knows names. What the options of a correction mean is in
:mod:`trl_offpolicy.presets.frameworks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_offpolicy.checks import check_choice
from trl_offpolicy.migrate.page import method_fields
from trl_offpolicy.migrate.programs import other_training
from trl_offpolicy.migrate.reading import Settings, read_settings
from trl_offpolicy.migrate.rules import UNKNOWN, Carried, Framework, Left, Migration, translate

__all__ = ["NAMES", "Carried", "Left", "Migration", "correction_of", "framework", "migrate", "recognise"]

NAMES = ("verl", "skyrl", "slime", "areal", "openrlhf", "nemo-rl", "prime-rl", "ms-swift", "trl")
"""Frameworks whose files are read."""


def framework(name: str) -> Framework:
    """The table of a framework.

    Raises:
        ValueError: there is none of that name.
    """
    check_choice("framework", name, NAMES)
    module = import_module(f"{__name__}.frameworks.{name.replace('-', '_')}")
    found: Framework = module.FRAMEWORK
    return found


def recognise(settings: Settings, path: Path) -> Framework:
    """The framework whose settings a file has.

    Raises:
        ValueError: none, or more than one.
    """
    tables = [framework(name) for name in NAMES]
    marked = [table for table in tables if table.has_marks(settings)]
    started = [table for table in tables if table.is_started_by(settings)]
    # The program decides, unless its framework has none of the settings: some run another one's trainer.
    own = [table for table in marked if table in started]
    found = own or (marked if len(marked) == 1 and marked[0].name != "trl" else started or marked)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"file must be a configuration of {', '.join(NAMES)}, but {str(path)!r} has none of their settings; name "
            "its framework with --framework NAME."
        )
    matches = " and ".join(table.name for table in found)
    raise ValueError(f"{str(path)!r} has settings of {matches}; name its framework with --framework NAME.")


def migrate(path: str | Path, overrides: Sequence[str] = (), *, name: str | None = None) -> Migration:
    """What a configuration file of another framework becomes here.

    Args:
        path: YAML, TOML, or a launch script.
        overrides: ``a.b=c`` in the framework's own names, as on its command line; the last one wins.
        name: the framework; None = recognised by its settings.

    Raises:
        ValueError: the file cannot be read, its framework is not clear, or a setting has a wrong value.
    """
    settings = read_settings(Path(path), overrides)
    if other := other_training(settings):
        raise ValueError(f"file must be a run that learns from rollouts, but {str(path)!r} {other}.")
    table = recognise(settings, Path(path)) if name is None else framework(name)
    found = translate(table, settings)
    if name is not None and settings.values and not _knows_one(found):
        tables = map(framework, NAMES)
        of = [one.name for one in tables if one.has_marks(settings) or one.is_started_by(settings)]
        hint = f" It has settings of {' and '.join(of)}." if of else ""
        raise ValueError(f"file must be a configuration of {name}, but {name} knows no setting of {str(path)!r}.{hint}")
    return found


def _knows_one(migration: Migration) -> bool:
    """True if the table knows one of the file's settings, be it carried or not."""
    if any(key in migration.settings.values for key in migration.option_keys.values()):
        return True
    return any(one.keys and not (isinstance(one, Left) and one.why.startswith(UNKNOWN)) for one in migration.found)


def correction_of(path: str | Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of ``presets.from_<name>``, the weight and keep terms of older options beside them) of a file.

    TRL's ``use_vllm``, which switches its correction, counts where the file gives it: else the trainer's own decides.

    Raises:
        ValueError: the file cannot be read, or a setting of a section of the correction is unknown.
    """
    migration, table = migrate(path, name=name), framework(name)
    others = {key.rpartition(".")[0] for key in (*table.rows, *table.left)}
    sections = {key.rpartition(".")[0] for key in table.options} - others
    for one in migration.found:
        if isinstance(one, Left) and one.why.startswith(UNKNOWN):
            for key in one.keys:
                meant = any(f"mean {option}?" in one.why for option in table.options)
                if meant or key.rpartition(".")[0] in sections:
                    raise ValueError(f"{migration.settings.shown(key)} of {str(path)!r} is {one.why}.")
    terms = method_fields(migration.found).get("correction", {})
    options = {
        key: value for key, value in migration.options.items() if key != "use_vllm" or key in migration.settings.values
    }
    return options, {key: terms[key] for key in ("weight", "keep") if key in terms}
