"""Weights, keep terms and objectives as one line of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from trl_offpolicy.correction.terms import (
    BandWeight,
    DivergenceBand,
    ESSWeight,
    GroupRejection,
    KeepTerm,
    OffPolicySequenceMask,
    OutlierVeto,
    PrefixMinWeight,
    PrefixWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    StalenessBound,
    TruncateWeight,
    Weight,
)
from trl_offpolicy.objective.objective import Objective

RATIO_TEXT = {"old/sampling": "pi_old / mu", "current/old": "pi / pi_old", "current/sampling": "pi / mu"}
_RHO = {
    "token": "rho_t",
    "turn": "rho_turn",
    "turn_mean": "rho_turn_geo",
    "prefix": "rho_1:t",
    "sequence": "rho_seq",
    "sequence_mean": "rho_geo",
    "sequence_max": "max_t rho_t",
    "sequence_min": "min_t rho_t",
    "group": "rho_group",
}
_OVER = {
    "token": "{}_t",
    "turn": "sum_turn {}",
    "turn_mean": "mean_turn {}",
    "sequence": "sum_t {}",
    "sequence_mean": "mean_t {}",
    "sequence_max": "max_t {}",
    "group": "mean_group {}",
}
_STATISTIC = {"abs": "|log rho|", "prob_diff": "(p - q)", "binary_tv": "|p - q|", "binary_kl": "KL_binary"}


def number(value: float) -> str:
    """Shortest text of a number: 2.0 -> 2, 0.0001 -> 0.0001, 0.00001 -> 1e-05."""
    return f"{value:.6g}"


def between(middle: str, low: float | None, high: float | None) -> str:
    """``low <= middle <= high`` with open sides left out."""
    left = "" if low is None else f"{number(low)} <= "
    right = "" if high is None else f" <= {number(high)}"
    return f"{left}{middle}{right}"


def weight_text(weight: Weight) -> str:
    """E.g. ``w = min(rho_t, 2)``."""
    rho = _RHO[weight.level]
    match weight:
        case TruncateWeight(min_weight=None):
            return f"w = min({rho}, {number(weight.max_weight)})"
        case TruncateWeight(min_weight=float() | int() as floor):
            return f"w = clip({rho}, {number(floor)}, {number(weight.max_weight)})"
        case BandWeight():
            return f"w = {rho} if {between(rho, weight.low, weight.high)} else 0"
        case RawWeight():
            return f"w = {rho}"
        case ShapedWeight():
            return f"w = {rho} / ({rho} + {number(weight.gamma)})"
        case PrefixMinWeight():
            raw = "rho_t min_{s<t} rho_s"
            return f"w = {raw}" if weight.max_weight is None else f"w = min({raw}, {number(weight.max_weight)})"
        case PrefixWeight():
            return f"w = clip(rho_1:t, {number(weight.low)}^sqrt(t), {number(weight.high)}^sqrt(t))"
        case ESSWeight():
            return f"w = min({rho}, C), the largest C with ESS >= {number(weight.target)}"
    return f"w = {type(weight).__name__}"


def keep_text(term: KeepTerm) -> str:
    """E.g. ``keep if 0.99 <= rho_geo <= 1.01``."""
    match term:
        case RatioBand():
            return f"keep if {between(_RHO[term.level], term.low, term.high)}"
        case DivergenceBand(statistic="k1") if term.level in _RHO:
            low, high = (None if bound is None else math.exp(-bound) for bound in (term.high, term.low))
            return f"keep if {between(_RHO[term.level], low, high)}"  # k1 = -log rho
        case DivergenceBand():
            name = _STATISTIC.get(term.statistic, term.statistic)
            return f"keep if {between(_OVER[term.level].format(name), term.low, term.high)}"
        case OutlierVeto():
            return f"drop the response unless every {between('rho_t', term.low, term.high)}"
        case OffPolicySequenceMask():
            return f"drop if A < 0 and -log rho_geo > {number(term.max_divergence)}"
        case ProbabilityDifferenceMask():
            return f"drop if A > 0 and p - q > {number(term.high)}, or A < 0 and p - q < {number(term.low)}"
        case SecondMomentBudget():
            return f"drop the largest |log rho_t| until mean_t log^2 rho_t <= {number(term.budget)}"
        case GroupRejection():
            return f"drop a prompt of which more than {number(term.max_dropped_fraction)} were dropped"
        case StalenessBound():
            return f"drop a response older than {term.max_lag} versions"
    return f"{term.name}: {settings_text(term, leave_out=('ratio', 'scope'))}"


def formula_of(objective: Objective) -> str:
    """Weights, keep terms and, where it is not ``pi_old / mu``, the ratio that they hold."""
    correction = objective.correction
    parts = [] if correction is None else [weight_text(weight) for weight in correction.weights]
    if correction is None or not correction.weights:
        parts = ["w = 1"]
    keep = () if correction is None else correction.keep
    parts += [keep_text(term) for term in keep] or ["nothing dropped"]
    if objective.mode == "bypass":
        parts.append(f"{type(objective.policy_loss).__name__} on pi / mu")
    held = _ratios(correction.weights, keep) if correction is not None else set()
    if others := sorted(held - {"old/sampling"}):
        parts.append("rho = " + " and ".join(RATIO_TEXT[ratio] for ratio in others))
    return "; ".join(parts)


def settings_text(item: Any, *, leave_out: Iterable[str] = ()) -> str:
    """The fields of a dataclass as ``low=0.5, high=2``."""
    return mapping_text({f.name: getattr(item, f.name) for f in fields(item) if f.name not in tuple(leave_out)})


def mapping_text(values: Mapping[str, Any]) -> str:
    """``low=0.5, high=2``."""
    return ", ".join(f"{key}={number(v) if isinstance(v, float) else v}" for key, v in values.items()) or "-"


def _ratios(weights: Iterable[Weight], keep: Iterable[KeepTerm]) -> set[str]:
    return {weight.ratio for weight in weights} | {
        term.ratio for term in keep if not isinstance(term, GroupRejection | StalenessBound)
    }
