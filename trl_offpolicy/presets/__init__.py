"""Named presets: published methods with their defaults, and other frameworks' options.

>>> get("paper/tis", max_weight=3.0).correction.weight.max_weight
3.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trl_offpolicy.checks import near
from trl_offpolicy.presets.auto import AUTO
from trl_offpolicy.presets.catalog import PRESETS, get, groups, names
from trl_offpolicy.presets.diff import Difference, diff
from trl_offpolicy.presets.frameworks.areal import from_areal
from trl_offpolicy.presets.frameworks.openrlhf import from_openrlhf
from trl_offpolicy.presets.frameworks.options import UnknownOptionError
from trl_offpolicy.presets.frameworks.skyrl import from_skyrl
from trl_offpolicy.presets.frameworks.slime import from_slime
from trl_offpolicy.presets.frameworks.trl import from_trl
from trl_offpolicy.presets.frameworks.verl.translate import from_verl
from trl_offpolicy.presets.preset import Preset, auto_preset
from trl_offpolicy.presets.text import mapping_text, settings_text

__all__ = [
    "FRAMEWORKS",
    "MAPPING_KEYS",
    "Difference",
    "Preset",
    "UnknownOptionError",
    "describe",
    "diff",
    "from_areal",
    "from_mapping",
    "from_openrlhf",
    "from_skyrl",
    "from_slime",
    "from_trl",
    "from_verl",
    "get",
    "groups",
    "names",
]

FRAMEWORKS: dict[str, Callable[..., Preset]] = {
    "areal": from_areal,
    "openrlhf": from_openrlhf,
    "skyrl": from_skyrl,
    "slime": from_slime,
    "trl": from_trl,
    "verl": from_verl,
}
"""Frameworks whose own option names are understood."""

MAPPING_KEYS = ("preset", "framework", "options", "correction", "objective", "advantages")
"""Keys of the mapping in which a user describes the method: ``offpolicy`` in TRL, ``correction`` in Lightning."""


def from_mapping(spec: Mapping[str, Any], *, where: str) -> Preset:
    """The preset that ``spec`` names, or that another framework's options describe. Overrides in it are not read.

    Args:
        spec: a mapping with keys of :data:`MAPPING_KEYS`.
        where: name of the mapping in error messages.

    Raises:
        ValueError: an unknown key, preset, framework or option.
    """
    if unknown := [key for key in spec if key not in MAPPING_KEYS]:
        raise ValueError(f"{where}.{unknown[0]} must be one of {list(MAPPING_KEYS)}.{near(unknown[0], MAPPING_KEYS)}")
    framework, options = spec.get("framework"), spec.get("options") or {}
    if framework is None and spec.get("preset") == AUTO:
        return auto_preset(**options)
    if framework is None:
        return get(spec.get("preset") or "measure", **options)
    if spec.get("preset") is not None:
        raise ValueError(f"{where}.preset and {where}.framework both name the correction; set one.")
    if framework not in FRAMEWORKS:
        known = sorted(FRAMEWORKS)
        raise ValueError(f"{where}.framework must be one of {known}, but got {framework!r}.{near(framework, known)}")
    return FRAMEWORKS[framework](**options)


def describe(name: str) -> str:
    """Formula, defaults, citation and when to use it, as text."""
    preset = get(name)
    defaults = PRESETS[name].defaults
    lines = [
        name,
        f"  formula:  {preset.formula}",
        f"  options:  {', '.join(f'{key}={value}' for key, value in defaults.items()) or '-'}",
        f"  requires: {', '.join(preset.requires) or '-'}",
        f"  scope:    {preset.objective.scope}",
        f"  loss:     {mapping_text(preset.objective_changes)}",
        f"  source:   {preset.citation}",
        f"  notes:    {preset.notes}",
    ]
    if preset.advantages is not None:
        lines.insert(-2, f"  advantages: {type(preset.advantages).__name__} ({settings_text(preset.advantages)})")
    if preset.source_clamp is None:
        lines.append("  clamp:    log-ratios at +-20 nats here, not in the source")
    return "\n".join(lines)
