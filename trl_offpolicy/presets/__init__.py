"""Named presets: published methods with their defaults, and other frameworks' options.

>>> get("paper/tis", max_weight=3.0).correction.weight.max_weight
3.0
"""

from __future__ import annotations

import inspect

from trl_offpolicy.presets.catalog import BUILDERS
from trl_offpolicy.presets.parsing import near
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.presets.trl import from_trl

__all__ = ["Preset", "describe", "from_trl", "get", "names"]


def names() -> list[str]:
    """All preset names."""
    return sorted(BUILDERS)


def get(name: str, **options: object) -> Preset:
    """A preset by name.

    Raises:
        ValueError: unknown name (with near matches) or option.
    """
    if name not in BUILDERS:
        raise ValueError(f"preset must be one of {names()}, but got {name!r}.{near(name, BUILDERS)}")
    known = inspect.signature(BUILDERS[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option} is not an option of preset {name!r}, which has {list(known)}.{near(option, known)}"
            )
    return BUILDERS[name](**options)


def describe(name: str) -> str:
    """Formula, defaults, citation and when to use it, as text."""
    preset = get(name)
    defaults = {key: value.default for key, value in inspect.signature(BUILDERS[name]).parameters.items()}
    lines = [
        name,
        f"  formula:  {preset.formula}",
        f"  options:  {', '.join(f'{key}={value}' for key, value in defaults.items()) or '-'}",
        f"  requires: {', '.join(preset.requires) or '-'}",
        f"  source:   {preset.citation}",
        f"  notes:    {preset.notes}",
    ]
    return "\n".join(lines)
