"""Named presets: published methods with their defaults, and other frameworks' options.

>>> get("paper/tis", max_weight=3.0).correction.weight.max_weight
3.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from trl_offpolicy.checks import near
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.correction.terms.base import mapping_text, settings_text
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.parts import as_mapping, parse_tagged
from trl_offpolicy.presets.auto import AUTO
from trl_offpolicy.presets.catalog import PRESETS, check_name, get, groups, names
from trl_offpolicy.presets.diff import Difference, diff
from trl_offpolicy.presets.frameworks import NAMES
from trl_offpolicy.presets.frameworks.areal import from_areal
from trl_offpolicy.presets.frameworks.ms_swift import from_ms_swift
from trl_offpolicy.presets.frameworks.nemo_rl import from_nemo_rl
from trl_offpolicy.presets.frameworks.openrlhf import from_openrlhf
from trl_offpolicy.presets.frameworks.options import UnknownOptionError
from trl_offpolicy.presets.frameworks.prime_rl import from_prime_rl
from trl_offpolicy.presets.frameworks.skyrl import from_skyrl
from trl_offpolicy.presets.frameworks.slime import from_slime
from trl_offpolicy.presets.frameworks.trl import from_trl
from trl_offpolicy.presets.frameworks.verl.translate import from_verl
from trl_offpolicy.presets.preset import Preset, auto_preset

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
    "from_ms_swift",
    "from_nemo_rl",
    "from_openrlhf",
    "from_prime_rl",
    "from_skyrl",
    "from_slime",
    "from_trl",
    "from_verl",
    "get",
    "groups",
    "names",
]

_TRANSLATORS = (
    from_areal, from_ms_swift, from_nemo_rl, from_openrlhf, from_prime_rl, from_skyrl, from_slime, from_trl, from_verl,
)  # fmt: skip
FRAMEWORKS: dict[str, Callable[..., Preset]] = dict(zip(NAMES, _TRANSLATORS, strict=True))
"""Frameworks whose own option names are understood."""

MAPPING_KEYS = ("preset", "framework", "options", "file", "correction", "objective", "advantages")
"""Keys of the mapping in which a user describes the method: ``offpolicy`` in TRL, ``correction`` in Lightning."""


BESIDE = (
    "control", "engine", "replay", "routing_replay", "async_rollouts", "correct_threshold", "learner_rounding",
    "learner_kv_cache", "kl_reference", "perturbation",
)  # fmt: skip
"""Fields of the trainers that are easily taken for keys of the mapping."""


def from_mapping(spec: Mapping[str, Any], *, where: str) -> Preset:
    """The preset that ``spec`` names, or that another framework's options describe. Overrides in it are not read.

    Args:
        spec: a mapping with keys of :data:`MAPPING_KEYS`.
        where: name of the mapping in error messages.

    Raises:
        ValueError: an unknown key, preset, framework or option.
    """
    if unknown := [key for key in spec if key not in MAPPING_KEYS]:
        raise ValueError(
            f"{where}.{unknown[0]} must be one of {list(MAPPING_KEYS)}.{_meant(str(unknown[0]), spec, where)}"
        )
    framework, options = spec.get("framework"), as_mapping(spec.get("options") or {}, f"{where}.options")
    if spec.get("file") is not None:
        return _from_file(spec, where=where)
    if framework is None and spec.get("preset") == AUTO:
        return auto_preset(**options)
    if framework is None:
        name = "measure" if spec.get("preset") is None else spec["preset"]
        check_name(name, where=f"{where}.preset")
        return _with_options(partial(get, name), options, where=where)
    if spec.get("preset") is not None:
        raise ValueError(f"{where}.preset and {where}.framework both name the correction; set one.")
    if framework not in FRAMEWORKS:
        known = sorted(FRAMEWORKS)
        hint = near(str(framework), known)
        raise ValueError(f"{where}.framework must be one of {known}, but got {framework!r}.{hint}")
    return _with_options(FRAMEWORKS[framework], options, where=where)


def _with_options(method: Callable[..., Preset], options: Mapping[str, Any], *, where: str) -> Preset:
    """The method with the user's options, whose names its errors carry, with their path."""
    try:
        return method(**options)
    except (ValueError, NotImplementedError) as error:
        if not any(str(error).startswith(option) for option in options):
            raise
        raise type(error)(f"{where}.options.{error}") from None


def _meant(key: str, spec: Mapping[str, Any], where: str) -> str:
    """The place of a key that belongs deeper into the mapping, else the closest of its keys."""
    places = {
        "options": PRESETS[spec["preset"]].defaults if spec.get("preset") in names() else {},
        "correction": {item.name for item in fields(Correction)},
        "objective": {item.name for item in fields(Objective)},
    }
    for place, known in places.items():
        if key in known:
            return f" Did you mean {where}.{place}.{key}?"
    if key in BESIDE:
        return f" {key} is a field of its own, beside {where}."
    return near(key, MAPPING_KEYS)


def _from_file(spec: Mapping[str, Any], *, where: str) -> Preset:
    """The correction of another framework's configuration file; nothing else of it is read.

    Raises:
        ValueError: no framework is named, the file cannot be read, or an option of the correction is wrong.
    """
    from trl_offpolicy.migrate import correction_of

    framework, known = spec.get("framework"), sorted(FRAMEWORKS)
    if framework not in FRAMEWORKS:
        text = near(str(framework), known)
        raise ValueError(f"{where}.framework must be one of {known} with {where}.file, but got {framework!r}.{text}")
    for key in ("preset", "options"):
        if spec.get(key):
            raise ValueError(f"{where}.file and {where}.{key} both give the correction; set one.")
    options, terms = correction_of(str(spec["file"]), str(framework))
    preset = FRAMEWORKS[str(framework)](**options)
    if not terms:
        return preset
    correction = preset.correction or Correction()
    keep = [parse_tagged(term, KeepTerm, where=f"{where}.file") for term in terms.get("keep", ())]
    correction = replace(correction, keep=(*correction.keep, *keep))
    if "weight" in terms:
        correction = replace(correction, weight=parse_tagged(terms["weight"], Weight, where=f"{where}.file"))
    return replace(preset, objective=replace(preset.objective, correction=correction))


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
    if preset.trainer:
        lines.insert(-2, f"  trainer:  {mapping_text(preset.trainer)}")
    if preset.source_clamp is None:
        lines.append("  clamp:    log-ratios at +-20 nats here, not in the source")
    return "\n".join(lines)
