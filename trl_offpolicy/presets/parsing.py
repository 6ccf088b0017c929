"""How a user names the method: by a preset's name, a mapping as in YAML, or an object; and back to a mapping.

Parts are tagged unions, ``{type: rloo}`` or ``rloo``; see :mod:`trl_offpolicy.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trl_offpolicy import presets
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.objective.advantages import AdvantageEstimator
from trl_offpolicy.objective.kl import KLController, KLPenalty
from trl_offpolicy.objective.losses import PolicyLoss
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.proximal import Proximal
from trl_offpolicy.objective.shaping import AdvantageShaping
from trl_offpolicy.parts import as_mapping, build, parse_tagged, plain, types_of
from trl_offpolicy.presets.auto import AUTO
from trl_offpolicy.presets.catalog import check_name
from trl_offpolicy.presets.preset import Preset, make_preset, own_preset

WEIGHT_TYPES = types_of(Weight)
KEEP_TYPES = types_of(KeepTerm)
LOSS_TYPES = types_of(PolicyLoss)
PROXIMAL_TYPES = types_of(Proximal)
ADVANTAGE_TYPES = types_of(AdvantageEstimator)
SHAPING_TYPES = types_of(AdvantageShaping)


def parse_preset(spec: Any, *, where: str) -> tuple[Preset, Mapping[str, Any]]:
    """The preset that ``spec`` names, describes or is, and the mapping whose overrides are still to be applied.

    Args:
        spec: a name; a mapping with keys of :data:`trl_offpolicy.presets.MAPPING_KEYS`; a ``Preset``, a ``Correction``
            or an ``Objective``, which leave nothing to override.
        where: name of the option in error messages.

    Raises:
        ValueError: an unknown name, key, preset, framework or option, or another kind of value.
    """
    if isinstance(spec, Preset):
        return spec, {}
    if isinstance(spec, Correction):
        return make_preset("own", spec, citation="-", notes="given as an object"), {}
    if isinstance(spec, Objective):
        return own_preset(spec), {}
    if isinstance(spec, str):
        if spec != AUTO:
            check_name(spec, where=where, hint=_meant(spec, where))
        return presets.from_mapping({"preset": spec}, where=where), {}
    if not isinstance(spec, Mapping):
        hint = NOTHING if spec is False else ""
        raise ValueError(
            f"{where} must be a preset's name (e.g. paper/tis), a mapping, a Correction, an Objective or a Preset, but "
            f"got {spec!r}.{hint}"
        )
    mapping = as_mapping(spec, where)
    return presets.from_mapping(mapping, where=where), mapping


NOTHING = " No correction is called measure."


def _meant(name: str, where: str) -> str:
    """Where a name belongs that is no preset; empty text if it belongs nowhere."""
    if name.lower() in ("off", "no", "none", "false"):
        return NOTHING
    places = {
        "{objective: {policy_loss: NAME}}": LOSS_TYPES,
        "{correction: {weight: NAME}}": WEIGHT_TYPES,
        "{correction: {keep: [NAME]}}": KEEP_TYPES,
        "{advantages: NAME}": ADVANTAGE_TYPES,
    }
    for place, types in places.items():
        if name.lower() in types:
            return f" Did you mean {where}: {place.replace('NAME', name.lower())}?"
    return ""


def plain_method(spec: Any) -> Any:
    """The name or mapping from which :func:`parse_preset` makes the same again. A name or mapping stays as it is.

    A preset's ``trainer`` is no part of it: those are fields beside ``offpolicy``.
    """
    if isinstance(spec, Objective):
        spec = own_preset(spec)
    elif isinstance(spec, Correction):
        return {"correction": plain(spec)}
    if not isinstance(spec, Preset):
        return plain(spec)
    written = {
        **({"preset": "measure"} if spec.auto is None else {"preset": spec.name, "options": plain(spec.auto)}),
        "correction": {} if spec.correction is None else plain(spec.correction),
        "objective": plain(replace(spec.objective, correction=None)),
    }
    return written if spec.advantages is None else {**written, "advantages": plain(spec.advantages)}


def parse_correction(spec: object, *, where: str, base: Correction | None = None) -> Correction:
    """A Correction from a mapping; fields that ``spec`` leaves out come from ``base``.

    Raises:
        ValueError: an unknown key, an unknown type, or a missing field, named with its path.
    """
    if isinstance(spec, Correction):
        return spec
    values = dict(as_mapping(spec, where))
    if "weight" in values and values["weight"] is not None:
        weight = values["weight"]
        items = weight if isinstance(weight, list | tuple) else [weight]
        parsed = tuple(parse_tagged(item, Weight, where=f"{where}.weight") for item in items)
        values["weight"] = parsed[0] if len(parsed) == 1 else parsed
    if "keep" in values:
        keep = values["keep"] or ()
        if not isinstance(keep, list | tuple):
            raise ValueError(f"{where}.keep must be a list of terms, but got {keep!r}.")
        values["keep"] = tuple(parse_tagged(item, KeepTerm, where=f"{where}.keep[{i}]") for i, item in enumerate(keep))
    if isinstance(values.get("measure"), list):
        values["measure"] = tuple(values["measure"])
    correction: Correction = build(Correction, values, where=where, base=base)
    return correction


def parse_objective(spec: object, *, where: str, base: Objective) -> Objective:
    """``base`` with the fields of ``spec`` replaced."""
    values = dict(as_mapping(spec, where))
    if "policy_loss" in values:
        values["policy_loss"] = parse_tagged(values["policy_loss"], PolicyLoss, where=f"{where}.policy_loss")
    if values.get("kl") is not None:
        values["kl"] = _parse_kl(values["kl"], where=f"{where}.kl")
    if "proximal" in values:
        values["proximal"] = parse_tagged(values["proximal"], Proximal, where=f"{where}.proximal")
    if "shaping" in values:
        given = values["shaping"] or ()
        items = given if isinstance(given, list | tuple) else [given]
        values["shaping"] = tuple(
            parse_tagged(item, AdvantageShaping, where=f"{where}.shaping[{i}]") for i, item in enumerate(items)
        )
    objective: Objective = build(Objective, values, where=where, base=base)
    return objective


def parse_advantages(spec: object, *, where: str) -> AdvantageEstimator | None:
    """An estimator from ``rloo``, ``{type: grpo, scale: none}`` or an estimator; None = the trainer's own."""
    if spec is None:
        return None
    estimator: AdvantageEstimator = parse_tagged(spec, AdvantageEstimator, where=where)
    return estimator


def _parse_kl(spec: object, *, where: str) -> KLPenalty:
    """A penalty from ``{coef: 0.1}`` or ``{coef: {type: adaptive, coef: 0.1, target: 0.01, horizon: 10000}}``."""
    if isinstance(spec, Mapping) and isinstance(spec.get("coef"), Mapping):
        spec = {**spec, "coef": parse_tagged(spec["coef"], KLController, where=f"{where}.coef")}
    penalty: KLPenalty = parse_tagged(spec, KLPenalty, where=where)
    return penalty
