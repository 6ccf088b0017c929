"""Turns what a user writes (names, mappings, objects) into an objective, and back into plain values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trl_offpolicy import presets
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.advantages import GRPO
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.parts import import_path, plain
from trl_offpolicy.presets.parsing import (
    parse_advantages,
    parse_correction,
    parse_objective,
    parse_preset,
    plain_method,
)
from trl_offpolicy.presets.preset import Preset, make_preset


def resolve(correction: Any, objective: Any = None, advantages: Any = None, *, default: str = "measure") -> Preset:
    """The preset that the settings describe: an objective with its correction, and an advantage estimator.

    Args:
        correction: a preset's name; a :class:`~trl_offpolicy.Correction`, an :class:`~trl_offpolicy.Objective` or a
            :class:`Preset`; a mapping of a correction's fields (``{weight: {type: truncate, ...}, keep: [...]}``); or
            a mapping with the keys of ``offpolicy`` in the TRL trainer's configuration (preset or framework, options,
            correction, objective, advantages); None = ``default``.
        objective: an :class:`~trl_offpolicy.Objective`, or a mapping of the fields to change.
        advantages: an estimator, its name or mapping; None = that of the preset, else TRL's (``grpo``).
        default: name of the preset to use if ``correction`` is None.

    Raises:
        ValueError: a name or field is unknown, or a quantity is set twice.

    Example:
        >>> resolve("paper/tis", {"aggregation": "seq_mean_token_mean"}).objective.aggregation
        'seq_mean_token_mean'
    """
    chosen, named = _chosen(correction, default)
    if isinstance(objective, Objective):
        if isinstance(correction, Objective):
            raise ValueError("correction and objective both are an Objective; give one.")
        chosen = _with_objective(chosen, objective, said=correction is not None)
    elif objective:
        chosen = replace(chosen, objective=parse_objective(objective, where="objective", base=chosen.objective))
    if advantages is not None and named is not None:
        raise ValueError("advantages and correction.advantages set the same quantity; set one.")
    advantages = named if advantages is None else advantages
    estimator = parse_advantages(advantages, where="advantages") or chosen.advantages or GRPO()
    return replace(chosen, advantages=estimator)


def _chosen(correction: Any, default: str) -> tuple[Preset, Any]:
    """The preset with the mapping's own changes, and the mapping's entry ``advantages`` (None if there is none)."""
    said = default if correction is None else correction
    if isinstance(said, Mapping) and said and not set(said) & set(presets.MAPPING_KEYS):
        made = parse_correction(said, where="correction")
        return make_preset("own", made, citation="-", notes="given in the configuration"), None
    chosen, spec = parse_preset(said, where="correction")
    objective = parse_objective(spec.get("objective") or {}, where="correction.objective", base=chosen.objective)
    if spec.get("correction"):  # last: what a weight may hold depends on the loss
        own = parse_correction(spec["correction"], where="correction.correction", base=chosen.correction)
        objective = replace(objective, correction=own)
    return replace(chosen, objective=objective), spec.get("advantages")


def fields_of_method(given: Mapping[str, Any], taker: Callable[..., Any]) -> dict[str, Any]:
    """What of the method is no part of the loss (``Preset.trainer``), where arguments of ``taker`` leave it open."""
    if given["correction"] is None:
        return {}
    defaults = {name: one.default for name, one in inspect.signature(taker).parameters.items()}
    chosen, _ = _chosen(given["correction"], "")
    return chosen.fields_for(given, defaults)


def _with_objective(chosen: Preset, objective: Objective, *, said: bool) -> Preset:
    if objective.correction is not None and said:
        raise ValueError("correction must be None with an Objective that has one, but both are given.")
    if objective.correction is None and said:
        objective = replace(objective, correction=chosen.correction)
    return replace(chosen, objective=objective)


def plain_correction(correction: Any) -> Any:
    """Plain values from which :func:`resolve` makes the same correction again.

    Example:
        >>> import trl_offpolicy as op
        >>> plain_correction(op.Correction(weight=op.TruncateWeight(level="token", max_weight=2.0)))
        {'weight': {'type': 'truncate', 'max_weight': 2.0}}
    """
    return plain(correction) if isinstance(correction, Correction) else plain_method(correction)


def hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """A module's arguments as plain values, for its checkpoint and the loggers.

    Objects that have no plain form (a loaded model, an engine, a local function) are left out. They must be given
    again when a checkpoint is loaded.
    """
    values = {name: plain(value) for name, value in given.items()}
    values["correction"] = plain_correction(given.get("correction"))
    if isinstance(given.get("objective"), Objective) and given["objective"].correction is not None:
        values["correction"], values["objective"] = plain_method(given["objective"]), None
    values["reward_funcs"] = _reward_paths(given["reward_funcs"])
    for name in ("tools", "environment_factory", "rollout"):
        values[name] = _paths(given.get(name))
    if not isinstance(given["model"], str):
        values["model"] = getattr(getattr(given["model"], "config", None), "_name_or_path", None) or None
    return {name: value for name, value in values.items() if value is not None and _is_plain(value)}


def _reward_paths(functions: Any) -> list[str] | None:
    if functions is None:  # environments give the reward
        return []
    listed = functions if isinstance(functions, list | tuple) else [functions]
    found: list[str] | None = _paths(listed)
    return found


def _paths(value: Any) -> Any:
    """Functions and classes as import paths, alone, in a list or in a mapping; None if one of them has none."""
    if isinstance(value, Mapping):
        paths = {name: _paths(item) for name, item in value.items()}
        return None if None in paths.values() else paths
    if isinstance(value, list | tuple):
        listed = [_paths(item) for item in value]
        return None if None in listed else listed
    return value if value is None or isinstance(value, str) else import_path(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
