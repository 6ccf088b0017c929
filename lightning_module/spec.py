"""From what a user writes (names, mappings, objects) to an objective, and back to plain values for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from lightning_module.imports import import_path
from trl_offpolicy import presets
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.advantages import GRPO, AdvantageEstimator
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets import parsing
from trl_offpolicy.presets.parsing import parse_advantages, parse_correction, parse_objective
from trl_offpolicy.presets.preset import Preset, make_preset

_TYPES = {
    cls: name
    for table in (
        parsing.WEIGHT_TYPES, parsing.KEEP_TYPES, parsing.LOSS_TYPES, parsing.KL_CONTROLLERS, parsing.PROXIMAL_TYPES,
        parsing.ADVANTAGE_TYPES,
    )
    for name, cls in table.items()
}  # fmt: skip


def resolve(correction: Any, objective: Any = None, advantages: Any = None, *, default: str = "measure") -> Preset:
    """The objective, with its correction, and what makes the advantages.

    Args:
        correction: a preset's name; a :class:`~trl_offpolicy.Correction` or :class:`Preset`; a mapping of a
            correction's fields (``{weight: {type: truncate, ...}, keep: [...]}``), or one with the keys of the TRL
            side's ``offpolicy`` (preset or framework, options, correction, objective, advantages); None = ``default``.
        objective: an :class:`~trl_offpolicy.Objective`, or a mapping of the fields to change.
        advantages: an estimator, its name or mapping; None = the preset's, else TRL's (``grpo``).
        default: preset where ``correction`` is None.

    Raises:
        ValueError: an unknown name or field, or a quantity set twice.

    Example:
        >>> resolve("paper/tis", {"aggregation": "seq_mean_token_mean"}).objective.aggregation
        'seq_mean_token_mean'
    """
    chosen, overrides, named = _chosen(correction, default)
    if isinstance(objective, Objective):
        chosen = _with_objective(chosen, objective, said=correction is not None)
    else:
        parts = [part for part in (overrides, objective) if part]
        for part in parts:
            made = parse_objective(part, where="objective", base=chosen.objective)
            chosen = replace(chosen, objective=made)
    if advantages is not None and named is not None:
        raise ValueError("advantages and correction.advantages set the same quantity; set one.")
    advantages = named if advantages is None else advantages
    estimator = _estimator(advantages) or chosen.advantages or GRPO()
    return replace(chosen, advantages=estimator)


def _chosen(correction: Any, default: str) -> tuple[Preset, Any, Any]:
    """The preset, and what the mapping says about objective and advantages."""
    if correction is None or isinstance(correction, str):
        return presets.get(correction or default), None, None
    if isinstance(correction, Preset):
        return correction, None, None
    if isinstance(correction, Correction):
        return make_preset("own", correction, citation="-", notes="given as an object"), None, None
    if not isinstance(correction, Mapping):
        raise ValueError(f"correction must be a preset's name, a mapping or a Correction, but got {correction!r}.")
    spec = dict(correction)
    if spec and not set(spec) & set(presets.MAPPING_KEYS):
        made = parse_correction(spec, where="correction")
        return make_preset("own", made, citation="-", notes="given in the configuration"), None, None
    chosen = presets.from_mapping(spec, where="correction")
    if spec.get("correction"):
        own = parse_correction(spec["correction"], where="correction.correction", base=chosen.correction)
        chosen = replace(chosen, objective=replace(chosen.objective, correction=own))
    return chosen, spec.get("objective"), spec.get("advantages")


def _with_objective(chosen: Preset, objective: Objective, *, said: bool) -> Preset:
    if objective.correction is not None and said:
        raise ValueError("correction must be None with an Objective that has one, but both are given.")
    if objective.correction is None and said:
        objective = replace(objective, correction=chosen.correction)
    return replace(chosen, objective=objective)


def _estimator(advantages: Any) -> AdvantageEstimator | None:
    if advantages is None or isinstance(advantages, str | Mapping):
        return parse_advantages(advantages, where="advantages")
    estimator: AdvantageEstimator = advantages
    return estimator


def plain(value: Any) -> Any:
    """Plain values (numbers, texts, lists, mappings) from which :func:`resolve` makes the same again.

    Example:
        >>> import trl_offpolicy as op
        >>> plain(op.Correction(weight=op.TruncateWeight(level="token", max_weight=2.0)))
        {'weight': {'type': 'truncate', 'max_weight': 2.0}}
    """
    if isinstance(value, Preset):
        correction = {} if value.correction is None else plain(value.correction)
        objective = plain(replace(value.objective, correction=None))
        said = {"preset": "measure", "correction": correction, "objective": objective}
        return said if value.advantages is None else {**said, "advantages": plain(value.advantages)}
    if is_dataclass(value) and not isinstance(value, type):
        tag = {"type": _TYPES[type(value)]} if type(value) in _TYPES else {}
        return tag | {item.name: plain(getattr(value, item.name)) for item in fields(value) if _said(value, item)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _said(value: Any, item: Any) -> bool:
    """True if the field differs from its default."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return bool(getattr(value, item.name) != default)


def hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """A module's arguments as plain values, for its checkpoint and the loggers.

    Objects that have no plain form (a loaded model, an engine, a local function) are left out and must be given again
    when a checkpoint is loaded.
    """
    values = {name: plain(value) for name, value in given.items()}
    values["reward_funcs"] = _reward_paths(given["reward_funcs"])
    if not isinstance(given["model"], str):
        values["model"] = getattr(getattr(given["model"], "config", None), "_name_or_path", None) or None
    return {name: value for name, value in values.items() if value is not None and _is_plain(value)}


def _reward_paths(functions: Any) -> list[str] | None:
    listed = functions if isinstance(functions, list | tuple) else [functions]
    paths = [item if isinstance(item, str) else import_path(item) for item in listed]
    return None if None in paths else [path for path in paths if path is not None]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
