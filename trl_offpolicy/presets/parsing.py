"""From YAML or keyword form to corrections, objectives and advantages: tagged unions, ``{type: rloo}`` or ``rloo``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from trl_offpolicy.checks import near as near  # its old home
from trl_offpolicy.correction import terms
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective import advantages, losses, proximal
from trl_offpolicy.objective.advantages import AdvantageEstimator
from trl_offpolicy.objective.kl import AdaptiveKL, FixedKL, KLPenalty
from trl_offpolicy.objective.objective import Objective

WEIGHT_TYPES = {
    "truncate": terms.TruncateWeight,
    "band": terms.BandWeight,
    "raw": terms.RawWeight,
    "shaped": terms.ShapedWeight,
    "prefix": terms.PrefixWeight,
    "prefix_min": terms.PrefixMinWeight,
    "ess": terms.ESSWeight,
}
KEEP_TYPES = {
    "ratio_band": terms.RatioBand,
    "divergence_band": terms.DivergenceBand,
    "outlier_veto": terms.OutlierVeto,
    "off_policy_sequence_mask": terms.OffPolicySequenceMask,
    "probability_difference": terms.ProbabilityDifferenceMask,
    "second_moment_budget": terms.SecondMomentBudget,
    "group_rejection": terms.GroupRejection,
    "staleness_bound": terms.StalenessBound,
}
LOSS_TYPES = {
    "ppo_clip": losses.PPOClip,
    "ppo_is": losses.PPOIS,
    "cispo": losses.CISPO,
    "gpg": losses.GPG,
    "sapo": losses.SAPO,
    "aspo": losses.ASPO,
    "dispo": losses.DISPO,
    "dro": losses.DRO,
    "dppo": losses.DPPO,
    "m2po": losses.M2PO,
    "clip_cov": losses.ClipCov,
    "kl_cov": losses.KLCov,
    "r2vpo": losses.R2VPO,
    "quatro": losses.QUATRO,
    "gspo": losses.GSPO,
    "gspo_token": losses.GSPOToken,
    "luspo": losses.LUSPO,
    "gmpo": losses.GMPO,
    "vespo": losses.VESPO,
    "tbpo": losses.TBPO,
    "topr": losses.TOPR,
    "espo": losses.ESPO,
    "st_ppo": losses.STPPO,
    "oapl": losses.OAPL,
}
KL_CONTROLLERS = {"fixed": FixedKL, "adaptive": AdaptiveKL}
PROXIMAL_TYPES = {
    "recomputed": proximal.RecomputedProximal,
    "interpolated": proximal.InterpolatedProximal,
    "averaged": proximal.AveragedProximal,
}
ADVANTAGE_TYPES = {
    "grpo": advantages.GRPO,
    "dr_grpo": advantages.DrGRPO,
    "rloo": advantages.RLOO,
    "opo": advantages.OPO,
    "gdpo": advantages.GDPO,
    "reinforce_plus_plus_baseline": advantages.REINFORCEPlusPlusBaseline,
    "optimal_token_baseline": advantages.OptimalTokenBaseline,
    "opob": advantages.OPOB,
}


def parse_correction(spec: Mapping[str, Any], *, where: str, base: Correction | None = None) -> Correction:
    """A Correction from a mapping; what ``spec`` leaves out comes from ``base``.

    Raises:
        ValueError: an unknown key, an unknown type, or a missing field, named with its path.
    """
    values = dict(_mapping(spec, where))
    if "weight" in values and values["weight"] is not None:
        weight = values["weight"]
        items = weight if isinstance(weight, list | tuple) else [weight]
        parsed = tuple(parse_tagged(item, WEIGHT_TYPES, where=f"{where}.weight") for item in items)
        values["weight"] = parsed[0] if len(parsed) == 1 else parsed
    if "keep" in values:
        keep = values["keep"] or ()
        if not isinstance(keep, list | tuple):
            raise ValueError(f"{where}.keep must be a list of terms, but got {keep!r}.")
        values["keep"] = tuple(
            parse_tagged(item, KEEP_TYPES, where=f"{where}.keep[{i}]") for i, item in enumerate(keep)
        )
    if isinstance(values.get("measure"), list):
        values["measure"] = tuple(values["measure"])
    correction: Correction = _build(Correction, values, where=where, base=base)
    return correction


def parse_objective(spec: Mapping[str, Any], *, where: str, base: Objective) -> Objective:
    """``base`` with the fields of ``spec`` replaced."""
    values = dict(_mapping(spec, where))
    if "policy_loss" in values:
        values["policy_loss"] = parse_tagged(values["policy_loss"], LOSS_TYPES, where=f"{where}.policy_loss")
    if values.get("kl") is not None and "kl" in values:
        values["kl"] = _parse_kl(values["kl"], where=f"{where}.kl")
    if "proximal" in values:
        values["proximal"] = _parse_named(values["proximal"], PROXIMAL_TYPES, where=f"{where}.proximal")
    objective: Objective = _build(Objective, values, where=where, base=base)
    return objective


def parse_advantages(spec: object, *, where: str) -> AdvantageEstimator | None:
    """``rloo``, ``{type: grpo, scale: none}``, or None: the trainer's own."""
    estimator: AdvantageEstimator | None = None if spec is None else _parse_named(spec, ADVANTAGE_TYPES, where=where)
    return estimator


def _parse_kl(spec: object, *, where: str) -> KLPenalty:
    """``{coef: 0.1}``, or with a controller: ``{coef: {type: adaptive, coef: 0.1, target: 0.01, horizon: 10000}}``."""
    values = dict(_mapping(spec, where))
    if isinstance(values.get("coef"), Mapping):
        values["coef"] = parse_tagged(values["coef"], KL_CONTROLLERS, where=f"{where}.coef")
    penalty: KLPenalty = _build(KLPenalty, values, where=where)
    return penalty


def parse_tagged(spec: object, types: Mapping[str, type], *, where: str) -> Any:
    """One of ``types`` from ``{type: name, **fields}``."""
    values = dict(_mapping(spec, where))
    name = values.pop("type", None)
    if name not in types:
        raise ValueError(f"{where}.type must be one of {list(types)}, but got {name!r}.{near(str(name), types)}")
    return _build(types[name], values, where=where)


def _parse_named(spec: object, types: Mapping[str, type], *, where: str) -> Any:
    """As :func:`parse_tagged`; the name alone will do."""
    return parse_tagged({"type": spec} if isinstance(spec, str) else spec, types, where=where)


def _mapping(spec: object, where: str) -> Mapping[str, Any]:
    if not isinstance(spec, Mapping):
        raise ValueError(f"{where} must be a mapping of options, but got {spec!r}.")
    return spec


def _build(cls: Any, values: Mapping[str, Any], *, where: str, base: Any = None) -> Any:
    known = {item.name: item for item in fields(cls)}
    for key in values:
        if key not in known:
            raise ValueError(f"{where}.{key} is not an option of {cls.__name__}.{near(key, known)}")
    required = [n for n, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    if base is None and (missing := [name for name in required if name not in values]):
        raise ValueError(
            f"{where}.{missing[0]} must be given for {cls.__name__} (null = open side), but it is missing."
        )
    try:
        return cls(**values) if base is None else replace(base, **values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error
